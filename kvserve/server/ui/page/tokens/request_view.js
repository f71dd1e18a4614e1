// One request on a time line: what was held, by layer and head, when blocks came back, the log.

import { Chart } from "../shared/chart.js";
import { $, canvas2d, colour, count, el, many, paced, percent, say } from "../shared/dom.js";

const MOST = 256;
const GUTTER = 56, AXIS = 24; // pixels for the names of layers, and for the tokens below

/** The distance of marks on an axis up to `most`: 1, 2 or 5 times a power of ten, five marks or so. */
function ticks(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 5) / 5));
  return power * [1, 2, 5, 10].find((step) => (most / 5 <= step * power));
}

/** What is known of requests: samples of the stream, and traces of this page's own answers. */
export class RequestView {
  constructor(names) {
    this.names = names;
    this.records = new Map();
    this.chosen = null;
    this.redraw = paced(() => $("view-requests").hidden || this.draw());
    this.select = $("request");
    this.tokens = new Chart("Tokens", { read: "two", held: "one" });
    this.blocks = new Chart("Blocks", { "all of it": "one", "query log": "log" });
    $("request-charts").append(this.tokens.element, this.blocks.element);
    this.select.addEventListener("change", () => this.choose(this.select.value));
  }

  /** A sample of everybody who runs. */
  sample(event) {
    for (const request of event.requests) {
      const record = this.record(request.request_id, request.policy);
      record.samples.push([event.time, request]);
      if (record.samples.length > 2000) record.samples.splice(0, 1000);
    }
    if (this.chosen) this.redraw();
  }

  /** An answer of the playground that has ended: its trace belongs to one of the requests. */
  addAnswer({ run, held, name }) {
    const known = [...this.records.keys()].find((id) => id.startsWith(`${run.id}-`));
    const record = this.record(known ?? run.id, name);
    record.held = held;
    record.tokens = run.usage?.kv_cache_details.logical_tokens ?? run.tokens;
    this.choose(record.id);
  }

  record(id, policy) {
    let record = this.records.get(id);
    if (!record) {
      record = { id, policy, samples: [], option: el("option", { value: id }) };
      record.option.textContent = `${this.names.of(id)} (${policy})`;
      this.records.set(id, record);
      this.select.prepend(record.option);
      if (this.records.size > MOST) this.forget();
      if (!this.chosen) this.choose(id);
    }
    return record;
  }

  forget() {
    const old = [...this.records.values()].find((record) => record.id !== this.chosen);
    this.records.delete(old.id);
    old.option.remove();
  }

  choose(id) {
    this.chosen = id;
    this.select.value = id;
    this.redraw();
  }

  draw() {
    const record = this.records.get(this.chosen);
    $("no-request").hidden = Boolean(record);
    $("one-request").hidden = !record;
    if (!record) return;
    say($("request-id"), record.id);
    const { samples } = record, [first, last] = [samples[0]?.[0] ?? 0, samples.at(-1)?.[0] ?? 0];
    const over = (points, chart) => chart.draw(points, first, last, "its last figures");
    over(samples.map(([time, r]) => [time, r.logical_tokens, r.held_tokens]), this.tokens);
    over(samples.map(([time, r]) => [time, r.blocks, r.log_blocks ?? 0]), this.blocks);
    const events = record.held?.events ?? [];
    $("untraced").hidden = events.length > 0;
    $("traced").hidden = !events.length;
    if (events.length && events !== this.drawn) {
      this.drawn = events;
      this.drawLanes(record.held, record.tokens);
      this.listEvents(record.held, events);
    }
  }

  /** A row for each layer and KV head, a column for some tokens: how many of them are held at the end. */
  drawLanes(held, tokens) {
    const { lanes, heads, layers } = held, high = Math.max(1, Math.min(14, Math.floor(360 / lanes)));
    const [context, width] = canvas2d($("lanes"), high * lanes + AXIS), wide = width - GUTTER;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let lane = 0; lane < lanes; lane++) {
      context.fillStyle = colour("free");
      context.fillRect(GUTTER, lane * high, wide, Math.max(1, high - 1));
      context.fillStyle = colour("held");
      for (let x = 0; x < wide; x++) {
        const first = Math.floor((x * tokens) / wide), last = Math.max(first + 1, ((x + 1) * tokens) / wide);
        let kept = 0, looked = 0;
        for (let t = first; t < last; t += Math.ceil((last - first) / 4), looked++) kept += held.holds(lane, t);
        context.globalAlpha = kept / looked;
        if (kept) context.fillRect(GUTTER + x, lane * high, 1, Math.max(1, high - 1));
      }
      context.globalAlpha = 1;
    }
    context.fillStyle = colour("quiet");
    const each = Math.ceil(16 / (high * heads)); // layers for a label
    for (let layer = 0; layer < layers; layer += each) {
      context.fillText(`layer ${layer + 1}`, 0, (layer + 0.5) * high * heads);
    }
    const step = ticks(tokens);
    for (let t = 0; t <= tokens; t += step) {
      context.textAlign = t ? "center" : "left";
      context.fillText(count(t), GUTTER + (t / tokens) * (wide - 12), high * lanes + AXIS / 2);
    }
    say($("lanes-what"), `blue is held at the end; ${many(heads, "KV head")} a layer, tokens from left to right`);
    $("lanes").setAttribute("aria-label",
      `${layers} layers x ${heads} KV heads, ${count(tokens)} tokens: ` +
      `${percent(held.entries(tokens) / (lanes * tokens || 1))} of the entries are held`);
  }

  listEvents(held, events) {
    const began = events[0].time;
    // The first one only says that the cache is empty.
    $("events").replaceChildren(...events.slice(1).map((event) => {
      const dropped = event.dropped.flat().map((runs) => length(runs));
      const share = event.held.map((tokens) => (event.seen ? tokens / event.seen : 1));
      const cells = [
        `${(event.time - began).toFixed(2)} s`, event.reason, count(event.seen),
        count(dropped.reduce((a, b) => a + b, 0)),
        between(percent(Math.min(...share)), percent(Math.max(...share))),
        count(event.blocks_released), count(event.queries),
      ];
      return el("tr", {}, ...cells.map((text) => el("td", {}, text)));
    }));
  }
}

const between = (least, most) => (least === most ? least : `${least} to ${most}`);

function length(runs) {
  let sum = 0;
  for (let i = 0; i < runs.length; i += 2) sum += runs[i + 1] - runs[i];
  return sum;
}
