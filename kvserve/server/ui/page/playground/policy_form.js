// A policy and its fields, made from the JSON Schema that `/v1/kv/policies` gives, and filled in with
// what that offers for this server.

import { el } from "../shared/dom.js";

let forms = 0;

export class PolicyForm {
  constructor(title, policies, own, chosen = "") {
    Object.assign(this, { policies, own, id: `policy${forms++}` });
    const names = policies.data.map(({ name, refusal }) => el("option",
      { value: name, disabled: Boolean(refusal) }, refusal ? `${name} (cannot run here)` : name));
    this.select = el("select", { id: this.id, onchange: () => this.build() },
      el("option", { value: "" }, `the server's own: ${words(own.name, own.args)}`), ...names);
    this.select.value = chosen;
    this.summary = el("p", { class: "quiet" });
    this.fields = el("div", { class: "fields" });
    this.arguments = el("details", {}, el("summary", {}, "Arguments"), this.fields);
    this.element = el("fieldset", { class: "policy" }, el("legend", {}, title),
      el("label", { for: this.id }, "KV policy"), this.select, this.refused(),
      this.summary, this.arguments);
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

  /** What cannot run on this server, and why. */
  refused() {
    const refused = this.policies.data.filter(({ refusal }) => refusal);
    if (!refused.length) return null;
    return el("details", {}, el("summary", {}, `Why ${refused.length} cannot run here`),
      el("ul", { class: "quiet" }, ...refused.map(({ name, refusal }) =>
        el("li", {}, el("strong", {}, name), `: ${refusal}`))));
  }

  build() {
    const policy = this.policies.data.find(({ name }) => name === this.select.value);
    this.summary.textContent = policy ? policy.summary : "As the server was started.";
    const properties = Object.entries(policy?.schema.properties ?? {});
    const fields = properties.filter(([name]) => name !== "name");
    this.arguments.hidden = !fields.length;
    this.fields.replaceChildren(...fields
      .map(([name, schema]) => this.field(name, schema, policy.offer[name])));
  }

  field(name, schema, offered) {
    const id = `${this.id}-${name}`, help = `${id}-help`;
    const shared = { id, name, "aria-describedby": help };
    const choices = schema.enum ?? (String(schema.type).includes("boolean") ? [true, false] : null);
    const shown = schema.default == null ? "not set" : plain(schema.default);
    const input = choices
      ? el("select", shared, el("option", { value: "" }, `default (${shown})`),
        ...choices.filter((choice) => choice !== null)
          .map((choice) => el("option", { value: plain(choice) }, plain(choice))))
      : el("input", { ...shared, placeholder: shown, autocomplete: "off", spellcheck: "false" });
    if (offered != null) input.value = plain(offered);
    return el("div", {}, el("label", { for: id }, name), input,
      el("p", { id: help, class: "help" }, schema.description ?? ""));
  }
}

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** A policy in a few words. */
export function words(name, args) {
  const given = Object.entries(args).map(([field, value]) => `${field} ${plain(value)}`);
  return [name, ...given].join(", ");
}

/** Numbers, booleans and JSON as such; anything else is a string, and the server says what is wrong. */
function read(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
