// One request on a time line: what was held, by layer and head, when blocks came back, the log.

import { Chart } from "../shared/chart.js";
import { $, canvas2d, colour, count, el, paced, percent, say } from "../shared/dom.js";

const MOST = 256;

/** What is known of requests: samples of the stream, and traces of this page's own answers. */
export class RequestView {
  constructor(names) {
    this.names = names;
    this.records = new Map();
    this.chosen = null;
    this.redraw = paced(() => $("view-requests").hidden || this.draw());
    this.select = $("request");
    this.tokens = new Chart("Tokens", { read: "two", held: "one" });
    this.blocks = new Chart("Blocks", { "all of it": "one", "for the query log": "two" });
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
      this.drawLanes(record.held, events);
      this.listEvents(record.held, events);
    }
  }

  /** A column for each event, a row for each layer and head: the share of the tokens that is held. */
  drawLanes(held, events) {
    const height = Math.max(4, Math.min(16, Math.floor(360 / held.lanes)));
    const [context, width] = canvas2d($("lanes"), height * held.lanes);
    const step = width / events.length;
    context.fillStyle = colour("held");
    context.strokeStyle = colour("edge");
    context.lineWidth = 0.5;
    events.forEach((event, i) => {
      event.held.forEach((tokens, lane) => {
        const x = i * step, y = lane * height, wide = Math.max(1, step - 2);
        context.fillRect(x, y, wide * (event.seen ? tokens / event.seen : 1), height - 1);
        context.strokeRect(x + 0.25, y + 0.25, wide - 0.5, height - 1.5);
      });
    });
    $("lanes").setAttribute("aria-label",
      `${held.layers} layers x ${held.heads} KV heads after ${events.length} events`);
  }

  listEvents(held, events) {
    const began = events[0].time;
    $("events").replaceChildren(...events.map((event) => {
      const dropped = event.dropped.flat().map((runs) => length(runs));
      const share = event.held.map((tokens) => (event.seen ? tokens / event.seen : 1));
      const cells = [
        `${(event.time - began).toFixed(2)} s`, event.reason, count(event.seen),
        count(dropped.reduce((a, b) => a + b, 0)),
        `${percent(Math.min(...share))} to ${percent(Math.max(...share))}`,
        count(event.blocks_released), count(event.queries),
      ];
      return el("tr", {}, ...cells.map((text) => el("td", {}, text)));
    }));
  }
}

function length(runs) {
  let sum = 0;
  for (let i = 0; i < runs.length; i += 2) sum += runs[i + 1] - runs[i];
  return sum;
}
