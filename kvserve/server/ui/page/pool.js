// The pool as it is now: every block a cell, who runs and what they hold, and the last minutes.

import { Chart } from "./chart.js";
import { $, bytes, canvas2d, colour, el, percent } from "./dom.js";

const MINUTES = 3;
const NAMES = ["free", "cached prefix", "logged queries", "codes"];
const COLOURS = ["free", "cached", "logged", "coded"];
export const FIRST_REQUEST = 4;

const pairs = (flat) => flat.flatMap((owner, i) => (i % 2 ? [] : [[owner, flat[i + 1]]]));

/** What conversations have gone on from, where they may (--continuations). */
function goneOn({ count, resumed_total, misses }) {
  const missed = Object.values(misses).reduce((sum, n) => sum + n, 0);
  if (!(count || resumed_total || missed)) return "";
  return `; ${count.toLocaleString()} continuations kept, ${resumed_total.toLocaleString()} of ` +
    `${(resumed_total + missed).toLocaleString()} conversations went on from one`;
}

/** Requests keep their colour as long as they are seen. */
export class RequestColours {
  constructor() {
    this.hues = new Map();
    this.next = 0;
  }

  of(id) {
    if (!this.hues.has(id)) {
      this.hues.set(id, (this.next++ * 137.5) % 360);
      if (this.hues.size > 2000) this.hues.delete(this.hues.keys().next().value);
    }
    return `hsl(${this.hues.get(id)} 65% 50%)`;
  }
}

export class PoolPanel {
  constructor(colours, onRequest) {
    this.colours = colours;
    this.onRequest = onRequest;
    this.canvas = $("cells");
    this.history = [];
    this.rows = new Map();
    this.rate = new Chart("Tokens", { generated: "one", prompt: "two" }, "/s");
    this.load = new Chart("Requests", { running: "one", waiting: "two" });
    this.moves = new Chart("In these minutes", { preemptions: "one", swaps: "two" });
    $("charts").append(this.rate.element, this.load.element, this.moves.element);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => ($("cell").textContent = ""));
    new ResizeObserver(() => this.drawCells()).observe(this.canvas.parentElement);
  }

  show(event) {
    this.event = event;
    if (event.cells) this.cells = { ...event.cells, runs: pairs(event.cells.runs) };
    this.requests = event.cells ? event.requests : this.requests;
    const used = event.blocks_total - event.blocks_free - event.blocks_cached;
    $("counts").textContent =
      `${used.toLocaleString()} of ${event.blocks_total.toLocaleString()} blocks in use, ` +
      `${event.blocks_cached.toLocaleString()} cached, ` +
      `${event.blocks_free.toLocaleString()} free; ` +
      `${bytes(event.bytes_held)} of ${bytes(event.bytes_total)}`;
    const share = event.tokens_logical ? event.tokens_held / event.tokens_logical : 1;
    $("held").textContent =
      `${event.num_running} running, ${event.num_waiting} waiting; ` +
      `${event.tokens_held.toLocaleString()} of ${event.tokens_logical.toLocaleString()} tokens ` +
      `held (${percent(share)}); ${event.compactions_total.toLocaleString()} compactions released ` +
      `${event.blocks_released_total.toLocaleString()} blocks` + goneOn(event.continuations);
    this.remember(event);
    this.drawCells();
    this.list(event.requests);
  }

  remember(event) {
    this.history.push(event);
    const oldest = event.time - 60 * MINUTES;
    while (this.history[0].time < oldest) this.history.shift();
    const points = this.history, first = points[0];
    const rates = points.slice(1).map((now, i) => {
      // Over a second or so: steps are not as even as events.
      const before = points[Math.max(0, i - 4)], seconds = Math.max(now.time - before.time, 0.05);
      const rate = (name) => Math.max(0, now[name] - before[name]) / seconds;
      return [now.time, rate("generation_tokens_total"), rate("prompt_tokens_total")];
    });
    this.rate.draw(rates);
    this.load.draw(points.map((p) => [p.time, p.num_running, p.num_waiting]));
    this.moves.draw(points.map((p) => [
      p.time, p.preemptions_total - first.preemptions_total, p.swaps_total - first.swaps_total,
    ]));
  }

  drawCells() {
    if (!this.cells) {
      $("cell-note").textContent = "Cells are shown for a single engine, not for replicas.";
      return;
    }
    const { runs, blocks_per_cell } = this.cells;
    $("cell-note").textContent = blocks_per_cell > 1
      ? `A cell stands for ${blocks_per_cell} blocks and shows the first of them.` : "";
    const total = runs.reduce((sum, [, count]) => sum + count, 0);
    const width = this.canvas.clientWidth || 600;
    this.size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * 320) / Math.max(total, 1)))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const [context] = canvas2d(this.canvas, Math.ceil(total / this.columns) * this.size);
    const kinds = COLOURS.map(colour), gap = this.size > 4 ? 1 : 0;
    let cell = 0;
    for (const [owner, count] of runs) {
      context.fillStyle = owner < FIRST_REQUEST
        ? kinds[owner] : this.colours.of(this.requests[owner - FIRST_REQUEST].request_id);
      for (const end = cell + count; cell < end; cell++) {
        const x = (cell % this.columns) * this.size, y = Math.floor(cell / this.columns) * this.size;
        context.fillRect(x, y, this.size - gap, this.size - gap);
      }
    }
    const kept = runs.map(([owner, count]) => (owner >= FIRST_REQUEST ? count : 0));
    this.canvas.setAttribute("aria-label",
      `${total} cells, ${kept.reduce((a, b) => a + b, 0)} of them keys and values of requests`);
  }

  point(event) {
    if (!this.cells) return;
    const cell = Math.floor(event.offsetY / this.size) * this.columns
      + Math.floor(event.offsetX / this.size);
    let end = 0;
    const run = this.cells.runs.find(([, count]) => (end += count) > cell);
    if (!run) return;
    const [owner] = run, number = cell * this.cells.blocks_per_cell + 1;
    const whose = NAMES[owner] ?? this.requests[owner - FIRST_REQUEST].request_id;
    $("cell").textContent = `block ${number}: ${whose}`;
  }

  /** Rows stay where they are as long as their request runs: what has the focus keeps it. */
  list(requests) {
    const body = $("running"), seen = new Set();
    for (const [i, request] of requests.entries()) {
      const id = `${request.request_id} ${requests.slice(0, i)
        .filter((other) => other.request_id === request.request_id).length}`;
      seen.add(id);
      const row = this.rows.get(id) ?? this.newRow(id, request, body);
      const share = request.held_tokens / Math.max(request.logical_tokens, 1);
      const texts = [
        request.policy, request.logical_tokens.toLocaleString(),
        `${request.held_tokens.toLocaleString()} (${percent(share)})`,
        request.blocks.toLocaleString(), (request.log_blocks ?? "–").toLocaleString(),
        request.compactions.toLocaleString(), bytes(request.held_bytes),
      ];
      texts.forEach((text, at) => {
        if (row.cells[at + 1].textContent !== text) row.cells[at + 1].textContent = text;
      });
    }
    for (const [id, row] of this.rows) {
      if (!seen.has(id)) {
        row.remove();
        this.rows.delete(id);
      }
    }
    $("nobody").hidden = requests.length > 0;
  }

  newRow(id, request, body) {
    const mark = el("span", { class: "mark", "aria-hidden": "true" });
    mark.style.background = this.colours.of(request.request_id);
    const button = el("button", {
      class: "link", type: "button", onclick: () => this.onRequest(request.request_id),
    }, request.request_id);
    const row = el("tr", {}, el("th", { scope: "row" }, mark, button));
    for (let i = 0; i < 7; i++) row.append(el("td"));
    body.append(row);
    this.rows.set(id, row);
    return row;
  }
}
