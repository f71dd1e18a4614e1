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
    $("try-it").addEventListener("click", () => this.run());
    $("try-tokens").addEventListener("click", () => show(this.example.prompt, this.answers));
  }

  async serve(server) {
    this.server = server;
    this.policy = pick(server);
    const [first] = await examplesOf(server);
    this.example = first && fitted(first, server);
    $("try-it").disabled = !(this.example && this.policy);
    if (!this.example || !this.policy) return;
    say($("try-what"), `${this.example.about}: asked twice, with the full cache (none) and then ` +
      `with one that shrinks (${this.policy.name}).`);
  }

  /** One after the other, so that neither slows the other down. */
  async run() {
    $("try-it").disabled = true;
    $("try-tokens").hidden = true;
    say($("try-verdict"), "Running.");
    this.answers = [{ name: "none" }, this.policy].map((policy) => this.playground.answer(policy));
    this.rows = this.answers.map((answer) => row(answer));
    $("try-runs").replaceChildren(...this.rows.flatMap(({ parts }) => parts));
    try {
      for (const [i, answer] of this.answers.entries()) {
        answer.onGrow = () => this.tell(i);
        await answer.ask(this.body, undefined);
        this.tell(i);
        if (answer.failed) throw new Error(answer.element.querySelector(".error").textContent);
      }
      this.judge();
    } catch (error) {
      say($("try-verdict"), `That did not work: ${error.message}`);
    } finally {
      $("try-it").disabled = false;
      say($("try-it"), "Try it again");
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
    const most = this.answers[0].memory?.held ?? this.answers[0].run.tokens * this.server.tokenBytes;
    if (!memory) return say(words, answer.progress());
    fill(bar, memory.held / Math.max(most, memory.held));
    const kv = answer.run.usage.kv_cache_details, { speed } = answer.run;
    say(words, `${bytes(memory.held)} for ${count(kv.held_tokens)} of ` +
      `${count(kv.logical_tokens)} tokens, ${count(speed ?? 0)} tokens/s`);
  }

  judge() {
    const [none, other] = this.answers.map(({ memory }) => memory.held);
    const found = differences(...this.answers.map(({ run }) => run.ids));
    const share = Math.round(100 * (1 - other / none));
    const saved = share > 0 ? `${share} % less memory at the end.` : "No memory saved this time.";
    say($("try-verdict"), `${verdict(found)} ${saved}`);
    $("try-tokens").hidden = false;
  }
}

function row(answer) {
  const bar = el("span"), words = el("span", { class: "quiet" }, "waiting");
  const kind = answer.name === "none" ? "bar without" : "bar with";
  const parts = [el("span", {}, answer.name), el("span", { class: kind, "aria-hidden": "true" }, bar), words];
  return { bar, words, parts };
}
