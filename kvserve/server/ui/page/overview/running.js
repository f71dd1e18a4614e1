// Who runs, a row each. Rows stay where they are as long as their request runs.

import { $, bytes, count, el, fill, say } from "../shared/dom.js";
import { drawMark, REQUEST } from "./marks.js";

export class Running {
  constructor(names, onRequest) {
    this.names = names;
    this.onRequest = onRequest;
    this.rows = new Map();
  }

  /** `blockBytes` are those of a block. */
  show(requests, blockBytes, fewer) {
    const seen = new Set(), times = new Map();
    for (const request of requests) {
      const branch = times.get(request.request_id) ?? 0;
      times.set(request.request_id, branch + 1);
      const id = `${request.request_id} ${branch}`;
      seen.add(id);
      this.update(this.rows.get(id) ?? this.add(id, request), request, blockBytes, fewer);
    }
    for (const [id, { row }] of this.rows) {
      if (seen.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    $("running-card").hidden = !requests.length;
  }

  update(row, request, blockBytes, fewer) {
    const { part, cells, mark } = row, hue = this.names.colour(request.request_id);
    const look = `${hue} ${fewer}`;
    if (row.look !== look && mark.clientWidth) {
      drawMark(mark, REQUEST, hue, fewer);
      row.look = look;
    }
    fill(part, request.held_tokens / Math.max(request.logical_tokens, 1));
    const texts = [
      request.policy,
      `${count(request.held_tokens)} of ${count(request.logical_tokens)}` +
        (request.remainder_entries ? " and remainders" : ""),
      bytes(request.held_bytes),
      request.log_blocks ? bytes(request.log_blocks * blockBytes) : "–",
      count(request.compactions),
    ];
    texts.forEach((text, i) => say(cells[i], text));
  }

  add(id, request) {
    const mark = el("canvas", { class: "mark", "aria-hidden": "true" });
    const button = el("button", {
      class: "link", type: "button", title: request.request_id,
      onclick: () => this.onRequest(request.request_id),
    }, this.names.of(request.request_id));
    const part = el("span"), cells = Array.from({ length: 5 }, () => el("span"));
    const row = el("tr", {}, el("th", { scope: "row" }, mark, button),
      ...cells.map((cell, i) => el("td", {},
        i === 1 ? el("span", { class: "bar", "aria-hidden": "true" }, part) : null, cell)));
    $("running").append(row);
    const found = { row, part, cells, mark };
    this.rows.set(id, found);
    return found;
  }
}
