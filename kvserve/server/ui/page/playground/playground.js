// The playground: a conversation, its composer, and the examples of the served model.

import { json } from "../shared/api.js";
import { $, el, say } from "../shared/dom.js";
import { Answer } from "./answer.js";
import { Conversations, title } from "./conversations.js";
import { words } from "./policy_form.js";
import { Settings } from "./settings.js";
import { Turn } from "./turn.js";

const NEAR = 80; // pixels from the end within which the stream is followed

export class Playground {
  constructor(onAnswer) {
    this.onAnswer = onAnswer;
    this.settings = new Settings(() => this.tellPolicies());
    this.conversations = new Conversations();
    this.turns = [];
    this.follows = true;
    this.listen();
  }

  listen() {
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => this.onKey(event));
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("new").addEventListener("click", () => this.open(this.conversations.add()));
    $("delete").addEventListener("click", () => {
      this.conversations.remove();
      this.open(this.conversations.current);
    });
    $("conversation").addEventListener("change", (event) => {
      this.conversations.choose(Number(event.target.value));
      this.open(this.conversations.current);
    });
    $("open-cache").addEventListener("click", () => this.openCache());
    const thread = $("thread");
    let before = 0;
    thread.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = thread;
      // The text may have grown since the scroll: only going back means that somebody reads.
      if (scrollHeight - scrollTop - clientHeight < NEAR) this.follows = true;
      else if (scrollTop < before) this.follows = false;
      before = scrollTop;
    });
  }

  /** Another server, or the same one again. */
  async serve(server) {
    this.server = server;
    this.settings.serve(server);
    $("trace-off").hidden = server.kvTrace;
    $("token-legend").hidden = !server.kvTrace;
    this.open(this.conversations.current);
    this.offer(await examplesOf(server));
  }

  /** Show a conversation from the beginning. */
  open(conversation) {
    this.abort?.abort();
    this.editing = null;
    say($("editing"), "");
    this.conversations.current = conversation;
    this.show(conversation.turns.map(({ text, answers }) =>
      this.turn(text, answers.map((saved) => Answer.saved(this.server, saved, this.listeners)))));
    this.list();
  }

  show(turns) {
    this.turns = turns;
    const hints = [$("hello"), $("trace-off")];
    $("hello").hidden = turns.length > 0;
    $("thread").replaceChildren(...hints, ...turns.map((turn) => turn.element));
    this.mend();
    const last = turns.at(-1)?.answers ?? [];
    this.choose(last.find(({ name }) => name !== "none") ?? last[0]);
    this.follow(true);
  }

  /** Whose cache is shown beside the conversation. */
  choose(answer) {
    if (answer === this.chosen) return;
    this.chosen?.choose(false);
    this.chosen = answer;
    answer?.choose(true);
    $("no-answer").hidden = Boolean(answer);
    say($("cache-title"), answer ? `Cache under ${answer.name}` : "Cache");
    $("cache-of").replaceChildren(...(answer ? [answer.panel] : []));
  }

  /** Where there is no room for both, the cache lies over the conversation until it is closed. */
  openCache() {
    const open = $("cache").classList.toggle("open");
    $("open-cache").setAttribute("aria-expanded", String(open));
    say($("open-cache"), open ? "Chat" : "Cache");
  }

  list() {
    const { all, current } = this.conversations;
    $("conversation").replaceChildren(...all.map((one) =>
      el("option", { value: one.id, selected: one === current }, title(one))));
  }

  /** Only the last turn can be generated again. */
  mend() {
    this.turns.forEach((turn, i) => (turn.again.hidden = i < this.turns.length - 1));
  }

  turn(text, answers) {
    return new Turn(text, answers, {
      onEdit: (turn) => this.edit(turn),
      onAgain: (turn) => this.busy || this.say(turn.text, this.turns.indexOf(turn)),
    });
  }

  answer(policy) {
    return new Answer(this.server, policy, this.settings.showAs, this.listeners);
  }

  get listeners() {
    return { onGrow: () => this.follow(), onChoose: (answer) => this.choose(answer) };
  }

  onKey(event) {
    if (event.key === "Escape" && this.editing !== null) {
      this.editing = null;
      say($("editing"), "");
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  edit(turn) {
    this.editing = this.turns.indexOf(turn);
    $("prompt").value = turn.text;
    $("prompt").focus();
    say($("editing"), "Sending replaces this turn and what follows it; Escape leaves it as it is.");
  }

  send() {
    const text = $("prompt").value;
    if (!text.trim() || this.busy) return;
    if (!this.server) return say($("editing"), "Not connected yet: the message stays here until it can be sent.");
    $("prompt").value = "";
    const from = this.editing ?? this.turns.length;
    this.editing = null;
    say($("editing"), "");
    this.say(text, from);
  }

  /** Say something in place of turn `from` and of those behind it, or at the end. */
  async say(text, from) {
    const answers = this.settings.policies.map((policy) => this.answer(policy));
    const turn = this.turn(text, answers);
    this.show([...this.turns.slice(0, from), turn]);
    this.follow(true);
    await this.run(turn, answers);
    this.keep();
  }

  async run(turn, answers) {
    const before = this.turns.slice(0, this.turns.indexOf(turn));
    const { system, body } = this.settings;
    this.abort = new AbortController();
    this.setBusy(true);
    try {
      await Promise.all(answers.map((answer, column) => answer.ask({
        ...body,
        model: this.server.model,
        messages: [
          ...(system ? [{ role: "system", content: system }] : []),
          ...before.flatMap((one) => one.messages(column)), { role: "user", content: turn.text },
        ],
      }, this.abort.signal)));
    } finally {
      this.setBusy(false);
    }
    turn.compare();
    this.follow();
    for (const answer of answers) if (answer.run.id) this.onAnswer(answer);
  }

  /** A turn that was asked elsewhere on the page, in a conversation of its own. */
  adopt(text, answers) {
    this.open(this.conversations.add());
    const turn = this.turn(text, answers);
    this.show([turn]);
    turn.compare();
    this.follow(true);
    this.keep();
  }

  keep() {
    const { current } = this.conversations;
    current.turns = this.turns.map((turn) => turn.saved).filter(Boolean);
    this.conversations.save();
    this.list();
  }

  setBusy(on) {
    this.busy = on;
    $("send").hidden = on;
    $("stop").hidden = !on;
    if (on) $("stop").focus();
    else if (document.activeElement === document.body) $("prompt").focus();
  }

  /** Keep the end in view, unless the reader has gone back. */
  follow(always = false) {
    const thread = $("thread");
    if (always) this.follows = true;
    if (this.follows) thread.scrollTop = thread.scrollHeight;
  }

  tellPolicies() {
    if (!this.server) return;
    const { policies } = this.settings, { own } = this.server;
    const names = policies.map((policy) => policy?.name ?? words(own.name, own.args));
    say($("asked-of"), names.join(" and "));
  }

  offer(examples) {
    $("examples").replaceChildren(...examples.map((example) => el("button", {
      type: "button",
      title: example.about,
      onclick: () => {
        $("prompt").value = example.prompt;
        this.settings.take(fitted(example, this.server));
        $("prompt").focus();
      },
    }, example.title)));
  }
}

/** No longer than half of the context. */
export const fitted = (example, { context }) =>
  ({ ...example, max_tokens: Math.min(example.max_tokens, context >> 1) });

/** Those that the served model has learnt, or what any model can answer. */
export async function examplesOf({ loaded, model }) {
  const all = await json("ui/examples.json");
  const own = all.filter(({ models }) => models.includes(loaded) || models.includes(model));
  return own.length ? own : all.filter(({ models }) => !models.length);
}
