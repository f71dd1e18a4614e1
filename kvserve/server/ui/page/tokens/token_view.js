// An answer by token (`element`), and beside it (`panel`) its prompt and a slider over the events.

import { count, el, many, percent, say } from "../shared/dom.js";
import { HeldTokens } from "./held_tokens.js";
import { TokenText } from "./token_text.js";

const STEP_MS = 700;
let views = 0;

export class TokenView {
  constructor(held) {
    this.held = held;
    this.prompt = new TokenText(held, "Prompt");
    this.reply = new TokenText(held, "Answer");
    this.promptSize = el("summary", {}, "Prompt, by token");
    const id = `events${views++}`;
    this.range = el("input", {
      type: "range", id, min: "1", step: "1", "aria-label": "Moment: after which event",
      oninput: () => this.seek(Number(this.range.value)),
    });
    this.play = el("button", { type: "button", onclick: () => this.toggle() }, "Play");
    this.what = el("output", { for: id });
    this.slider = el("div", { class: "slider", hidden: true }, this.play, this.range, this.what);
    this.sums = el("p", { class: "quiet sums", hidden: true });
    this.prompts = el("details", { hidden: true }, this.promptSize, this.prompt.element);
    this.element = this.reply.element;
    this.panel = el("div", {}, this.slider, this.sums, this.prompts);
  }

  setPrompt(texts) {
    texts.forEach((text, i) => this.prompt.add(text, i, 1));
    this.prompts.hidden = false;
    say(this.promptSize, `Prompt, by token (${count(texts.length)} tokens)`);
  }

  /** Follow an event of the trace while the answer comes. */
  apply(event) {
    const changed = this.held.apply(event);
    this.prompt.update(changed);
    this.reply.update(changed);
  }

  /** The answer has ended, and so many tokens have entered the cache: the newest has not. */
  end(tokens, remainders) {
    this.tokens = tokens;
    this.remainders = remainders;
    const moments = this.held.events.length;
    if (remainders) this.prompt.summed = this.reply.summed = true;
    this.slider.hidden = moments < 2;
    this.range.max = String(moments + 1);
    this.range.value = this.range.max;
    this.seek(moments + 1);
  }

  /** Moment k is the one after event k; the last moment is the end of the answer. */
  seek(moment) {
    const { events } = this.held, over = moment > events.length;
    const held = over ? this.held : HeldTokens.after(events, moment);
    const seen = over ? this.tokens : events[moment - 1].seen;
    this.prompt.show(held, seen);
    this.reply.show(held, seen);
    say(this.what, this.words(moment, held, seen, over));
    this.range.setAttribute("aria-valuetext", this.what.textContent);
    this.sum(held);
  }

  words(moment, held, seen, over) {
    const { events } = this.held;
    if (!over && events[moment - 1].reason === "start") return "At the start: the cache is empty.";
    const share = held.lanes && seen ? held.entries(seen) / (held.lanes * seen) : 1;
    const when = over ? "At the end" : `After event ${moment - 1} of ${events.length - 1}`;
    const { blocks_released: blocks } = over ? {} : events[moment - 1];
    return `${when}: ${count(seen)} tokens read, ${count(Math.ceil(seen * share - 1e-6))} held ` +
      `(${percent(share)})` + (blocks ? `; ${many(blocks, "block")} released` : "");
  }

  /** What the one entry in each head stands for. */
  sum(held) {
    const gone = held.gone.map((positions) => positions.size), most = Math.max(0, ...gone);
    this.sums.hidden = !(this.remainders && most);
    if (this.sums.hidden) return;
    const least = Math.min(...gone);
    say(this.sums, `In each of ${held.lanes} heads one more entry, the remainder, stands for ` +
      `${least === most ? count(most) : `${count(least)} to ${count(most)}`} dropped tokens ` +
      "(dotted line).");
  }

  toggle() {
    if (this.timer) return this.pause();
    say(this.play, "Pause");
    let moment = Number(this.range.value);
    if (moment >= Number(this.range.max)) moment = 0;
    const step = () => {
      this.range.value = String(++moment);
      this.seek(moment);
      if (moment >= Number(this.range.max)) this.pause();
    };
    this.timer = setInterval(step, STEP_MS);
    step();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    say(this.play, "Play");
  }
}
