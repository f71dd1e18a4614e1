// Markdown as elements: marked reads it, and what it finds becomes text in elements made here, never
// markup. Pictures are links, since the page loads nothing from elsewhere.

import { el } from "../shared/dom.js";
import { lexer } from "../vendor/marked.esm.js";

const PAUSE_MS = 120;
const LONGEST = 200_000; // characters; longer texts are shown as they are
const SAFE = /^(https?:|mailto:)/i;
const ENTITIES = { "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'" };

const plain = (text) => text.replace(/&(lt|gt|amp|quot|#39);/g, (name) => ENTITIES[name]);

function link({ href, text, tokens }) {
  const words = tokens?.length ? inline(tokens) : [plain(text || href)];
  if (!SAFE.test(href)) return el("span", {}, ...words);
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...words);
}

const INLINE = {
  strong: (token) => el("strong", {}, ...inline(token.tokens)),
  em: (token) => el("em", {}, ...inline(token.tokens)),
  del: (token) => el("del", {}, ...inline(token.tokens)),
  codespan: (token) => el("code", {}, token.text),
  br: () => el("br"),
  link,
  image: ({ href, text }) => link({ href, text: text || "picture" }),
  escape: (token) => token.text,
  html: (token) => token.raw,
  checkbox: () => null,
};

function inline(tokens = []) {
  return tokens.map((token) => {
    if (token.tokens && !INLINE[token.type]) return el("span", {}, ...inline(token.tokens));
    return INLINE[token.type]?.(token) ?? plain(token.text ?? token.raw);
  });
}

function item(token) {
  const box = token.task
    ? el("input", { type: "checkbox", disabled: true, checked: Boolean(token.checked) }) : null;
  return el("li", {}, box, ...blocks(token.tokens));
}

function table({ header, rows }) {
  const cells = (kind, row) => el("tr", {},
    ...row.map((cell) => el(kind, {}, ...inline(cell.tokens))));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, cells("th", header)), el("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

const BLOCKS = {
  heading: (token) => el(`h${Math.min(6, token.depth + 3)}`, {}, ...inline(token.tokens)),
  paragraph: (token) => el("p", {}, ...inline(token.tokens)),
  text: (token) => el("span", {}, ...(token.tokens ? inline(token.tokens) : [plain(token.text)])),
  code: (token) => el("pre", {}, el("code", {}, token.text)),
  blockquote: (token) => el("blockquote", {}, ...blocks(token.tokens)),
  list: (token) => el(token.ordered ? "ol" : "ul",
    { start: token.ordered && token.start !== 1 ? token.start : null }, ...token.items.map(item)),
  table,
  hr: () => el("hr"),
  html: (token) => el("p", {}, token.raw),
  space: () => null,
  def: () => null,
};

const blocks = (tokens) => tokens.map((token) =>
  (BLOCKS[token.type] ?? BLOCKS.html)(token));

/** A text that grows: only the blocks that have changed are made anew. */
export class Markdown {
  constructor() {
    this.body = el("div");
    this.thought = el("p");
    this.thoughts = el("details", { hidden: true }, el("summary", {}, "Reasoning"), this.thought);
    this.element = el("div", { class: "markdown" }, this.thoughts, this.body);
    this.raws = [];
  }

  /** Write within a moment, however often it is asked for. */
  writeSoon(...texts) {
    this.next = texts;
    this.timer ??= setTimeout(() => this.write(...this.next), PAUSE_MS);
  }

  write(text, thought = "") {
    clearTimeout(this.timer);
    this.timer = null;
    this.thoughts.hidden = !thought;
    if (this.thought.textContent !== thought) this.thought.textContent = thought;
    if (text.length > LONGEST) {
      this.raws = [];
      return this.body.replaceChildren(el("pre", {}, text));
    }
    const tokens = lexer(text);
    let same = 0;
    while (same < tokens.length && tokens[same].raw === this.raws[same]) same++;
    while (this.body.childNodes.length > same) this.body.lastChild.remove();
    // An empty text keeps a block's place, so that places are those of the tokens.
    this.body.append(...blocks(tokens.slice(same)).map((node) => node ?? ""));
    this.raws = tokens.map((token) => token.raw);
  }
}
