// Lines and areas over time, as SVG; the newest values stand beside the names.

import { el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 100;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const plain = (number) => Number(number.toFixed(1)).toLocaleString("en");

/** How long ago, in the unit that fits. */
const ago = (seconds) => (seconds < 100 ? `${plain(seconds)} s` : `${plain(seconds / 60)} min`);

/** Shapes of a kind for the values of `points`, each `[second, ...values]`. */
class Picture {
  constructor(element, kind, classes) {
    element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    element.setAttribute("preserveAspectRatio", "none");
    this.shapes = classes.map((name) => svg(kind, { class: name }));
    element.append(...this.shapes);
  }

  /** Draw from second `start` to `end`, and return the largest value, 1 at least. */
  draw(points, start, end, closed) {
    const span = Math.max(end - start, 1e-9);
    const most = Math.max(1, ...points.map((point) => Math.max(...point.slice(1))));
    const x = (second) => (((second - start) / span) * WIDTH).toFixed(1);
    this.shapes.forEach((shape, i) => {
      const places = points.map((point) =>
        `${x(point[0])},${(HEIGHT - 2 - (point[i + 1] / most) * (HEIGHT - 4)).toFixed(1)}`);
      if (closed && points.length) {
        places.push(`${x(points.at(-1)[0])},${HEIGHT}`, `${x(points[0][0])},${HEIGHT}`);
      }
      shape.setAttribute("points", places.join(" "));
    });
    return most;
  }
}

/** Areas one before the other, the largest value first. */
export class Areas {
  constructor(element, classes) {
    this.picture = new Picture(element, "polygon", classes.map((name) => `area ${name}`));
  }

  draw(points, start, end) {
    return this.picture.draw(points, start, end, true);
  }
}

/** A chart of named lines `{name: class}`. */
export class Chart {
  constructor(title, lines, unit = "") {
    this.names = Object.keys(lines);
    this.unit = unit;
    const element = svg("svg", { "aria-hidden": "true" });
    this.picture = new Picture(element, "polyline", Object.values(lines).map((name) => `line ${name}`));
    this.values = this.names.map(() => el("output", {}, "0"));
    const legend = this.names.map((name, i) =>
      el("span", { class: `key ${lines[name]}` }, `${name} `, this.values[i]));
    this.top = el("span", {}, "1");
    this.first = el("span");
    this.last = el("span", {}, "now");
    this.element = el("figure", { class: "chart" },
      el("figcaption", {}, el("strong", {}, title), " ", ...legend),
      el("div", { class: "axis", "aria-hidden": "true" }, this.top), element,
      el("div", { class: "axis", "aria-hidden": "true" }, this.first, this.last));
  }

  /** Points `[second, ...values]` from `start` to `end`; no value, no line. */
  draw(points, start, end, newest = "now") {
    const span = Math.max(end - start, 1e-9);
    const most = this.picture.draw(points, start, end, false);
    this.values.forEach((output, i) => {
      output.textContent = `${plain(points.at(-1)?.[i + 1] ?? 0)}${this.unit}`;
    });
    this.top.textContent = `${plain(most)}${this.unit}`;
    this.first.textContent = newest === "now" ? `${ago(span)} ago` : "0 s";
    this.last.textContent = newest === "now" ? newest : ago(span);
  }
}
