// The connection: who is served, the stream of figures, and how it stands with both.

import { events, json } from "./shared/api.js";
import { $, say } from "./shared/dom.js";

const AGAIN_MS = 1000;
const STATES = {
  connecting: "connecting", live: "live", loading: "model is loading",
  stopping: "server is stopping", down: "not connected", paused: "paused",
};

const state = ({ code }) =>
  ({ loading: "loading", draining: "stopping" })[code] ?? "down";

/** Reads the stream while the page can be seen, and the settings again at every new beginning. */
export class Connection {
  constructor({ onServer, onEvent, onState }) {
    Object.assign(this, { onServer, onEvent, onState });
    this.seen = null; // when the last figures came
    this.tell("connecting");
    setInterval(() => this.explain(), 1000);
  }

  async run() {
    for (;;) {
      const abort = new AbortController();
      const hide = () => document.hidden && abort.abort();
      document.addEventListener("visibilitychange", hide);
      try {
        await this.read(abort.signal);
        this.tell("stopping");
      } catch (error) {
        if (error.status === undefined && error.name !== "AbortError") console.error(error);
        this.why = error.message;
        this.tell(document.hidden ? "paused" : state(error));
      } finally {
        document.removeEventListener("visibilitychange", hide);
      }
      await (document.hidden ? shown() : new Promise((done) => setTimeout(done, AGAIN_MS)));
    }
  }

  async read(signal) {
    const [info, policies] = [
      await json("server_info", { signal }), await json("v1/kv/policies", { signal }),
    ];
    this.onServer({ info, policies });
    this.tell("live");
    for await (const event of events("v1/kv/events", { signal })) {
      this.seen = Date.now();
      this.onEvent(event);
    }
  }

  tell(name) {
    if (name === "live") this.seen = Date.now();
    this.state = name;
    document.body.dataset.link = name;
    say($("link-text"), STATES[name]);
    this.onState(name === "live");
    this.explain();
  }

  /** What is wrong, and how old the figures are. */
  explain() {
    const banner = $("banner"), wrong = !["live", "paused", "connecting"].includes(this.state);
    banner.hidden = !wrong;
    if (!wrong) return;
    const what = {
      loading: "The model is loading. The page goes on by itself.",
      stopping: "The server is stopping.",
    }[this.state] ?? `Not connected: ${this.why}. Trying again every second.`;
    const old = this.seen === null ? ""
      : ` The figures below are those of ${new Date(this.seen).toLocaleTimeString()}.`;
    say(banner, what + old);
  }
}

const shown = () => new Promise((done) => {
  document.addEventListener("visibilitychange", done, { once: true });
});
