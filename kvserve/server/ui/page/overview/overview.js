// The first screen: what is saved, the blocks, who runs, and the last minutes.

import { paced } from "../shared/dom.js";
import { BlockMap } from "./block_map.js";
import { Rates } from "./rates.js";
import { Running } from "./running.js";
import { Saving } from "./saving.js";

export class Overview {
  constructor(names, onRequest) {
    this.saving = new Saving();
    this.blocks = new BlockMap(names);
    this.running = new Running(names, onRequest);
    this.rates = new Rates();
    this.server = { tokenBytes: 0, policy: "none" };
    this.draw = paced(() => {
      this.saving.show(this.event, this.server);
      this.blocks.show(this.event);
      this.running.show(this.event.requests);
    });
  }

  serve({ info }) {
    this.server = { tokenBytes: info.kv_cache.token_bytes, policy: info.policy.name };
  }

  /** Take the newest figures; they are drawn ten times a second at most. */
  show(event) {
    this.event = event;
    this.rates.show(event);
    this.draw();
  }

  redraw() {
    this.blocks.draw();
  }
}
