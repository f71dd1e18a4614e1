// One conversation under one policy: what was said, what is held of it, and what it cost.

import { ServerError, events, json } from "./api.js";
import { bytes, el, percent } from "./dom.js";
import { HeldTokens } from "./held_tokens.js";
import { PolicyForm } from "./policy_form.js";
import { TokenText } from "./token_text.js";

export class Pane {
  constructor(title, server, onAnswer) {
    this.server = server;
    this.onAnswer = onAnswer;
    this.form = new PolicyForm(server.policies);
    this.log = el("div", { class: "log", "aria-label": `${title}: conversation`, role: "log" });
    this.element = el("section", { class: "pane", "aria-label": title },
      el("h3", {}, title), this.form.element, this.log);
    this.clear();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
  }

  stop() {
    this.abort?.abort();
  }

  /** Ask, stream the answer, and follow what becomes of its tokens. */
  async send(text, settings) {
    this.abort = new AbortController();
    const turn = [...this.messages, { role: "user", content: text }];
    const answer = new Answer(this.server);
    this.log.append(answer.element);
    try {
      await answer.follow({
        ...settings,
        model: this.server.model,
        messages: turn,
        kv_policy: this.form.value,
      }, this.abort.signal);
      // Kept only now: what was refused is no part of the conversation.
      this.messages = [...turn, { role: "assistant", content: answer.text }];
    } catch (error) {
      answer.fail(error);
    }
    answer.element.scrollIntoView({ block: "nearest" });
    if (answer.id) this.onAnswer(answer);
  }
}

class Answer {
  constructor(server) {
    this.server = server;
    this.held = new HeldTokens();
    this.prompt = new TokenText(this.held, "Prompt");
    this.reply = new TokenText(this.held, "Answer");
    this.text = "";
    this.counts = el("p", { class: "counts", role: "status" });
    this.element = el("article", {},
      el("h4", {}, "Prompt"), this.prompt.element,
      el("h4", {}, "Answer"), this.reply.element, this.counts);
  }

  async follow(body, signal) {
    const { model, messages } = body;
    const told = await json("tokenize", {
      body: { model, messages, return_token_strs: true }, signal,
    });
    told.token_strs.forEach((text, i) => this.prompt.add(text, i, 1));
    this.tokens = told.count;
    const asked = {
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
      ...(this.server.kvTrace && { kv_trace: true }),
    };
    for await (const chunk of events("v1/chat/completions", { body: asked, signal })) {
      if (chunk.error) throw new ServerError(500, chunk.error);
      this.id = chunk.id;
      this.policy = body.kv_policy?.name ?? this.server.policies.default;
      for (const choice of chunk.choices) this.take(choice);
      if (chunk.usage) this.account(chunk.usage);
    }
  }

  take(choice) {
    for (const event of choice.kv_trace ?? []) {
      const changed = this.held.apply(event);
      this.prompt.update(changed);
      this.reply.update(changed);
      this.count();
    }
    const text = choice.delta.content ?? choice.delta.reasoning_content ?? "";
    const count = choice.token_ids?.length ?? 0;
    if (text || count) this.reply.add(text, this.tokens, count);
    this.text += choice.delta.content ?? "";
    this.tokens += count;
  }

  /** While it streams: what the events have left so far. */
  count() {
    if (!this.held.lanes) return;
    const share = this.held.entries(this.tokens) / (this.held.lanes * this.tokens);
    this.counts.textContent = `${this.tokens} tokens, ${percent(share)} of their entries held`;
  }

  account(usage) {
    const kv = usage.kv_cache_details;
    this.usage = usage;
    const parts = [
      `${usage.prompt_tokens} + ${usage.completion_tokens} tokens`,
      `${kv.policy}: ${kv.held_tokens} of ${kv.logical_tokens} held`,
      `${kv.compactions} compactions, ${kv.blocks_released} blocks released`,
      `${bytes(kv.held_bytes)} at the end`,
    ];
    if (kv.remainder_entries) parts.push("one entry in each head stands for what it dropped");
    if (this.held.lanes) {
      const all = this.held.lanes * kv.logical_tokens;
      const grey = 1 - this.held.entries(kv.logical_tokens) / all;
      parts.push(`${percent(grey)} of all entries grey`);
      this.counts.dataset.grey = String(grey);
      this.counts.dataset.usage = String(1 - kv.held_entries / all);
    }
    this.counts.textContent = parts.join("; ");
  }

  fail(error) {
    if (error.name === "AbortError") this.counts.textContent += " Stopped.";
    else this.element.append(el("p", { class: "error", role: "alert" }, error.message));
  }
}
