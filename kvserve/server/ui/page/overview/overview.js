// The first screen: what is saved, the blocks, who runs, and the last minutes.

import { paced } from "../shared/dom.js";
import { BlockMap } from "./block_map.js";
import { Film } from "./film.js";
import { Hero } from "./hero.js";
import { Rates } from "./rates.js";
import { Running } from "./running.js";

export class Overview {
  constructor(names, onRequest) {
    this.hero = new Hero();
    this.blocks = new BlockMap(names);
    this.running = new Running(names, onRequest);
    this.rates = new Rates();
    this.server = { tokenBytes: 0, policy: "none", bits: "" };
    this.ran = false; // whether this page has seen a request run
    this.film = new Film({
      begin: () => this.hero.forget(),
      show: (event, server) => {
        this.hero.show(event, server);
        this.blocks.show(event, "");
      },
    });
    this.draw = paced(() => this.drawNow());
  }

  serve({ info }, isAnother) {
    const { token_bytes: tokenBytes, dtype } = info.kv_cache;
    this.server = { tokenBytes, policy: info.policy.name, bits: dtype === "auto" ? "" : dtype };
    if (!isAnother) return;
    this.hero.forget();
    this.ran = false;
  }

  /** Take the newest figures; they are drawn ten times a second at most. */
  show(event) {
    this.event = event;
    this.rates.show(event);
    this.draw();
  }

  drawNow() {
    const { event, server } = this;
    this.ran ||= event.num_running > 0;
    this.running.show(event.requests, event.bytes_total / event.blocks_total, Boolean(server.bits));
    if (!this.ran) return this.film.start(event.steps_total > 0);
    this.film.stop();
    this.hero.show(event, server);
    this.blocks.show(event, server.bits);
  }

  redraw() {
    this.blocks.draw();
  }
}
