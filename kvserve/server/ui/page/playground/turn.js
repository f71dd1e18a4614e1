// One turn on the screen: what was said, and an answer for each policy that was asked.

import { el, say } from "../shared/dom.js";
import { differences, verdict } from "./differences.js";

export class Turn {
  constructor(text, answers, { onEdit, onAgain }) {
    Object.assign(this, { text, answers });
    this.compared = el("p", { class: "verdict", role: "status", hidden: answers.length < 2 });
    this.again = el("button", { class: "plain", type: "button", onclick: () => onAgain(this) }, "Regenerate");
    this.element = el("article", { class: "turn" },
      el("div", { class: "said", tabindex: "0" }, text),
      el("div", { class: "row" },
        el("button", { class: "plain", type: "button", onclick: () => onEdit(this) }, "Edit"), this.again),
      el("div", { class: answers.length > 1 ? "answers two" : "answers" },
        ...answers.map((answer) => answer.element)),
      this.compared);
  }

  /** Mark where two answers differ. */
  compare() {
    if (this.answers.length < 2 || this.answers.some(({ run }) => !run.usage)) return;
    const found = differences(...this.answers.map(({ run }) => run.ids));
    this.answers.forEach(({ view, run }, i) =>
      view.reply.mark(found[i].map((index) => run.tokens - run.ids.length + index)));
    say(this.compared, verdict(found));
    if (this.answers.some(({ hidden }) => hidden === "text")) this.answers.forEach((one) => one.colour());
  }

  /** What is kept of it; nothing if nobody answered. */
  get saved() {
    const answers = this.answers.filter(({ failed }) => !failed)
      .map(({ name, text, stopped }) => ({ name, text, note: stopped ? "Stopped." : "" }));
    return answers.length ? { text: this.text, answers } : null;
  }

  /** The messages of a column; a policy that did not answer goes on from what the first one said. */
  messages(column) {
    const { answers } = this;
    const answer = [answers[column], ...answers].find((one) => one && !one.failed);
    if (!answer) return [];
    return [
      { role: "user", content: this.text }, { role: "assistant", content: answer.text },
    ];
  }
}
