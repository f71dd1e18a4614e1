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

const colours = new Map();

/** The value of a colour of the style sheets, for canvases; kept until the theme changes. */
export function colour(name) {
  if (!colours.has(name)) {
    const probe = $("probe");
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

export const forgetColours = () => colours.clear();

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < UNITS.length - 1; unit++) count /= 1024;
  return `${unit ? count.toFixed(1) : count} ${UNITS[unit]}`;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (number) => whole.format(number);

/** How many of something, in words: `many(1, "block")`. */
export const many = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

/** `draw`, in an animation frame and at most every `pause` ms, however often it is asked for. */
export function paced(draw, pause = 100) {
  let asked = false, last = -Infinity;
  const frame = () => {
    [asked, last] = [false, performance.now()];
    draw();
  };
  return () => {
    if (asked) return;
    asked = true;
    setTimeout(() => requestAnimationFrame(frame), Math.max(0, last + pause - performance.now()));
  };
}

/** Write a text where it is not yet: what has not changed costs no layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A bar's part, as a share of the whole. */
export function fill(element, share) {
  const width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  if (element.style.width !== width) element.style.width = width;
}

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
