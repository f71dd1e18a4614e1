// The API's documentation from openapi.json, without anything of another machine's.

import { call, json } from "./shared/api.js";
import { $, el } from "./shared/dom.js";
import { useTheme } from "./shared/theme.js";

const METHODS = ["get", "post", "put", "patch", "delete"];

/** A schema in a few words, with links to those that have a name. */
function words(schema) {
  if (!schema || !Object.keys(schema).length) return ["anything"];
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return [el("a", { href: `#schema-${name}` }, name)];
  }
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return several.flatMap((part, i) => [...(i ? [" or "] : []), ...words(part)]);
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["list of ", ...words(schema.items)];
  return [String(schema.type ?? "object")];
}

function fieldTable(schema) {
  const needed = new Set(schema.required);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => el("tr", {},
    el("th", { scope: "row" }, el("code", {}, name), needed.has(name) ? " (required)" : ""),
    el("td", {}, ...words(field)), el("td", {}, field.description ?? "")));
  return el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, ...rows)));
}

/** A form that sends what is in it and shows what comes back. */
function tryOut(method, path, operation) {
  const parameters = (operation.parameters ?? []).filter((one) => one.in === "path");
  const inputs = parameters.map((one) => el("input", { "aria-label": one.name, placeholder: one.name }));
  const body = operation.requestBody
    ? el("textarea", { rows: "6", "aria-label": `body of ${path}`, spellcheck: "false" }, "{}") : null;
  const answer = el("pre", { hidden: true, tabindex: "0" });
  const send = async (event) => {
    event.preventDefault();
    answer.hidden = false;
    try {
      let filled = path.slice(1);
      parameters.forEach((one, i) => {
        filled = filled.replace(`{${one.name}}`, encodeURIComponent(inputs[i].value));
      });
      const given = method === "post" ? { body: body ? JSON.parse(body.value) : {} } : {};
      const text = await (await call(filled, given)).text();
      answer.textContent = pretty(text);
    } catch (error) {
      answer.textContent = error.message;
    }
  };
  return el("form", { onsubmit: send }, ...inputs, body, el("button", { type: "submit" }, "Send"), answer);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function operationBlock(method, path, operation) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const answers = Object.entries(operation.responses ?? {}).map(([status, response]) => {
    const schema = response.content?.["application/json"]?.schema;
    return el("li", {}, el("code", {}, status), " ", response.description ?? "", " ",
      ...(schema ? words(schema) : []));
  });
  return el("details", { class: "operation" },
    el("summary", {}, el("span", { class: "method" }, method.toUpperCase()), el("code", {}, path),
      " ", el("span", { class: "quiet" }, operation.summary ?? "")),
    el("p", {}, operation.description ?? ""),
    body ? el("p", {}, "Body: ", ...words(body)) : null,
    el("ul", {}, ...answers), tryOut(method, path, operation));
}

useTheme(() => {});
try {
  const api = await json("openapi.json");
  $("version").textContent = api.info.version;
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const method of METHODS.filter((name) => methods[name])) {
      const tag = methods[method].tags?.[0] ?? "other";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationBlock(method, path, methods[method]));
    }
  }
  for (const [tag, blocks] of groups) $("operations").append(el("h2", {}, tag), ...blocks);
  for (const [name, schema] of Object.entries(api.components?.schemas ?? {})) {
    $("schemas").append(el("details", { class: "operation", id: `schema-${name}` },
      el("summary", {}, el("code", {}, name)), el("p", {}, schema.description ?? ""),
      fieldTable(schema)));
  }
  $("schemas-title").hidden = false;
  $("state").textContent = "";
  // A link to a schema opens it.
  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target) target.open = true;
  };
  addEventListener("hashchange", open);
  open();
  document.body.dataset.ready = "true";
} catch (error) {
  $("state").textContent = `openapi.json cannot be read: ${error.message}`;
}
