// What is still held of a request's tokens, followed from the events of its `kv_trace`.

/** Layers and KV heads that hold each position; `share(t)` is how much of token t is there. */
export class HeldTokens {
  /** What was held after the first `count` of these events. */
  static after(events, count) {
    const held = new HeldTokens();
    for (const event of events.slice(0, count)) held.apply(event);
    return held;
  }

  constructor() {
    this.lanes = 0;
    this.layers = 0;
    this.heads = 0;
    this.events = [];
    this.gone = []; // by lane: the positions that it has dropped
    this.lost = new Map(); // position -> lanes that have dropped it
  }

  /** Follow an event; returns the positions whose share has changed. */
  apply(event) {
    const changed = new Set();
    if (event.reason === "start") {
      for (const position of this.lost.keys()) changed.add(position);
      this.layers = event.dropped.length;
      this.heads = event.dropped[0].length;
      this.lanes = this.layers * this.heads;
      this.gone = Array.from({ length: this.lanes }, () => new Set());
      this.lost.clear();
    }
    event.dropped.flat().forEach((runs, lane) => {
      for (let i = 0; i < runs.length; i += 2) {
        for (let t = runs[i]; t < runs[i + 1]; t++) {
          this.gone[lane].add(t);
          this.lost.set(t, (this.lost.get(t) ?? 0) + 1);
          changed.add(t);
        }
      }
    });
    this.events.push({ ...event, held: this.gone.map((gone) => event.seen - gone.size) });
    return changed;
  }

  share(position) {
    return this.lanes ? 1 - (this.lost.get(position) ?? 0) / this.lanes : 1;
  }

  holds(lane, position) {
    return !this.gone[lane]?.has(position);
  }

  /** Entries that are held of the first `tokens` positions, over all layers and heads. */
  entries(tokens) {
    const dropped = this.gone.reduce((sum, gone) => sum + gone.size, 0);
    return this.lanes * tokens - dropped;
  }
}
