// Lines over time, as SVG with axes; the newest values stand beside the names.

import { el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 90;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const plain = (number) => Number(number.toFixed(1)).toLocaleString("en");

/** How long ago, in the unit that fits. */
const ago = (seconds) => (seconds < 100 ? `${plain(seconds)} s` : `${plain(seconds / 60)} min`);

/** A chart of named lines `{name: class}`. */
export class Chart {
  constructor(title, lines, unit = "") {
    this.names = Object.keys(lines);
    this.unit = unit;
    this.picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
    });
    this.paths = this.names.map((name) => svg("polyline", { class: `line ${lines[name]}` }));
    this.picture.append(...this.paths);
    this.values = this.names.map(() => el("output", {}, "0"));
    const legend = this.names.map((name, i) =>
      el("span", { class: `key ${lines[name]}` }, `${name} `, this.values[i]));
    this.top = el("span", {}, "1");
    this.first = el("span");
    this.last = el("span", {}, "now");
    this.element = el("figure", { class: "chart" },
      el("figcaption", {}, el("strong", {}, title), " ", ...legend),
      el("div", { class: "axis", "aria-hidden": "true" }, this.top), this.picture,
      el("div", { class: "axis", "aria-hidden": "true" }, this.first, this.last));
  }

  /** Points `[second, ...values]` from `start` to `end`; no value, no line. */
  draw(points, start, end, newest = "now") {
    const span = Math.max(end - start, 1e-9);
    const most = Math.max(1, ...points.map((point) => Math.max(...point.slice(1))));
    this.paths.forEach((path, i) => {
      const places = points.map((point) => {
        const x = ((point[0] - start) / span) * WIDTH;
        return `${x.toFixed(1)},${(HEIGHT - 2 - (point[i + 1] / most) * (HEIGHT - 4)).toFixed(1)}`;
      });
      path.setAttribute("points", places.join(" "));
      const value = points.at(-1)?.[i + 1] ?? 0;
      this.values[i].textContent = `${plain(value)}${this.unit}`;
    });
    this.top.textContent = `${plain(most)}${this.unit}`;
    this.first.textContent = newest === "now" ? `${ago(span)} ago` : "0 s";
    this.last.textContent = newest === "now" ? newest : ago(span);
  }
}
