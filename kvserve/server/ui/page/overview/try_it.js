// "Try it": one question under the full cache and under a policy, side by side.

import { $, bytes, count, el, fill, say } from "../shared/dom.js";
import { differences, verdict } from "../playground/differences.js";
import { examplesOf, fitted } from "../playground/playground.js";

/** The server's own policy, or Kara, or the first that can run. */
function pick({ own, policies }) {
  if (own.name !== "none") return { name: own.name, ...own.args };
  const able = policies.data.filter(({ name, refusal }) => name !== "none" && !refusal);
  const best = able.find(({ name }) => name === "kara") ?? able[0];
  return best && { name: best.name, ...best.offer };
}

export class TryIt {
  /** `show` leads to the playground with what was answered. */
  constructor(playground, show) {
    this.playground = playground;
    this.live = false;
    $("try-it").addEventListener("click", () => (this.abort ? this.abort.abort() : this.run()));
    $("try-tokens").addEventListener("click", () => show(this.example.prompt, this.answers));
  }

  async serve(server) {
    this.abort?.abort();
    this.server = server;
    this.policy = pick(server);
    $("try-runs").replaceChildren();
    $("try-tokens").hidden = true;
    say($("try-verdict"), "");
    // The longest one: it shrinks most.
    const [longest] = (await examplesOf(server)).sort((a, b) => b.max_tokens - a.max_tokens);
    this.example = longest && fitted(longest, server);
    this.mend();
    if (!this.example || !this.policy) return;
    say($("try-what"), `${this.example.about}: asked twice at once, with the full cache (none) and ` +
      `with one that shrinks (${this.policy.name}).`);
  }

  /** Whether the server can be asked. */
  connect(live) {
    this.live = live;
    this.mend();
  }

  mend() {
    $("try-it").disabled = !(this.example && this.policy && (this.live || this.abort));
  }

  /** Both at once: a race, and half of the wait. */
  async run() {
    this.abort = new AbortController();
    say($("try-it"), "Stop");
    $("try-tokens").hidden = true;
    say($("try-verdict"), "");
    this.answers = [{ name: "none" }, this.policy].map((policy) => this.playground.answer(policy));
    this.rows = this.answers.map((answer) => row(answer));
    $("try-runs").replaceChildren(...this.rows.flatMap(({ parts }) => parts));
    try {
      await Promise.all(this.answers.map(async (answer, i) => {
        answer.onGrow = () => this.tell(i);
        await answer.ask(this.body, this.abort.signal);
        if (answer.error) this.abort.abort();
      }));
      this.answers.forEach((_, i) => this.tell(i));
      this.judge();
    } finally {
      this.abort = null;
      say($("try-it"), "Try it again");
      this.mend();
    }
  }

  get body() {
    const { prompt, max_tokens, ignore_eos } = this.example;
    return {
      model: this.server.model, messages: [{ role: "user", content: prompt }],
      max_tokens, ignore_eos, temperature: 0,
    };
  }

  tell(i) {
    const answer = this.answers[i], { memory } = answer, { bar, words } = this.rows[i];
    const { run, held } = answer, whole = (run.promptTokens ?? 0) + this.example.max_tokens;
    const most = this.answers[0].memory?.held ?? whole * this.server.tokenBytes;
    if (!memory) {
      const tokens = held.lanes ? held.entries(run.tokens) / held.lanes : run.tokens;
      fill(bar, (tokens * this.server.tokenBytes) / most);
      return say(words, answer.progress());
    }
    fill(bar, memory.held / Math.max(most, memory.held));
    const kv = run.usage.kv_cache_details;
    say(words, `${bytes(memory.held)} for ${count(kv.held_tokens)} of ` +
      `${count(kv.logical_tokens)} tokens`);
  }

  judge() {
    const wrong = this.answers.find(({ error }) => error);
    if (wrong) return say($("try-verdict"), `That did not work: ${wrong.error.message}`);
    if (!this.answers.every(({ memory }) => memory)) return say($("try-verdict"), "Stopped.");
    say($("try-verdict"), verdict(differences(...this.answers.map(({ run }) => run.ids))));
    $("try-tokens").hidden = false;
    for (const answer of this.answers) this.playground.onAnswer(answer);
  }
}

function row(answer) {
  const bar = el("span"), words = el("span", { class: "quiet" }, "waiting");
  const kind = answer.name === "none" ? "bar without" : "bar with";
  const parts = [el("span", {}, answer.name), el("span", { class: kind, "aria-hidden": "true" }, bar), words];
  return { bar, words, parts };
}
