// Requests by a short name, #1, #2, ..., and a colour that nothing else has.

import { isDark } from "./theme.js";

const MOST = 2000;
// Amber and violet belong to the query log and the codebook, grey to the cached prefix.
const ARCS = [[110, 265], [330, 395]];
const WIDE = ARCS.reduce((sum, [from, to]) => sum + to - from, 0);

/** The n-th hue: far from those before it, and inside the arcs. */
function hue(n) {
  let at = (40 + n * 0.618034 * WIDE) % WIDE;
  for (const [from, to] of ARCS) {
    if (at < to - from) return (from + at) % 360;
    at -= to - from;
  }
  return ARCS[0][0];
}

export class RequestNames {
  constructor() {
    this.numbers = new Map();
    this.next = 1;
    this.forgetColours();
  }

  number(id) {
    if (!this.numbers.has(id)) {
      this.numbers.set(id, this.next++);
      if (this.numbers.size > MOST) {
        this.numbers.delete(this.numbers.keys().next().value);
        this.forgetColours();
      }
    }
    return this.numbers.get(id);
  }

  of(id) {
    return `#${this.number(id)}`;
  }

  /** Of one lightness, so that every hue stands out from the paper alike. */
  colour(id) {
    if (!this.colours.has(id)) {
      const [lightness, chroma] = isDark() ? [0.76, 0.13] : [0.52, 0.15];
      this.colours.set(id, `oklch(${lightness} ${chroma} ${hue(this.number(id) - 1).toFixed(1)})`);
    }
    return this.colours.get(id);
  }

  /** The theme has changed, or a request's number is given up. */
  forgetColours() {
    this.colours = new Map();
  }
}
