// What compression saves: one figure, one sentence, two bars, and how it came to that.

import { Areas } from "../shared/chart.js";
import { $, bytes, count, fill, many, say } from "../shared/dom.js";

const SECONDS = 180;

/** What those who run hold at this moment, and would hold of the full cache, in whole blocks. */
export function moment(event, tokenBytes) {
  const { requests } = event, block = event.bytes_total / event.blocks_total || 1;
  const sum = (value) => requests.reduce((total, request) => total + value(request), 0);
  return {
    running: event.num_running,
    read: event.tokens_logical,
    kept: event.tokens_held,
    without: sum((one) => Math.ceil((one.logical_tokens * tokenBytes) / block) * block),
    with: sum((one) => one.held_bytes),
    log: sum((one) => (one.log_blocks ?? 0) * block),
    compactions: sum((one) => one.compactions),
    keepsAll: requests.every(({ policy }) => policy === "none"),
  };
}

export class Hero {
  constructor() {
    this.chart = new Areas($("memory"), ["without", "log", "with"]);
    this.forget();
  }

  /** Another server, or the end of a recording: what was seen is not of this one. */
  forget() {
    this.points = []; // [second, bytes of the full cache, held, held without the query log]
    this.fullest = null;
  }

  show(event, { tokenBytes, policy }) {
    say($("with-name"), policy === "none" ? "As it is" : `With ${policy}`);
    if (!this.points.length) $("history").hidden = true;
    say($("memory-to"), event.num_running ? "now" : "when the last one ended");
    if (!event.num_running) return this.tell(this.fullest, idle(this.fullest, event));
    const now = moment(event, tokenBytes);
    if (isFuller(now, this.fullest)) this.fullest = now;
    this.points.push([event.time, now.without, now.with, now.with - now.log]);
    while (this.points[0][0] < event.time - SECONDS) this.points.shift();
    this.tell(now, `${running(now.running)}, remembering ${count(now.read)} tokens ` +
      `in the space of ${count(now.kept)}.`);
    this.draw();
  }

  tell(now, sentence) {
    say($("sentence"), sentence);
    const share = now?.without ? 1 - now.with / now.without : 0;
    // Without a log, more than the full cache is only the block that a request is about to fill.
    const shown = now && Math.round(100 * (now.log ? share : Math.max(0, share)));
    say($("share"), now ? `${Math.abs(shown)} %` : "…");
    say($("share-of"), now ? words(shown, now) : "nothing to compare yet");
    const most = Math.max(now?.without ?? 0, now?.with ?? 0, 1);
    fill($("without-bar"), (now?.without ?? 0) / most);
    fill($("with-bar"), now ? (now.with - now.log) / most : 0);
    fill($("log-bar"), (now?.log ?? 0) / most);
    say($("without"), now ? bytes(now.without) : "");
    say($("with"), now ? bytes(now.with) : "");
    say($("log-note"), now?.log ? `Hatched: ${bytes(now.log)} for the query log.` : "");
  }

  draw() {
    const [first, last] = [this.points[0][0], this.points.at(-1)[0]];
    if (first === last) return;
    $("history").hidden = false;
    const most = this.chart.draw(this.points, first, last);
    say($("memory-top"), bytes(Math.round(most)));
    say($("memory-from"), `${count(last - first)} s earlier`);
  }
}

/** Of two moments the one to remember: where something was compressed, and more was read. */
function isFuller(now, before) {
  if (!before || now.keepsAll !== before.keepsAll) return !before || before.keepsAll;
  return now.without >= before.without;
}

const running = (requests) => (requests === 1 ? "One request runs" : `${count(requests)} requests run`);

function words(percent, { log, compactions, keepsAll }) {
  if (percent > 0) return "less memory";
  if (percent < 0) return "more memory, for the query log";
  if (keepsAll) return "less: policy none keeps everything";
  return compactions ? "less memory" : "less: nothing is compacted yet";
}

function idle(fullest, event) {
  if (fullest) {
    return `Nothing runs now. At the fullest, ${many(fullest.running, "request")} remembered ` +
      `${count(fullest.read)} tokens in the space of ${count(fullest.kept)}.`;
  }
  return event.steps_total || event.generation_tokens_total ? "Nothing runs now."
    : "Nothing has run yet. Press Try it, and see a cache shrink.";
}
