// The last minutes, sampled by the clock: what nobody reports any more goes to zero.

import { Chart } from "../shared/chart.js";
import { $, count, many, say } from "../shared/dom.js";

const SECONDS = 180;
const TOTALS = ["generation_tokens_total", "prompt_tokens_total", "preemptions_total", "swaps_total"];

export class Rates {
  constructor() {
    this.points = []; // [second, ...rates, running, waiting]
    // A chart and the columns that it shows; one without data is not there.
    this.charts = [
      [new Chart("Tokens", { generated: "one", "of prompts": "two" }, "/s"), [1, 2]],
      [new Chart("Requests", { running: "one", waiting: "two" }), [5, 6]],
      [new Chart("Preemptions", { "in all": "one", swapped: "two" }), [3, 4]],
    ];
    for (const [{ element }] of this.charts) element.hidden = true;
    $("charts").append(...this.charts.map(([{ element }]) => element));
    setInterval(() => this.tick(), 1000);
  }

  show(event) {
    this.event = event;
    this.before ??= event;
    const { continuations: kept, compactions_total: compactions } = event;
    const missed = Object.values(kept.misses).reduce((sum, n) => sum + n, 0);
    const resumed = kept.count || kept.resumed_total || missed
      ? `; ${many(kept.count, "continuation")} kept, ${count(kept.resumed_total)} of ` +
        `${many(kept.resumed_total + missed, "conversation")} resumed one` : "";
    const { drafted_tokens_total: guessed, accepted_tokens_total: right } = event.speculation;
    const guesses = guessed
      ? `; ${count(right)} of ${many(guessed, "guessed token")} were right` : "";
    say($("since"), `Since the start ${many(compactions, "compaction")} ` +
      `${compactions === 1 ? "has" : "have"} released ` +
      `${many(event.blocks_released_total, "block")}${resumed}${guesses}.`);
  }

  tick() {
    if (!this.event || document.hidden) return;
    const now = performance.now() / 1000, seconds = this.last ? now - this.last : 1;
    const rates = TOTALS.map((name) => Math.max(0, this.event[name] - this.before[name]) / seconds);
    Object.assign(this, { before: this.event, last: now });
    const live = document.body.dataset.link === "live";
    const { num_running, num_waiting } = live ? this.event : { num_running: 0, num_waiting: 0 };
    this.points.push([now, ...rates, num_running, num_waiting]);
    while (this.points[0][0] < now - SECONDS) this.points.shift();
    for (const [chart, columns] of this.charts) {
      chart.element.hidden = !this.points.some((point) => columns.some((i) => point[i]));
      const points = this.points.map((point) => [point[0], ...columns.map((i) => point[i])]);
      chart.draw(points, points[0][0], now);
    }
  }
}
