// One answer on the screen: its text, formatted or by token, and what it cost.

import { copy } from "../shared/clipboard.js";
import { bytes, count, el, say } from "../shared/dom.js";
import { HeldTokens } from "../tokens/held_tokens.js";
import { TokenView } from "../tokens/token_view.js";
import { Markdown } from "./markdown.js";
import { Run } from "./run.js";

export class Answer {
  /** `policy` is what the request says, or nothing for the server's own. */
  constructor(server, policy, showAs, onGrow = () => {}) {
    Object.assign(this, { server, policy, onGrow });
    this.run = new Run(server);
    this.held = new HeldTokens();
    this.view = new TokenView(this.held);
    this.formatted = new Markdown();
    this.title = el("span", {}, this.name);
    this.pace = el("span", { class: "pace" });
    this.counts = el("p", { class: "counts" });
    this.other = el("button", { type: "button", onclick: () => this.show(this.hidden) });
    const button = el("button", {
      type: "button", onclick: () => copy(this.text).then((done) => say(button, done)),
    }, "Copy");
    // What comes at the end stands below, so that nothing moves while the text grows.
    this.ended = el("div", { hidden: true }, this.counts, el("div", { class: "row" }, button, this.other));
    this.element = el("section", { class: "answer", "aria-label": `Answer under ${this.name}` },
      el("h3", {}, this.title, " ", this.pace), this.view.element, this.formatted.element, this.ended);
    this.show(server.kvTrace ? showAs : "text");
    this.other.hidden = !server.kvTrace;
  }

  /** An answer of an earlier visit: what is left of it is its text. */
  static saved(server, { text, name, note }) {
    const answer = new Answer({ ...server, kvTrace: false }, undefined, "text");
    answer.savedName = name;
    answer.title.textContent = name;
    answer.ended.hidden = false;
    answer.run.text = text;
    answer.formatted.write(text);
    say(answer.counts, note ?? "");
    return answer;
  }

  get name() {
    return this.savedName ?? this.policy?.name ?? this.server.policyName;
  }

  get text() {
    return this.run.text;
  }

  show(how) {
    this.hidden = how === "tokens" ? "text" : "tokens";
    this.view.element.hidden = how !== "tokens";
    this.formatted.element.hidden = how === "tokens";
    say(this.other, how === "tokens" ? "Show formatted" : "Show by token");
    if (how === "text") this.formatted.write(this.text, this.run.thought);
  }

  /** Ask; what goes wrong is shown, and `failed` says that nothing was answered. */
  async ask(body, signal) {
    try {
      await this.run.follow({ ...body, kv_policy: this.policy }, signal, {
        prompt: (texts) => this.view.setPrompt(texts),
        event: (event) => this.view.apply(event),
        text: (text, start, tokens) => this.grow(text, start, tokens),
      });
      this.account(this.run.usage);
    } catch (error) {
      this.fail(error);
    }
    say(this.pace, this.progress());
    this.ended.hidden = false;
    this.view.end(this.run.tokens, this.run.usage?.kv_cache_details.remainder_entries ?? 0);
    if (this.hidden === "tokens") this.formatted.write(this.text, this.run.thought);
    this.onGrow();
  }

  grow(text, start, tokens) {
    if (this.server.kvTrace) this.view.reply.add(text, start, tokens);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.hidden === "tokens") this.formatted.writeSoon(this.text, this.run.thought);
      say(this.pace, this.progress());
      this.onGrow();
    });
  }

  progress() {
    const { ids, speed } = this.run;
    return `${count(ids.length)} tokens` + (speed ? `, ${count(speed)} per second` : "");
  }

  /** The same in bytes: what is held at the end, the log of queries included, and all of it. */
  get memory() {
    const kv = this.run.usage?.kv_cache_details;
    return kv && {
      held: kv.held_bytes + kv.log_bytes, all: kv.logical_tokens * this.server.tokenBytes,
    };
  }

  account(usage) {
    const kv = usage.kv_cache_details, { held, all } = this.memory;
    const parts = [
      `Cache at the end: ${count(kv.held_tokens)} of ${count(kv.logical_tokens)} tokens, ${bytes(held)}` +
        (kv.compactions ? ` instead of ${bytes(all)}` : ""),
    ];
    if (kv.compactions) {
      parts.push(`${count(kv.compactions)} compactions released ${count(kv.blocks_released)} blocks`);
    }
    if (this.held.lanes) {
      const lanes = this.held.lanes * kv.logical_tokens;
      this.counts.dataset.dropped = String(1 - this.held.entries(kv.logical_tokens) / lanes);
      this.counts.dataset.usage = String(1 - kv.held_entries / lanes);
    }
    say(this.counts, `${parts.join("; ")}.`);
  }

  fail(error) {
    this.stopped = error.name === "AbortError";
    this.failed = !this.text;
    if (this.stopped) return say(this.counts, "Stopped.");
    this.error = error;
    this.element.append(el("p", { class: "error", role: "alert" }, error.message));
  }
}
