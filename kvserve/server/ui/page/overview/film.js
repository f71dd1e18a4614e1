// A recording of a server at work, which plays by itself while nothing has run on this one.

import { json } from "../shared/api.js";
import { $, say } from "../shared/dom.js";

const LONG_MS = 9_000;
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** The events of a recording: `bench/serving/screenshots.py` writes down what the page needs of them. */
export function eventsOf({ policy, blocks, block_bytes: block, frames }) {
  return frames.map(([time, cells, requests]) => {
    const runs = [...cells].map((digit) => parseInt(digit, 36));
    const of = (owner) => runs.reduce((sum, n, i) => sum + (i % 2 && runs[i - 1] === owner ? n : 0), 0);
    const sum = (at) => requests.reduce((total, request) => total + request[at], 0);
    return {
      recorded: true, time, num_running: requests.length, num_waiting: 0, tokens_logical: sum(1), tokens_held: sum(2),
      blocks_total: blocks, blocks_free: of(0), blocks_cached: of(1), bytes_total: blocks * block,
      cells: { blocks_per_cell: 1, runs },
      requests: requests.map(([number, read, kept, held, log, compactions]) => ({
        request_id: `recorded-${number}`, policy, logical_tokens: read, held_tokens: kept, blocks: held,
        held_bytes: held * block, log_blocks: log, compactions,
      })),
    };
  });
}

export class Film {
  /** `show` takes an event, and who is said to be served; `begin` forgets what was shown before. */
  constructor({ begin, show }) {
    Object.assign(this, { begin, show });
    this.on = false;
    $("film").addEventListener("click", () => this.toggle());
  }

  /** `used` says that something has run here, which this page has not seen. */
  async start(used) {
    if (this.on) return;
    this.on = true;
    try {
      this.film ??= await json("ui/overview/film.json");
    } catch (error) {
      this.on = false; // the next figures try again
      return console.info("no recording:", error.message);
    }
    if (!this.on) return;
    const { model, policy, token_bytes: tokenBytes } = this.film;
    this.events = eventsOf(this.film);
    this.server = { policy, tokenBytes };
    say($("recorded-what"), `${this.film.about} of ${model} under ${policy}. ` +
      (used ? "Nothing runs here now." : "Nothing has run here yet."));
    $("recorded").hidden = false;
    this.at = 0;
    this.begin();
    if (!still.matches) return this.play();
    for (const event of this.events) this.show(event, this.server);
    this.at = this.events.length;
    this.pause();
  }

  play() {
    say($("film"), "Pause");
    if (this.at >= this.events.length) {
      this.at = 0;
      this.begin();
    }
    const event = this.events[this.at++], next = this.events[this.at];
    this.show(event, this.server);
    const whole = this.events.at(-1).time - this.events[0].time;
    if (!next) return this.pause();
    this.timer = setTimeout(() => this.play(), (LONG_MS * (next.time - event.time)) / whole);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    say($("film"), this.at < this.events.length ? "Play" : "Play again");
  }

  toggle() {
    if (this.timer) this.pause();
    else this.play();
  }

  /** Something runs here: that is shown instead. */
  stop() {
    if (!this.on) return;
    this.on = false;
    clearTimeout(this.timer);
    $("recorded").hidden = true;
    this.begin();
  }
}
