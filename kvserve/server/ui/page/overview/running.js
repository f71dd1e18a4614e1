// Who runs, a row each. Rows stay where they are as long as their request runs.

import { $, bytes, count, el, fill, say } from "../shared/dom.js";

export class Running {
  constructor(names, onRequest) {
    this.names = names;
    this.onRequest = onRequest;
    this.rows = new Map();
  }

  show(requests) {
    const seen = new Set(), times = new Map();
    for (const request of requests) {
      const branch = times.get(request.request_id) ?? 0;
      times.set(request.request_id, branch + 1);
      const id = `${request.request_id} ${branch}`;
      seen.add(id);
      this.update(this.rows.get(id) ?? this.add(id, request), request);
    }
    for (const [id, { row }] of this.rows) {
      if (seen.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    $("nobody").hidden = requests.length > 0;
  }

  update({ part, cells }, request) {
    const share = request.held_tokens / Math.max(request.logical_tokens, 1);
    fill(part, share);
    const texts = [
      request.policy,
      `${count(request.held_tokens)} of ${count(request.logical_tokens)}` +
        (request.remainder_entries ? " and remainders" : ""),
      bytes(request.held_bytes), count(request.blocks),
      request.log_blocks === undefined ? "–" : count(request.log_blocks),
      count(request.compactions),
    ];
    texts.forEach((text, i) => say(cells[i], text));
  }

  add(id, request) {
    const mark = el("span", { class: "mark", "aria-hidden": "true" });
    mark.style.background = this.names.colour(request.request_id);
    const button = el("button", {
      class: "link", type: "button", title: request.request_id,
      onclick: () => this.onRequest(request.request_id),
    }, this.names.of(request.request_id));
    const part = el("span"), cells = Array.from({ length: 6 }, () => el("span"));
    const row = el("tr", {}, el("th", { scope: "row" }, mark, button),
      ...cells.map((cell, i) => el("td", {},
        i === 1 ? el("span", { class: "bar", "aria-hidden": "true" }, part) : null, cell)));
    $("running").append(row);
    const found = { row, part, cells };
    this.rows.set(id, found);
    return found;
  }
}
