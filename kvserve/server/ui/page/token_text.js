// A text whose tokens are coloured by how much of them is held, and can be asked one by one.

import { $, canvas2d, colour, el, percent } from "./dom.js";

export class TokenText {
  constructor(held, label) {
    this.held = held;
    this.label = label;
    this.at = new Map(); // position -> the piece of text that it is part of
    this.pieces = [];
    this.current = -1;
    this.element = el("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": `${label}, by token`,
      onkeydown: (event) => this.onKey(event),
      onpointerover: (event) => this.onPointer(event),
      onpointerleave: () => hideStrip(),
      onblur: () => hideStrip(),
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

  share(piece) {
    let sum = 0;
    for (let t = piece.start; t < piece.start + piece.count; t++) sum += this.held.share(t);
    return piece.count ? sum / piece.count : 1;
  }

  paint(piece) {
    const share = this.share(piece);
    piece.span.style.setProperty("--held", `${Math.round(share * 100)}%`);
    piece.span.classList.toggle("some", share < 1);
    piece.span.classList.toggle("gone", share === 0);
  }

  onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const last = this.pieces.length - 1;
    const ends = { Home: 0, End: last };
    if (event.key === "Escape") return hideStrip();
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
}

/** The strip of layers x KV heads of one token, beside it. */
function showStrip(held, piece, share) {
  if (!held.lanes) return;
  const strip = $("strip"), canvas = $("strip-cells"), cell = 10;
  strip.hidden = false;
  const last = piece.start + piece.count - 1;
  const which = piece.count > 1 ? `tokens ${piece.start} to ${last}` : `token ${piece.start}`;
  $("strip-text").textContent =
    `${which}: held by ${percent(share)} of ${held.layers} layers x ${held.heads} heads`;
  canvas.style.width = `${Math.max(held.heads * cell, cell)}px`;
  const [context] = canvas2d(canvas, held.layers * cell);
  const [there, away] = [colour("held"), colour("dropped")];
  for (let lane = 0; lane < held.lanes; lane++) {
    let count = 0;
    for (let t = piece.start; t <= last; t++) count += held.holds(lane, t);
    const x = (lane % held.heads) * cell, y = Math.floor(lane / held.heads) * cell;
    context.globalAlpha = 1;
    context.fillStyle = away;
    context.fillRect(x, y, cell - 1, cell - 1);
    context.globalAlpha = count / Math.max(piece.count, 1);
    context.fillStyle = there;
    context.fillRect(x, y, cell - 1, cell - 1);
  }
  const box = piece.span.getBoundingClientRect();
  const right = document.documentElement.clientWidth - strip.offsetWidth - 8;
  strip.style.left = `${Math.max(8, Math.min(box.left, right))}px`;
  const below = box.bottom + 8, room = window.innerHeight - strip.offsetHeight - 8;
  strip.style.top = `${below <= room ? below : Math.max(8, box.top - strip.offsetHeight - 8)}px`;
}

function hideStrip() {
  $("strip").hidden = true;
}
