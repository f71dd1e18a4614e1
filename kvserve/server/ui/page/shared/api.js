// Talks to this server: with the key of this tab, in its own words when it refuses, and in streams.

import { $ } from "./dom.js";

const KEY = "kvserve.api-key";

/** What the server said instead of an answer. */
export class ServerError extends Error {
  constructor(status, error = {}) {
    super(error.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error.code ?? null;
    this.param = error.param ?? null;
  }
}

const unreachable = () =>
  new ServerError(0, { message: "the server cannot be reached", code: "unreachable" });

/** A response that is fine; asks for the key where the server wants one. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEY);
    const headers = { ...(sent && { Authorization: `Bearer ${sent}` }) };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    }).catch((error) => {
      throw error.name === "AbortError" ? error : unreachable();
    });
    if (response.ok) return response;
    if (response.status !== 401) {
      const answer = await response.json().catch(() => ({}));
      throw new ServerError(response.status, answer.error);
    }
    await askForKey(sent);
  }
}

export const json = async (path, options) => (await call(path, options)).json();

/** The events of a stream, parsed; `[DONE]` is none. */
export async function* events(path, options) {
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : unreachable();
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: "));
        const text = data.map((line) => line.slice(6)).join("\n");
        if (text && text !== "[DONE]") yield JSON.parse(text);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

let asking = null;

/** One dialog, whoever asks; the key stays in this tab. `refused` is the key that did not fit. */
function askForKey(refused) {
  if (refused !== sessionStorage.getItem(KEY)) return Promise.resolve(); // there is a new one
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog"), input = $("key");
    $("key-wrong").hidden = !refused;
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      dialog.close();
    };
    dialog.onclose = () => {
      if (sessionStorage.getItem(KEY) === refused) dialog.showModal();
      else {
        asking = null;
        resolve();
      }
    };
    dialog.showModal();
  });
  return asking;
}
