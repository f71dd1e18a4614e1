// What compression saves: one figure, one sentence, two bars, and how it came to that.

import { Areas } from "../shared/chart.js";
import { $, bytes, count, fill, many, say } from "../shared/dom.js";
import { saving } from "../shared/saving.js";

const SECONDS = 180;

/** What those who run under a policy hold now, and would hold of the full cache, in whole blocks.
 *  If all of them keep everything, they are counted instead. */
export function moment(event, tokenBytes) {
  const block = event.bytes_total / event.blocks_total || 1;
  const dropping = event.requests.filter(({ policy }) => policy !== "none");
  const requests = dropping.length ? dropping : event.requests;
  const sum = (value) => requests.reduce((total, request) => total + value(request), 0);
  return {
    running: requests.length,
    others: event.requests.length - requests.length,
    read: sum((one) => one.logical_tokens),
    kept: sum((one) => one.held_tokens),
    all: sum((one) => Math.ceil((one.logical_tokens * tokenBytes) / block) * block),
    held: sum((one) => one.held_bytes),
    log: sum((one) => (one.log_blocks ?? 0) * block),
    compacted: requests.every((one) => one.compactions),
    policies: new Set(requests.map(({ policy }) => policy)),
    keepsAll: !dropping.length,
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
    this.policy = policy;
    if (!this.points.length) $("history").hidden = true;
    say($("memory-to"), event.num_running ? "now" : "when the last one ended");
    if (!event.num_running) return this.tell(this.fullest, idle(this.fullest, event));
    const now = moment(event, tokenBytes);
    if (isFuller(now, this.fullest)) this.fullest = now;
    this.points.push([event.time, now.all, now.held, now.held - now.log]);
    while (this.points[0][0] < event.time - SECONDS) this.points.shift();
    this.tell(now, `${running(now)}, remembering ${count(now.read)} tokens ` +
      `in the space of ${count(now.kept)}.`);
    this.draw();
  }

  tell(now, sentence) {
    say($("sentence"), sentence);
    say($("with-name"), name(now?.policies ?? new Set([this.policy])));
    const [share, shareOf] = now ? saving(now) : ["…", "nothing to compare yet"];
    say($("share"), share);
    say($("share-of"), shareOf);
    const most = Math.max(now?.all ?? 0, now?.held ?? 0, 1);
    fill($("without-bar"), (now?.all ?? 0) / most);
    fill($("with-bar"), now ? (now.held - now.log) / most : 0);
    fill($("log-bar"), (now?.log ?? 0) / most);
    say($("without"), now ? bytes(now.all) : "");
    say($("with"), now ? bytes(now.held) : "");
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
  return now.all >= before.all;
}

function running({ running: requests, others }) {
  const who = requests === 1 ? "One request runs" : `${count(requests)} requests run`;
  return others ? `${who} beside ${count(others)} with the full cache` : who;
}

/** What the second bar is called. */
function name(policies) {
  if (policies.size > 1) return "Compressed";
  const [policy] = policies;
  return policy === "none" ? "As it is" : `With ${policy}`;
}

function idle(fullest, event) {
  if (fullest) {
    return `Nothing runs now. At the fullest, ${many(fullest.running, "request")} remembered ` +
      `${count(fullest.read)} tokens in the space of ${count(fullest.kept)}.`;
  }
  return event.steps_total || event.generation_tokens_total ? "Nothing runs now."
    : "Nothing has run yet. Press Try it, and see a cache shrink.";
}
