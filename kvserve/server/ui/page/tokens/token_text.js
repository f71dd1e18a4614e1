// A text whose tokens are coloured by how much of them is held, and can be asked one by one.

import { el } from "../shared/dom.js";
import { hideStrip, showStrip } from "./strip.js";

export class TokenText {
  constructor(held, label) {
    this.held = held;
    this.seen = Infinity; // tokens from here on had not been read yet
    this.summed = false; // whether remainders stand for what is gone
    this.at = new Map(); // position -> the piece of text that it is part of
    this.pieces = [];
    this.current = -1;
    this.element = el("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": `${label}, by token`,
      onkeydown: (event) => this.onKey(event),
      onpointerover: (event) => this.onPointer(event),
      onpointerleave: () => this.leave(),
      onblur: () => this.leave(),
    });
  }

  /** Text that `count` tokens from `start` on have become. */
  add(text, start, count) {
    if (!text && this.pieces.length) {
      const last = this.pieces.at(-1);
      last.count += count;
      for (let t = start; t < start + count; t++) this.at.set(t, last);
      return;
    }
    const span = el("span", { class: "token" }, text);
    const piece = { span, start, count, number: this.pieces.length };
    span.piece = piece;
    this.pieces.push(piece);
    for (let t = start; t < start + count; t++) this.at.set(t, piece);
    this.element.append(span);
    this.paint(piece);
  }

  /** Colour the pieces anew that hold these positions. */
  update(positions) {
    for (const piece of new Set([...positions].map((t) => this.at.get(t)))) {
      if (piece) this.paint(piece);
    }
    if (this.current >= 0 && document.activeElement === this.element) this.tell(this.current);
  }

  /** Show another moment: what was held then of the first `seen` tokens. */
  show(held, seen) {
    Object.assign(this, { held, seen });
    for (const piece of this.pieces) this.paint(piece);
  }

  /** Mark the pieces of these positions: another answer says something else there. */
  mark(positions) {
    for (const t of positions) this.at.get(t)?.span.classList.add("differs");
  }

  share(piece) {
    let sum = 0;
    for (let t = piece.start; t < piece.start + piece.count; t++) sum += this.held.share(t);
    return piece.count ? sum / piece.count : 1;
  }

  paint(piece) {
    const share = this.share(piece), { classList, style } = piece.span;
    const later = piece.start >= this.seen;
    style.setProperty("--held-share", `${Math.round(share * 100)}%`);
    classList.toggle("later", later);
    classList.toggle("some", share < 1 && !later);
    classList.toggle("gone", share === 0 && !later);
    classList.toggle("summed", this.summed);
  }

  onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const last = this.pieces.length - 1;
    const ends = { Home: 0, End: last };
    if (event.key === "Escape") return this.leave();
    if (!(event.key in steps) && !(event.key in ends)) return;
    event.preventDefault();
    const to = ends[event.key] ?? this.current + steps[event.key];
    this.tell(Math.max(0, Math.min(last, to)));
  }

  onPointer(event) {
    if (event.target.piece) this.tell(event.target.piece.number);
  }

  tell(number) {
    const piece = this.pieces[number];
    if (!piece) return;
    this.pieces[this.current]?.span.classList.remove("current");
    this.current = number;
    piece.span.classList.add("current");
    showStrip(this.held, piece, this.share(piece));
  }

  leave() {
    this.pieces[this.current]?.span.classList.remove("current");
    hideStrip();
  }
}
