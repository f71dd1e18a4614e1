// Copies a text; browsers keep the clipboard from pages that are not served securely.

import { el } from "./dom.js";

/** What to tell the person: "Copied", or that it did not work. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied";
  } catch {
    return copyBySelection(text) ? "Copied" : "Select it by hand";
  }
}

function copyBySelection(text) {
  const area = el("textarea", { "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
