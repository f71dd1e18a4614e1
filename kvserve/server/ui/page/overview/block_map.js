// The blocks of the pool up to the last one in use, a cell each, and ghosts of those just released.

import { $, canvas2d, colour, count, fill, paced, say } from "../shared/dom.js";

const NAMES = ["free", "cached prefix", "query log", "codebook"];
const COLOURS = ["edge", "cached", "logged", "coded"];
const FIRST_REQUEST = 4;
const HEIGHT = 180, LARGEST = 30, SMALLEST = 3, LEAST_CELLS = 120;
const GHOST_MS = 3000;
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

export class BlockMap {
  constructor(names) {
    this.names = names;
    this.canvas = $("cells");
    this.ghosts = new Map(); // cell -> [whose it was, when it was released]
    this.owners = new Int32Array(0);
    this.ids = [];
    this.shown = LEAST_CELLS;
    this.draw = paced(() => this.paint());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => say($("cell"), ""));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  show(event) {
    this.tell(event);
    if (!event.cells) {
      say($("cell"), "With replicas the blocks are not shown one by one.");
      return;
    }
    const owners = ownersOf(event.cells.runs), ids = event.requests.map((one) => one.request_id);
    this.haunt(owners, new Set(ids));
    Object.assign(this, { owners, ids, perCell: event.cells.blocks_per_cell });
    let last = owners.length;
    while (last && !owners[last - 1]) last--;
    // Grows by half more at a time, so that cells seldom change their size.
    if (last > this.shown) this.shown = Math.min(owners.length, Math.ceil(last * 1.5));
    this.draw();
  }

  tell(event) {
    const { blocks_total: total, blocks_free: free, blocks_cached: cached } = event;
    const used = total - free - cached;
    say($("counts"), `${count(used)} of ${count(total)} blocks in use` +
      (cached ? `, ${count(cached)} with cached prompts, given up when needed` : ""));
    fill($("capacity-used"), used / total);
    fill($("capacity-cached"), cached / total);
    $("capacity").setAttribute("aria-label", `${count(used)} of ${count(total)} blocks in use`);
  }

  /** Blocks that a request had, and no longer has while it still runs: compaction released them. */
  haunt(owners, running) {
    if (owners.length !== this.owners.length) this.ghosts.clear();
    const now = performance.now();
    for (let cell = 0; cell < owners.length; cell++) {
      const before = this.owners[cell];
      if (owners[cell]) this.ghosts.delete(cell);
      else if (before >= FIRST_REQUEST) {
        const id = this.ids[before - FIRST_REQUEST];
        if (running.has(id)) this.ghosts.set(cell, [id, now]);
      }
    }
  }

  paint() {
    const width = this.canvas.clientWidth;
    if (!width || !this.owners.length) return;
    const cells = Math.min(this.shown, this.owners.length);
    const fit = Math.floor(Math.sqrt((width * HEIGHT) / cells));
    this.size = Math.max(SMALLEST, Math.min(LARGEST, fit));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const rows = Math.min(Math.ceil(cells / this.columns), Math.floor(HEIGHT / this.size));
    const [context] = canvas2d(this.canvas, HEIGHT);
    const used = this.paintCells(context, Math.min(cells, rows * this.columns));
    this.paintGhosts(context);
    const { length } = this.owners;
    this.canvas.setAttribute("aria-label",
      `${count(length)} cells, ${count(used)} of them keys and values of requests, ` +
      `${this.ghosts.size} just released`);
  }

  /** All cells up to `end`; returns how many of them are keys and values of requests. */
  paintCells(context, end) {
    const colours = [...COLOURS.map(colour), ...this.ids.map((id) => this.names.colour(id))];
    const paper = colour("paper");
    let used = 0, before = -1;
    for (let cell = 0; cell < end; cell++) {
      const owner = this.owners[cell];
      used += owner >= FIRST_REQUEST;
      // Canvases parse a colour each time that one is set.
      if (owner !== before) context.fillStyle = colours[owner];
      before = this.cell(context, cell, owner, paper) ? -1 : owner;
    }
    return used;
  }

  place(cell) {
    return [(cell % this.columns) * this.size, Math.floor(cell / this.columns) * this.size];
  }

  /** Kinds differ in their patterns too, where there is room; whether that took another colour. */
  cell(context, cell, owner, paper) {
    const [x, y] = this.place(cell), side = this.size - (this.size > 4 ? 1.5 : 1);
    const third = side / 3, roomy = this.size >= 6;
    if (!owner) {
      if (roomy && !this.ghosts.has(cell)) context.fillRect(x + third, y + third, third, third);
      return false;
    }
    context.fillRect(x, y, side, side);
    if (owner >= FIRST_REQUEST || !roomy) return false;
    context.fillStyle = paper;
    if (owner === 1) context.fillRect(x + third, y + third, third, third);
    else if (owner === 2) context.fillRect(x, y + third, side, third);
    else context.fillRect(x + third, y, third, side);
    return true;
  }

  paintGhosts(context) {
    const now = performance.now();
    for (const [cell, [id, since]] of this.ghosts) {
      const age = (now - since) / GHOST_MS;
      if (age >= 1) {
        this.ghosts.delete(cell);
        continue;
      }
      const [x, y] = this.place(cell), side = this.size - 2;
      context.globalAlpha = still.matches ? 1 : 1 - age;
      context.strokeStyle = this.names.colour(id);
      context.lineWidth = Math.min(2, this.size / 4);
      context.setLineDash([this.size / 4, this.size / 6]);
      context.strokeRect(x + 1, y + 1, side - 1, side - 1);
    }
    context.globalAlpha = 1;
    context.setLineDash([]);
    clearTimeout(this.later);
    if (this.ghosts.size) this.later = setTimeout(() => this.draw(), still.matches ? GHOST_MS : 100);
  }

  point(event) {
    if (!this.owners.length) return;
    const cell = Math.floor(event.offsetY / this.size) * this.columns +
      Math.floor(event.offsetX / this.size);
    if (cell >= Math.min(this.shown, this.owners.length)) return;
    const owner = this.owners[cell], ghost = this.ghosts.get(cell);
    const id = owner >= FIRST_REQUEST ? this.ids[owner - FIRST_REQUEST] : ghost?.[0];
    const whose = id === undefined ? NAMES[owner]
      : `${ghost ? "just released by " : ""}${this.names.of(id)} (${id})`;
    const first = cell * this.perCell + 1;
    const which = this.perCell > 1 ? `blocks from ${first}, the first of them` : `block ${first}`;
    say($("cell"), `${which}: ${whose}`);
  }
}
