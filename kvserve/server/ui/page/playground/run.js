// One request of this page: sends it, follows its stream, and counts what comes.

import { ServerError, events, json } from "../shared/api.js";

export class Run {
  constructor(server) {
    this.server = server;
    this.text = "";
    this.thought = ""; // reasoning, where the server tells it apart
    this.ids = [];
    this.tokens = 0; // of prompt and answer
  }

  /** Ask, and tell `on` of the prompt's tokens, of events, of new text, and of the usage. */
  async follow(body, signal, on) {
    const { model, messages } = body;
    if (this.server.kvTrace) {
      const told = await json("tokenize", {
        body: { model, messages, return_token_strs: true }, signal,
      });
      this.tokens = this.promptTokens = told.count;
      on.prompt(told.token_strs);
    }
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
      for (const choice of chunk.choices) this.take(choice, on);
      if (chunk.usage) this.usage = chunk.usage;
    }
  }

  take(choice, on) {
    for (const event of choice.kv_trace ?? []) on.event(event);
    const { content, reasoning_content: thought } = choice.delta;
    const ids = choice.token_ids ?? [];
    if (ids.length) {
      this.last = performance.now();
      this.first ??= [this.last, ids.length];
    }
    const text = content ?? thought ?? "", start = this.tokens;
    this.text += content ?? "";
    this.thought += thought ?? "";
    this.ids.push(...ids);
    this.tokens += ids.length;
    if (text || ids.length) on.text(text, start, ids.length);
  }

  /** Tokens per second between the first and the last that came; null for want of two. */
  get speed() {
    if (!this.first || this.last <= this.first[0]) return null;
    return (1000 * (this.ids.length - this.first[1])) / (this.last - this.first[0]);
  }
}
