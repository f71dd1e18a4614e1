// The one set of marks: what a block is held for, as a cell of the map, of its legend and of the table.

import { canvas2d, colour } from "../shared/dom.js";

export const NAMES = ["free", "cached prefix", "query log", "codebook"];
const COLOURS = ["free", "cached", "logged", "coded"];
export const REQUEST = 4, GHOST = 5; // kinds; those before are the owners that are no requests
const ROUND = 10, ROOMY = 6; // pixels of a cell from which on corners are round, kinds have patterns

/** Draws cells of `side` pixels; `fewer` says that entries are stored in fewer bits. */
export class Marks {
  constructor(context, side, fewer) {
    Object.assign(this, { context, side, fewer });
    this.paper = colour("paper");
    this.own = COLOURS.map(colour);
  }

  /** A cell of this kind; `hue` is the colour of its request, `age` that of a ghost, from 0 to 1. */
  cell(x, y, kind, hue, age = 0) {
    const { context, side } = this, third = side / 3;
    if (kind === GHOST) return this.ghost(x, y, hue, age);
    const lowered = kind === REQUEST && this.fewer;
    if (lowered) context.globalAlpha = 0.4;
    this.box(x, y, kind === REQUEST ? hue : this.own[kind]);
    context.globalAlpha = 1;
    if (lowered) this.fill(hue, x, y + side * 0.55, side, side * 0.45);
    if (kind === 0 || kind === REQUEST || side < ROOMY) return;
    if (kind === 1) this.fill(this.paper, x + third, y + third, third, third);
    else if (kind === 2) this.slant(x, y, third / 2);
    else this.fill(this.paper, x + third, y, third, side);
  }

  /** A line from corner to corner, as a hatched area has them. */
  slant(x, y, half) {
    const { context, side } = this;
    this.use(this.paper);
    context.beginPath();
    context.moveTo(x, y + side);
    context.lineTo(x, y + side - half);
    context.lineTo(x + side - half, y);
    context.lineTo(x + side, y);
    context.lineTo(x + side, y + half);
    context.lineTo(x + half, y + side);
    context.fill();
  }

  ghost(x, y, hue, age) {
    const { context, side } = this;
    this.box(x, y, this.own[0]);
    context.globalAlpha = 1 - age;
    context.strokeStyle = hue;
    context.lineWidth = Math.max(1, Math.min(2, side / 5));
    context.setLineDash([side / 4, side / 6]);
    context.strokeRect(x + 1, y + 1, side - 2, side - 2);
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  box(x, y, hue) {
    if (this.side < ROUND) return this.fill(hue, x, y, this.side, this.side);
    this.use(hue);
    this.context.beginPath();
    this.context.roundRect(x, y, this.side, this.side, this.side / 5);
    this.context.fill();
  }

  fill(hue, ...place) {
    this.use(hue);
    this.context.fillRect(...place);
  }

  /** Canvases parse a colour each time that one is set. */
  use(hue) {
    if (hue !== this.before) this.context.fillStyle = this.before = hue;
  }
}

/** One mark on a canvas of its own. */
export function drawMark(canvas, kind, hue, fewer) {
  const [context, width] = canvas2d(canvas, canvas.clientWidth);
  new Marks(context, width, fewer).cell(0, 0, kind, hue);
}
