// The page: three views, the theme, and the connection that feeds them.

import { Connection } from "./connection.js";
import { Overview } from "./overview/overview.js";
import { TryIt } from "./overview/try_it.js";
import { Playground } from "./playground/playground.js";
import { words } from "./playground/policy_form.js";
import { $, forgetColours, say } from "./shared/dom.js";
import { RequestNames } from "./shared/request_names.js";
import { useTheme } from "./shared/theme.js";
import { RequestView } from "./tokens/request_view.js";

const VIEWS = ["overview", "playground", "requests"];
const names = new RequestNames();
const requests = new RequestView(names);
const overview = new Overview(names, (id) => {
  show("requests");
  requests.choose(id);
});
const playground = new Playground((answer) => requests.addAnswer(answer));
const tryIt = new TryIt(playground, (text, answers) => {
  show("playground");
  playground.adopt(text, answers);
});

function show(name) {
  for (const view of VIEWS) {
    const chosen = view === name, tab = $(`tab-${view}`);
    $(`view-${view}`).hidden = !chosen;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
  document.body.dataset.view = name;
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  requests.redraw();
  overview.redraw();
}

function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = VIEWS.findIndex((view) => event.target.id === `tab-${view}`);
  const next = VIEWS[(at + step + VIEWS.length) % VIEWS.length];
  show(next);
  $(`tab-${next}`).focus();
}

/** Take the figures of one moment; tests feed it by hand. */
export function take(event) {
  overview.show(event);
  requests.sample(event);
}

let served = "";

/** At every new connection: what is served may be another model, or the same one again. */
async function serve({ info, policies }) {
  const [model] = info.served_model_names, own = info.policy, { dtype } = info.kv_cache;
  const now = JSON.stringify([model, info.max_model_len, info.kv_trace, own, dtype, policies]);
  overview.serve({ info }, now !== served);
  if (now === served) return;
  served = now;
  say($("served-model"), model);
  say($("served-policy"), own.name);
  $("served-policy").hidden = false;
  say($("serves"), `kvserve ${info.version} serves ${model} under ${words(own.name, own.args)}.`);
  if (dtype === "auto") delete document.body.dataset.bits;
  else document.body.dataset.bits = dtype;
  say($("in-bits"), dtype === "auto" ? "" : `, in fewer bits (${dtype})`);
  const server = {
    model,
    own,
    policies,
    policyName: own.name,
    loaded: info.config.model.model,
    context: info.max_model_len,
    kvTrace: info.kv_trace,
    tokenBytes: info.kv_cache.token_bytes,
  };
  await Promise.all([playground.serve(server), tryIt.serve(server)]);
  document.body.dataset.ready = "true";
}

useTheme(() => {
  forgetColours();
  names.forgetColours();
  requests.drawn = null;
  requests.redraw();
  overview.redraw();
});
for (const view of VIEWS) {
  $(`tab-${view}`).addEventListener("click", () => show(view));
  $(`tab-${view}`).addEventListener("keydown", onTabKey);
}
show(VIEWS.find((view) => location.hash === `#${view}`) ?? "overview");
new Connection({
  onServer: (server) => serve(server).catch((error) => console.error(error)), onEvent: take,
  onState: (live) => tryIt.connect(live),
}).run();
