// Elements without markup in strings: what a model or a person has written only ever becomes text.

/** An element with attributes, listeners (`onclick`), and children: elements or text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** The value of a colour of style.css, for canvases. */
export function colour(name) {
  const probe = $("probe");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < UNITS.length - 1; unit++) count /= 1024;
  return `${unit ? count.toFixed(1) : count} ${UNITS[unit]}`;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** A canvas of the size of its element, clear, and its context in units of CSS pixels. */
export function canvas2d(canvas, height = canvas.clientHeight) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width, height];
}
