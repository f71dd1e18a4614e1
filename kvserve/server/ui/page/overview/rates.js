// The last minutes, sampled by the clock: what nobody reports any more goes to zero.

import { Chart } from "../shared/chart.js";
import { $, count, say } from "../shared/dom.js";

const SECONDS = 180;
const TOTALS = ["generation_tokens_total", "prompt_tokens_total", "preemptions_total", "swaps_total"];

export class Rates {
  constructor() {
    this.points = []; // [second, ...rates, running, waiting]
    this.speed = new Chart("Tokens", { generated: "one", "of prompts": "two" }, "/s");
    this.load = new Chart("Requests", { running: "one", waiting: "two" });
    this.moves = new Chart("Preemptions", { "in all": "one", swapped: "two" });
    $("charts").append(this.speed.element, this.load.element, this.moves.element);
    setInterval(() => this.tick(), 1000);
  }

  show(event) {
    this.event = event;
    this.before ??= event;
    const { continuations: kept } = event;
    const missed = Object.values(kept.misses).reduce((sum, n) => sum + n, 0);
    const resumed = kept.count || kept.resumed_total || missed
      ? `; ${count(kept.count)} continuations kept, ${count(kept.resumed_total)} of ` +
        `${count(kept.resumed_total + missed)} conversations resumed one` : "";
    const { drafted_tokens_total: guessed, accepted_tokens_total: right } = event.speculation;
    const guesses = guessed
      ? `; ${count(right)} of ${count(guessed)} guessed tokens were right` : "";
    say($("since"), `Since the start ${count(event.compactions_total)} compactions have released ` +
      `${count(event.blocks_released_total)} blocks${resumed}${guesses}.`);
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
    const columns = (...at) => this.points.map((point) => [point[0], ...at.map((i) => point[i])]);
    this.speed.draw(columns(1, 2), now - SECONDS, now);
    this.load.draw(columns(5, 6), now - SECONDS, now);
    this.moves.draw(columns(3, 4), now - SECONDS, now);
  }
}
