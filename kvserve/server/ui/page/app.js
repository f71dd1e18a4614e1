// The page: three views, the theme, and the stream that is read only while somebody looks.

import { events, json } from "./api.js";
import { $ } from "./dom.js";
import { Playground } from "./playground.js";
import { PoolPanel, RequestColours } from "./pool.js";
import { RequestView } from "./request_view.js";
import { useTheme } from "./theme.js";

const VIEWS = ["pool", "playground", "request"];

function show(name) {
  for (const view of VIEWS) {
    const chosen = view === name, tab = $(`tab-${view}`);
    $(`view-${view}`).hidden = !chosen;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  if (name === "request") requests.draw();
  if (name === "pool") pool.drawCells();
}

function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = VIEWS.findIndex((view) => event.target.id === `tab-${view}`);
  const next = VIEWS[(at + step + VIEWS.length) % VIEWS.length];
  show(next);
  $(`tab-${next}`).focus();
}

/** Read the stream while the page can be seen; come back when the server does. */
async function watch() {
  for (;;) {
    const abort = new AbortController();
    const hide = () => document.hidden && abort.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      for await (const event of events("v1/kv/events", { signal: abort.signal })) {
        $("link").textContent = "live";
        pool.show(event);
        requests.sample(event);
      }
      $("link").textContent = "the server has ended the stream";
    } catch (error) {
      $("link").textContent = document.hidden ? "paused" : `not connected: ${error.message}`;
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    await (document.hidden ? shown() : new Promise((done) => setTimeout(done, 2000)));
  }
}

const shown = () => new Promise((done) => {
  document.addEventListener("visibilitychange", done, { once: true });
});

useTheme(() => {
  pool.drawCells();
  requests.drawn = null;
  requests.draw();
});
const requests = new RequestView();
const pool = new PoolPanel(new RequestColours(), (id) => {
  show("request");
  requests.choose(id);
});
for (const view of VIEWS) {
  $(`tab-${view}`).addEventListener("click", () => show(view));
  $(`tab-${view}`).addEventListener("keydown", onTabKey);
}
show(VIEWS.find((view) => location.hash === `#${view}`) ?? "pool");

const [info, policies] = [await json("server_info"), await json("v1/kv/policies")];
$("served").textContent =
  `${info.served_model_names[0]}, policy ${info.policy.name}, kvserve ${info.version}`;
new Playground({
  model: info.served_model_names[0],
  context: info.max_model_len,
  kvTrace: info.kv_trace,
  policies,
}, (answer) => requests.addAnswer(answer));
document.body.dataset.ready = "true";
watch();
