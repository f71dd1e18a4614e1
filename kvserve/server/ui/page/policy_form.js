// A policy and its fields, made from the JSON Schema that `/v1/kv/policies` gives.

import { el } from "./dom.js";

let forms = 0;

export class PolicyForm {
  constructor(policies, chosen = "") {
    this.policies = policies;
    this.id = `policy${forms++}`;
    const names = policies.data.map((policy) => el("option", { value: policy.name }, policy.name));
    this.select = el("select", { id: this.id, onchange: () => this.build() },
      el("option", { value: "" }, `the server's own (${policies.default})`), ...names);
    this.select.value = chosen;
    this.summary = el("p", { class: "quiet" });
    this.fields = el("div", { class: "fields" });
    this.element = el("fieldset", { class: "policy" },
      el("legend", {}, "Policy"),
      el("label", { for: this.id }, "KV policy "), this.select, this.summary,
      el("details", {}, el("summary", {}, "Arguments"), this.fields));
    this.build();
  }

  /** `kv_policy` as the request wants it: nothing, or a name with the fields that were filled in. */
  get value() {
    if (!this.select.value) return undefined;
    const filled = [...this.fields.querySelectorAll("[name]")].filter((field) => field.value !== "");
    return {
      name: this.select.value,
      ...Object.fromEntries(filled.map((field) => [field.name, read(field.value)])),
    };
  }

  /** Choose a policy, with some of its fields. */
  set(name, fields = {}) {
    this.select.value = name;
    this.build();
    for (const [field, value] of Object.entries(fields)) {
      const input = this.fields.querySelector(`[name="${CSS.escape(field)}"]`);
      if (input) input.value = typeof value === "string" ? value : JSON.stringify(value);
    }
  }

  build() {
    const policy = this.policies.data.find(({ name }) => name === this.select.value);
    this.summary.textContent = policy
      ? policy.summary : "As the server was started; kv_policy is left out.";
    const properties = Object.entries(policy?.schema.properties ?? {});
    this.fields.replaceChildren(...properties
      .filter(([name]) => name !== "name")
      .map(([name, schema]) => this.field(name, schema)));
    if (!this.fields.childElementCount) this.fields.append(el("p", { class: "quiet" }, "None."));
  }

  field(name, schema) {
    const id = `${this.id}-${name}`, help = `${id}-help`;
    const shared = { id, name, "aria-describedby": help };
    const choices = schema.enum ?? (String(schema.type).includes("boolean") ? [true, false] : null);
    const shown = schema.default == null ? "not set" : plain(schema.default);
    const input = choices
      ? el("select", shared, el("option", { value: "" }, `default (${shown})`),
        ...choices.map((choice) => el("option", { value: plain(choice) }, plain(choice))))
      : el("input", { ...shared, placeholder: shown, autocomplete: "off", spellcheck: "false" });
    return el("div", {}, el("label", { for: id }, name), input,
      el("p", { id: help, class: "help" }, schema.description ?? ""));
  }
}

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Numbers, booleans and JSON as such; anything else is a string, and the server says what is wrong. */
function read(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
