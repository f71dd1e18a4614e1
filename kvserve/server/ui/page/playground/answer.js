// One answer on the screen: its text, formatted or by token, and beside it what its cache holds.

import { copy } from "../shared/clipboard.js";
import { bytes, count, el, fill, many, say } from "../shared/dom.js";
import { saving } from "../shared/saving.js";
import { HeldTokens } from "../tokens/held_tokens.js";
import { TokenView } from "../tokens/token_view.js";
import { Markdown } from "./markdown.js";
import { Run } from "./run.js";

export class Answer {
  /** `policy` is what the request says, or nothing for the server's own. */
  constructor(server, policy, showAs, { onGrow = () => {}, onChoose = () => {} } = {}) {
    Object.assign(this, { server, policy, onGrow });
    this.run = new Run(server);
    this.held = new HeldTokens();
    this.view = new TokenView(this.held);
    this.formatted = new Markdown();
    this.chip = el("button", {
      class: "chip", type: "button", "aria-controls": "cache", "aria-pressed": "false",
    }, this.name);
    this.pace = el("span", { class: "pace" });
    this.note = el("p", { class: "quiet", hidden: true });
    this.element = el("section", {
      class: "answer", "aria-label": `Answer under ${this.name}`,
      onclick: () => onChoose(this), onfocusin: () => onChoose(this),
    }, el("h3", {}, this.chip, this.pace), this.view.element, this.formatted.element, this.note);
    this.panel = this.makePanel();
    this.show("text");
    this.other.hidden = !server.kvTrace;
    this.colours = server.kvTrace && showAs === "tokens"; // once a token is dropped
  }

  makePanel() {
    this.share = el("strong");
    this.shareOf = el("span");
    this.figure = el("p", { class: "share", hidden: true }, this.share, this.shareOf);
    this.bars = ["Full cache", "Held"].map((name) => {
      const part = el("span"), words = el("output");
      const bar = el("span", { class: name === "Held" ? "bar" : "bar without", "aria-hidden": "true" }, part);
      return { part, words, all: [el("span", {}, name), bar, words] };
    });
    this.logPart = el("span", { class: "log" });
    this.bars[1].part.after(this.logPart);
    this.pair = el("div", { class: "pair", hidden: true }, ...this.bars.flatMap(({ all }) => all));
    this.counts = el("p", { class: "counts quiet" });
    this.other = el("button", {
      type: "button",
      onclick: () => {
        this.colours = false; // from now on it stays as it was chosen
        this.show(this.hidden);
      },
    });
    this.copy = el("button", {
      type: "button", onclick: () => copy(this.text).then((done) => say(this.copy, done)),
    }, "Copy");
    this.ended = el("div", { class: "row", hidden: true }, this.copy, this.other);
    return el("div", {}, this.figure, this.pair, this.counts, this.view.panel, this.ended);
  }

  /** An answer of an earlier visit: what is left of it is its text. */
  static saved(server, { text, name, note }, listeners) {
    const answer = new Answer({ ...server, kvTrace: false, policyName: name }, undefined, "text", listeners);
    answer.ended.hidden = false;
    answer.run.text = text;
    answer.formatted.write(text);
    say(answer.counts, "Of an answer of an earlier visit only the text is kept.");
    answer.remark(note);
    return answer;
  }

  get name() {
    return this.policy?.name ?? this.server.policyName;
  }

  get text() {
    return this.run.text;
  }

  remark(text) {
    this.note.hidden = !text;
    say(this.note, text ?? "");
  }

  choose(chosen) {
    this.element.classList.toggle("chosen", chosen);
    this.chip.setAttribute("aria-pressed", String(chosen));
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
        event: (event) => this.apply(event),
        text: (text, start, tokens) => this.grow(text, start, tokens),
      });
      this.account(this.run.usage.kv_cache_details);
    } catch (error) {
      this.fail(error);
    }
    if (!this.failed) this.end();
    this.onGrow();
  }

  /** Until a token is dropped all of them would look alike, and the text is easier to read. */
  apply(event) {
    this.view.apply(event);
    if (this.held.lost.size) this.colour();
  }

  /** Show it by token, unless the reader has chosen. */
  colour() {
    if (this.colours) this.show("tokens");
    this.colours = false;
  }

  grow(text, start, tokens) {
    if (this.server.kvTrace) this.view.reply.add(text, start, tokens);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.hidden === "tokens") this.formatted.writeSoon(this.text, this.run.thought);
      say(this.pace, this.progress());
      if (!this.memory) this.tellSoFar();
      this.onGrow();
    });
  }

  end() {
    const { run } = this, kv = run.usage?.kv_cache_details;
    say(this.pace, this.progress());
    this.ended.hidden = false;
    this.view.end(kv?.logical_tokens ?? run.tokens, kv?.remainder_entries ?? 0);
    if (this.hidden === "tokens") this.formatted.write(this.text, run.thought);
  }

  progress() {
    const { ids, speed } = this.run;
    return many(ids.length, "token") + (speed ? `, ${count(speed)} per second` : "");
  }

  /** What is held at the end and what the full cache would be, in bytes; the log of queries is held. */
  get memory() {
    const kv = this.run.usage?.kv_cache_details;
    return kv && {
      held: kv.held_bytes + kv.log_bytes, log: kv.log_bytes,
      all: Math.max(kv.logical_tokens * this.server.tokenBytes, kv.compactions ? 0 : kv.held_bytes),
      compacted: kv.compactions > 0,
    };
  }

  /** While the answer comes: what the trace says, the log of queries left out. */
  tellSoFar() {
    const { held, run, server } = this;
    if (!held.lanes) return;
    const tokens = held.entries(run.tokens) / held.lanes;
    this.tell({
      held: tokens * server.tokenBytes, log: 0, all: run.tokens * server.tokenBytes,
      compacted: held.lost.size > 0,
    });
    say(this.counts, `${count(tokens)} of ${count(run.tokens)} tokens so far, the query log left out.`);
  }

  tell(memory) {
    const { held, log, all } = memory, most = Math.max(held, all, 1);
    const [share, shareOf] = saving({ ...memory, keepsAll: this.name === "none" });
    this.figure.hidden = this.pair.hidden = false;
    say(this.share, share);
    say(this.shareOf, shareOf);
    const [full, kept] = this.bars;
    fill(full.part, all / most);
    fill(kept.part, (held - log) / most);
    fill(this.logPart, log / most);
    say(full.words, bytes(Math.round(all)));
    say(kept.words, bytes(Math.round(held)));
  }

  account(kv) {
    this.tell(this.memory);
    const parts = [`${count(kv.held_tokens)} of ${count(kv.logical_tokens)} tokens at the end`];
    if (kv.compactions) {
      parts.push(`${many(kv.compactions, "compaction")} released ${many(kv.blocks_released, "block")}`);
    }
    if (kv.log_bytes) parts.push(`hatched: ${bytes(kv.log_bytes)} for the query log`);
    say(this.counts, `${parts.join("; ")}.`);
    if (!this.held.lanes) return;
    const lanes = this.held.lanes * kv.logical_tokens;
    this.element.dataset.dropped = String(1 - this.held.entries(kv.logical_tokens) / lanes);
    this.element.dataset.usage = String(1 - kv.held_entries / lanes);
  }

  fail(error) {
    this.stopped = error.name === "AbortError";
    this.failed = !this.text;
    if (this.failed) say(this.counts, "No answer came.");
    if (this.failed) this.view.element.hidden = true;
    if (this.stopped) return this.remark("Stopped.");
    this.error = error;
    this.element.append(el("p", { class: "error", role: "alert" }, error.message));
  }
}
