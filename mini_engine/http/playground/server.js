// The panel of the server, from `/metrics`, and whether the server can be reached.

import { call, textOf } from "./api.js";
import { $, bytes, copyOf, make, once, term } from "./elements.js";

const POLL_TIMEOUT = 5000; // milliseconds

/** The samples of `/metrics`: {name, labels, value}. */
function samplesOf(text) {
  return [...text.matchAll(/^mini_engine:(\w+)(?:\{(.*)\})? (\S+)$/gm)].map(([, name, labels, value]) => {
    const pairs = [...(labels ?? "").matchAll(/(\w+)="([^"]*)"/g)].map(([, label, content]) => [label, content]);
    return { name, labels: Object.fromEntries(pairs), value: Number(value) };
  });
}

/** Set a text, and mark it for a moment if it has changed. */
function setText(element, text) {
  if (element.textContent === text) return;
  const first = element.textContent === "";
  element.textContent = text;
  if (first) return;
  element.classList.remove("changed");
  element.offsetWidth; // so that the animation starts again
  element.classList.add("changed");
}

function showServer(samples) {
  const named = (name) => samples.filter((sample) => sample.name === name);
  const sum = (name) => named(name).reduce((total, { value }) => total + value, 0);
  const { api_server_count: servers, tensor_parallel_size: ranks } = named("parallel_config_info")[0].labels;
  fillProcesses($("api-servers"), Number(servers), (index) => `api ${index}`);
  for (const element of document.querySelectorAll("[data-metric]")) {
    const value = sum(element.dataset.metric) - sum(element.dataset.minus);
    setText(element, element.dataset.unit === "bytes" ? bytes(value) : value.toLocaleString("en"));
  }
  for (const { labels, value } of named("ipc_bytes_total")) setText(entryOf(labels.transport), bytes(value));
  const fallbacks = named("ipc_fallbacks_total").filter(({ value }) => value);
  setText($("fallbacks"), fallbacks.map(({ labels, value }) => `${labels.reason} ${value}`).join(", ") || "none");
  for (const { labels, value } of named("num_requests_running")) {
    const engine = engineOf(labels.engine, Number(ranks));
    const own = (name, state) =>
      named(name).find((one) => one.labels.engine === labels.engine && one.labels.state === state).value;
    showEngine(engine, value, own);
  }
}

function showEngine(engine, running, own) {
  const part = (name) => engine.querySelector(`.${name}`);
  setText(part("running"), String(running));
  setText(part("waiting"), String(own("num_requests_waiting")));
  setText(part("encoder"), `${own("encoder_cache_tokens").toLocaleString("en")} tokens`);
  const [kv, used] = [own("kv_cache_usage_perc"), own("mm_store_bytes", "used")];
  const capacity = used + own("mm_store_bytes", "free");
  part("kv").value = kv;
  setText(part("kv-text"), `${(100 * kv).toFixed(kv && kv < 0.1 ? 2 : 1)} %`);
  part("store").value = capacity ? used / capacity : 0;
  setText(part("store-text"), capacity ? `${bytes(used)} of ${bytes(capacity)}` : "off");
}

/** The panel of an engine, made when it is first seen. */
function engineOf(index, ranks) {
  const found = document.querySelector(`[data-engine="${index}"]`);
  if (found) return found;
  const engine = copyOf("engine-template");
  engine.dataset.engine = index;
  engine.querySelector("h3").textContent = `Engine ${index}`;
  fillProcesses(engine.querySelector(".processes"), ranks, (rank) => `worker ${index}.${rank}`);
  $("engines").append(engine);
  return engine;
}

function fillProcesses(list, count, name) {
  while (list.children.length < count) list.append(make("li", "", name(list.children.length)));
}

/** The value of a transport, in an entry made when it is first seen. */
function entryOf(transport) {
  const found = document.querySelector(`[data-transport="${transport}"]`);
  if (found) return found;
  const value = make("dd");
  value.dataset.transport = transport;
  $("transports").append(make("div", "", make("dt", "", term(transport)), value));
  return value;
}

export let model = null; // of /v1/models
let since = null; // when the server was first not reached; null: it is reached

/** Every second while the page is visible. */
export async function watchServer() {
  for (;;) {
    if (document.hidden) {
      await once(document, "visibilitychange");
      continue;
    }
    const poll = (path) => call(path, { timeout: POLL_TIMEOUT });
    try {
      if (!model || since) model = (await (await poll("v1/models")).json()).data[0]; // perhaps another after a restart
      $("model").textContent = `${model.id} · ${model.max_model_len.toLocaleString("en")} tokens per request`;
      const samples = samplesOf(await (await poll("metrics")).text());
      if (since) for (const id of ["api-servers", "engines", "transports"]) $(id).replaceChildren(); // likewise
      showServer(samples);
      setState("live", "live");
      since = null;
    } catch (error) {
      since ??= new Date();
      setState("down", `${textOf(error)} (since ${since.toLocaleTimeString("en-GB")})`);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function setState(name, text) {
  document.body.dataset.state = name;
  if ($("state").textContent !== text) $("state").textContent = text; // else it would be read aloud every second
}
