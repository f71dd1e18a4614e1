// Lines over time, as SVG; the newest values stand beside the names, for eyes and screen readers.

import { el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 90;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A chart of named lines `{name: class}`; `draw` gets points `[x, ...values]` in their order. */
export class Chart {
  constructor(title, lines, unit = "") {
    this.names = Object.keys(lines);
    this.unit = unit;
    this.picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
    });
    this.paths = this.names.map((name) => svg("polyline", { class: `line ${lines[name]}` }));
    this.picture.append(...this.paths);
    this.values = this.names.map(() => el("output"));
    const legend = this.names.map((name, i) =>
      el("span", { class: `key ${lines[name]}` }, `${name} `, this.values[i]));
    this.top = el("span", { class: "quiet" });
    this.element = el("figure", { class: "chart" },
      el("figcaption", {}, el("strong", {}, title), " ", ...legend, this.top), this.picture);
  }

  draw(points) {
    if (!points.length) return;
    const first = points[0][0], span = Math.max(points.at(-1)[0] - first, 1e-9);
    const most = Math.max(1, ...points.flatMap((point) => point.slice(1)));
    this.paths.forEach((path, i) => {
      const places = points.map((point) => {
        const x = ((point[0] - first) / span) * WIDTH;
        return `${x.toFixed(1)},${(HEIGHT - 2 - (point[i + 1] / most) * (HEIGHT - 4)).toFixed(1)}`;
      });
      path.setAttribute("points", places.join(" "));
      const value = points.at(-1)[i + 1];
      this.values[i].textContent = `${Number(value.toFixed(1)).toLocaleString()}${this.unit}`;
    });
    this.top.textContent = ` (top ${Number(most.toFixed(1)).toLocaleString()}${this.unit})`;
  }
}
