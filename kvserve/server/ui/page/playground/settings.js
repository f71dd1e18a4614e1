// The drawer: policies, the system prompt, lengths. What does not depend on the server is remembered.

import { $ } from "../shared/dom.js";
import { PolicyForm } from "./policy_form.js";

const NAME = "kvserve.settings";
const FIELDS = ["system", "max-tokens", "temperature", "show-as"], BOXES = ["ignore-eos", "compare"];

export class Settings {
  constructor(onChange) {
    this.onChange = onChange;
    $("open-settings").addEventListener("click", () => $("settings").showModal());
    $("settings").addEventListener("change", () => this.keep());
    $("compare").addEventListener("change", () => this.split());
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    for (const id of FIELDS) $(id).value = kept[id] ?? $(id).value;
    for (const id of BOXES) $(id).checked = kept[id] ?? $(id).checked;
  }

  serve({ policies, own, context }) {
    const longest = $("max-tokens"); // half of a short context at most, as examples ask for
    if (longest.value > context >> 1) longest.value = context >> 1;
    this.forms = [
      new PolicyForm("Policy", policies, own),
      new PolicyForm("Second policy", policies, own, own.name === "none" ? "" : "none"),
    ];
    $("policies").replaceChildren(...this.forms.map((form) => form.element));
    this.split();
  }

  split() {
    if (!this.forms) return;
    this.forms[1].element.hidden = !$("compare").checked;
    this.onChange();
  }

  keep() {
    const kept = Object.fromEntries([
      ...FIELDS.map((id) => [id, $(id).value]), ...BOXES.map((id) => [id, $(id).checked]),
    ]);
    localStorage.setItem(NAME, JSON.stringify(kept));
    this.onChange();
  }

  /** What the columns ask under: a policy for each. */
  get policies() {
    return ($("compare").checked ? this.forms : this.forms.slice(0, 1)).map((form) => form.value);
  }

  get system() {
    return $("system").value.trim();
  }

  get showAs() {
    return $("show-as").value;
  }

  /** The fields of a request beside its messages. */
  get body() {
    const body = { temperature: Number($("temperature").value) };
    if ($("max-tokens").value) body.max_tokens = Number($("max-tokens").value);
    if ($("ignore-eos").checked) body.ignore_eos = true;
    return body;
  }

  take({ max_tokens }) {
    $("max-tokens").value = max_tokens;
    $("temperature").value = 0;
    this.keep();
  }
}
