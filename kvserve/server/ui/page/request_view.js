// One request on a time line: what was held, by layer and head, when blocks came back, the log.

import { Chart } from "./chart.js";
import { $, canvas2d, colour, el, percent } from "./dom.js";

const MOST = 40;

/** What is known of requests: samples of the stream, and traces of this page's own answers. */
export class RequestView {
  constructor() {
    this.records = new Map();
    this.chosen = null;
    this.select = $("request");
    this.tokens = new Chart("Tokens", { logical: "two", held: "one" });
    this.blocks = new Chart("Blocks", { "all of it": "one", "logged queries": "three" });
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
    if (this.chosen && !$("view-request").hidden) this.draw();
  }

  /** An answer of the playground that has ended: its trace belongs to one of the requests. */
  addAnswer(answer) {
    const known = [...this.records.keys()].find((id) => id.startsWith(`${answer.id}-`));
    const record = this.record(known ?? answer.id, answer.policy);
    record.held = answer.held;
    record.usage = answer.usage;
    this.choose(record.id);
  }

  record(id, policy) {
    let record = this.records.get(id);
    if (!record) {
      record = { id, policy, samples: [], option: el("option", { value: id }, `${id} (${policy})`) };
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
    if (!$("view-request").hidden) this.draw();
  }

  draw() {
    const record = this.records.get(this.chosen);
    $("no-request").hidden = Boolean(record);
    $("one-request").hidden = !record;
    if (!record) return;
    const samples = record.samples;
    this.tokens.draw(samples.map(([time, r]) => [time, r.logical_tokens, r.held_tokens]));
    this.blocks.draw(samples.map(([time, r]) => [time, r.blocks, r.log_blocks ?? 0]));
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
    const step = width / events.length, [there, away] = [colour("held"), colour("dropped")];
    events.forEach((event, i) => {
      event.held.forEach((count, lane) => {
        const box = [i * step, lane * height, Math.max(1, step - 1), height - 1];
        context.globalAlpha = 1;
        context.fillStyle = away;
        context.fillRect(...box);
        context.globalAlpha = event.seen ? count / event.seen : 1;
        context.fillStyle = there;
        context.fillRect(...box);
      });
    });
    context.globalAlpha = 1;
    $("lanes").setAttribute("aria-label",
      `${held.layers} layers x ${held.heads} KV heads over ${events.length} events`);
  }

  listEvents(held, events) {
    const began = events[0].time;
    $("events").replaceChildren(...events.map((event) => {
      const dropped = event.dropped.flat().map((runs) => length(runs));
      const share = event.held.map((count) => (event.seen ? count / event.seen : 1));
      const cells = [
        `${(event.time - began).toFixed(2)} s`, event.reason, event.seen.toLocaleString(),
        dropped.reduce((a, b) => a + b, 0).toLocaleString(),
        `${percent(Math.min(...share))} to ${percent(Math.max(...share))}`,
        event.blocks_released.toLocaleString(), event.queries.toLocaleString(),
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
