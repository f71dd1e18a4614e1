// The strip beside a token: a cell for each layer and KV head, filled where the token is held.

import { $, canvas2d, colour, percent } from "../shared/dom.js";

const CELL = 10;

export function showStrip(held, piece, share) {
  if (!held.lanes) return;
  const strip = $("strip"), last = piece.start + piece.count - 1;
  strip.hidden = false;
  const which = piece.count > 1 ? `tokens ${piece.start} to ${last}` : `token ${piece.start}`;
  $("strip-text").textContent =
    `${which}: held by ${percent(share)} of ${held.layers} layers x ${held.heads} heads`;
  paint(held, piece.start, last);
  const box = piece.span.getBoundingClientRect();
  const right = document.documentElement.clientWidth - strip.offsetWidth - 8;
  strip.style.left = `${Math.max(8, Math.min(box.left, right))}px`;
  const below = box.bottom + 8, room = window.innerHeight - strip.offsetHeight - 8;
  strip.style.top = `${below <= room ? below : Math.max(8, box.top - strip.offsetHeight - 8)}px`;
}

function paint(held, first, last) {
  const canvas = $("strip-cells");
  canvas.style.width = `${Math.max(held.heads * CELL, CELL)}px`;
  const [context] = canvas2d(canvas, held.layers * CELL);
  context.strokeStyle = colour("edge");
  context.fillStyle = colour("held");
  for (let lane = 0; lane < held.lanes; lane++) {
    let count = 0;
    for (let t = first; t <= last; t++) count += held.holds(lane, t);
    const x = (lane % held.heads) * CELL, y = Math.floor(lane / held.heads) * CELL;
    const side = CELL - 2, height = (side * count) / (last - first + 1 || 1);
    context.fillRect(x, y + side - height, side, height);
    context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
  }
}

export function hideStrip() {
  $("strip").hidden = true;
}
