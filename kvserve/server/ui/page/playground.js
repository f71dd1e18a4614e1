// The playground: a prompt, one pane for each policy, and examples that ship.

import { json } from "./api.js";
import { $, el } from "./dom.js";
import { Pane } from "./pane.js";

export class Playground {
  constructor(server, onAnswer) {
    this.panes = [new Pane("First policy", server, onAnswer),
      new Pane("Second policy", server, onAnswer)];
    $("panes").append(...this.panes.map((pane) => pane.element));
    this.panes[1].form.set("none");
    this.split(false);
    $("side-by-side").addEventListener("change", (event) => this.split(event.target.checked));
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.panes.forEach((pane) => pane.stop()));
    $("clear").addEventListener("click", () => this.panes.forEach((pane) => pane.clear()));
    $("trace-off").hidden = server.kvTrace;
    this.offer(server);
  }

  get shown() {
    return this.panes.filter((pane) => !pane.element.hidden);
  }

  split(two) {
    this.panes[1].element.hidden = !two;
    $("panes").classList.toggle("two", two);
  }

  async send() {
    const text = $("prompt").value;
    if (!text.trim()) return;
    const settings = { temperature: Number($("temperature").value) };
    if ($("max-tokens").value) settings.max_tokens = Number($("max-tokens").value);
    if ($("ignore-eos").checked) settings.ignore_eos = true;
    this.busy(true);
    try {
      await Promise.all(this.shown.map((pane) => pane.send(text, settings)));
    } finally {
      this.busy(false);
    }
  }

  busy(on) {
    $("send").disabled = on;
    $("stop").disabled = !on;
  }

  async offer(server) {
    const examples = await json("ui/examples.json");
    $("examples").append(...examples.map((example) => el("button", {
      type: "button",
      title: `a task that ${example.model} has learnt`,
      onclick: () => {
        $("prompt").value = example.prompt;
        $("max-tokens").value = Math.min(example.max_tokens, server.context >> 1);
        $("temperature").value = 0;
        $("prompt").focus();
      },
    }, example.title)));
  }
}
