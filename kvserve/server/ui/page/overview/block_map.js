// All blocks of the pool, a cell each, and ghosts of those that a compaction has just released.

import { $, canvas2d, colour, count, el, many, paced, say } from "../shared/dom.js";
import { drawMark, GHOST, Marks, NAMES, REQUEST } from "./marks.js";

const HEIGHT = 230, LARGEST = 30, SMALLEST = 3; // pixels: of the map where that is enough, of a cell
const GHOST_MS = 3000;
const LEGEND = [
  [REQUEST, "a running request"], [GHOST, "just released"], [1, NAMES[1]], [2, NAMES[2]],
  [3, NAMES[3]], [0, NAMES[0]],
];
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** The owner of every cell, from `owner, cells, owner, cells, ...`. */
export function ownersOf(runs) {
  let size = 0;
  for (let i = 1; i < runs.length; i += 2) size += runs[i];
  const owners = new Int32Array(size);
  for (let i = 0, at = 0; i < runs.length; at += runs[i + 1], i += 2) {
    owners.fill(runs[i], at, at + runs[i + 1]);
  }
  return owners;
}

/** Columns for cells that fill the map and are not too small; of near ones, those that fill the last row. */
export function columnsFor(cells, width) {
  const fit = Math.floor(Math.sqrt((width * HEIGHT) / cells));
  const least = Math.floor(width / Math.max(SMALLEST, Math.min(LARGEST, fit)));
  const most = Math.min(Math.floor(least * 1.15), Math.floor(width / SMALLEST));
  let best = least;
  for (let columns = least; columns <= most; columns++) {
    if ((-cells % columns) > (-cells % best)) best = columns;
  }
  return best;
}

export class BlockMap {
  constructor(names) {
    this.names = names;
    this.canvas = $("cells");
    this.ghosts = new Map(); // cell -> [whose it was, when it was released]
    this.owners = new Int32Array(0);
    this.ids = [];
    this.legend = LEGEND.map(([kind, name]) => {
      const mark = el("canvas", { class: "mark", "aria-hidden": "true" });
      return { kind, mark, item: el("span", { hidden: kind === 3 }, mark, el("span", {}, name)) };
    });
    $("legend").append(...this.legend.map(({ item }) => item));
    this.draw = paced(() => this.paint());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.tell());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  /** `bits` names the form of entries that are stored in fewer bits, or is empty. */
  show(event, bits) {
    Object.assign(this, { event, bits });
    this.tell();
    $("pool").hidden = $("legend").hidden = !event.cells;
    if (!event.cells) return;
    const owners = ownersOf(event.cells.runs), ids = event.requests.map((one) => one.request_id);
    this.haunt(owners, new Set(ids));
    Object.assign(this, { owners, ids, perCell: event.cells.blocks_per_cell });
    if (owners.includes(3)) this.legend[4].item.hidden = false;
    say(this.legend[0].item.lastChild, bits ? `a running request, in fewer bits (${bits})` : LEGEND[0][1]);
    this.draw();
  }

  /** How much of the pool is in use, and what a cell is. */
  tell() {
    const { blocks_total: total, blocks_free: free, blocks_cached: cached, cells, recorded } = this.event ?? {};
    if (total === undefined) return;
    say($("counts"), `${count(total - free - cached)} of ${count(total)} blocks in use${recorded ? ", recorded" : ""}` +
      (cached ? `, ${count(cached)} with cached prompts, given up when needed` : ""));
    const each = cells?.blocks_per_cell ?? 1;
    say($("cell"), !cells ? "With replicas the blocks are not shown one by one."
      : each > 1 ? `A cell stands for ${each} blocks and shows the first of them; the others are left out.`
        : "A cell is a block. Point at one to see whose it is.");
  }

  /** Blocks that a request had, and no longer has while it still runs: compaction released them. */
  haunt(owners, running) {
    if (owners.length !== this.owners.length) this.ghosts.clear();
    const now = performance.now();
    for (let cell = 0; cell < owners.length; cell++) {
      const before = this.owners[cell];
      if (owners[cell]) this.ghosts.delete(cell);
      else if (before >= REQUEST) {
        const id = this.ids[before - REQUEST];
        if (running.has(id)) this.ghosts.set(cell, [id, now]);
      }
    }
  }

  paint() {
    const width = this.canvas.clientWidth, { length } = this.owners;
    if (!width || !length) return;
    this.columns = columnsFor(length, width);
    this.step = width / this.columns;
    const [context] = canvas2d(this.canvas, Math.ceil(Math.ceil(length / this.columns) * this.step));
    const marks = new Marks(context, Math.floor(this.step) - (this.step > 5 ? 2 : 1), Boolean(this.bits));
    const hues = this.ids.map((id) => this.names.colour(id));
    let used = 0;
    for (let cell = 0; cell < length; cell++) {
      const owner = this.owners[cell];
      used += owner >= REQUEST;
      marks.cell(...this.place(cell), Math.min(owner, REQUEST), hues[owner - REQUEST]);
    }
    this.paintGhosts(marks);
    this.canvas.setAttribute("aria-label",
      `${many(length, "cell")}, ${count(used)} of them keys and values of requests, ` +
      `${this.ghosts.size} just released`);
    for (const { kind, mark } of this.legend) {
      if (mark.clientWidth) drawMark(mark, kind, colour("request"), Boolean(this.bits));
    }
  }

  place(cell) {
    const column = cell % this.columns, row = Math.floor(cell / this.columns);
    return [Math.round(column * this.step), Math.round(row * this.step)];
  }

  paintGhosts(marks) {
    const now = performance.now();
    for (const [cell, [id, since]] of this.ghosts) {
      const age = (now - since) / GHOST_MS;
      if (age >= 1) this.ghosts.delete(cell);
      else marks.cell(...this.place(cell), GHOST, this.names.colour(id), still.matches ? 0 : age);
    }
    clearTimeout(this.later);
    if (this.ghosts.size) this.later = setTimeout(() => this.draw(), still.matches ? GHOST_MS : 100);
  }

  point(event) {
    const { length } = this.owners;
    const cell = Math.floor(event.offsetY / this.step) * this.columns +
      Math.floor(event.offsetX / this.step);
    if (!length || cell >= length) return;
    const owner = this.owners[cell], ghost = this.ghosts.get(cell);
    const id = owner >= REQUEST ? this.ids[owner - REQUEST] : ghost?.[0];
    const whose = id === undefined ? NAMES[owner]
      : `${ghost ? "just released by " : ""}${this.names.of(id)} (${id})`;
    const first = cell * this.perCell + 1;
    const which = this.perCell > 1 ? `Blocks from ${first}, the first of them` : `Block ${first}`;
    say($("cell"), `${which}: ${whose}`);
  }
}
