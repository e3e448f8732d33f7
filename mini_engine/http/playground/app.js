// The playground: asks this server over its public API, and shows where the time of each answer went (`return_timings`)
// and what the server holds (`/metrics`). Text of the model and of the API is only ever set as text, never as HTML.

const $ = (id) => document.getElementById(id);

/** An element with a class and children: elements, or strings that stay text. */
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// --- the API ---------------------------------------------------------------------------------------------------------

let key = ""; // in memory only
let keyAsked = null; // the promise of a dialog that is open

/** What the API says is wrong. */
class ApiError extends Error {}

/** A response with status 200. Asks for the key as often as the API does; throws ApiError for other refusals. */
async function call(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const text = await response.text();
    const message = apiMessage(text) ?? `${response.status}: ${text.slice(0, 300)}`;
    if (response.status !== 401) throw new ApiError(message);
    if (used === key) await (keyAsked ??= askForKey(message));
  }
}

/** The message of an error in OpenAI's form; null of a proxy's page. */
function apiMessage(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return null;
  }
}

function askForKey(message) {
  $("key-error").textContent = message;
  $("key").value = "";
  $("key-dialog").showModal();
  return new Promise((resolve) => {
    $("key-dialog").onclose = () => {
      keyAsked = null;
      resolve();
    };
  });
}

$("key-dialog").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  $("key-dialog").close();
});

/** The server-sent events of a response, parsed. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// --- media -----------------------------------------------------------------------------------------------------------

const IMAGE_NAMES = /\.(avif|bmp|gif|heic|heif|jpe?g|png|tiff?|webp)$/i; // of files whose type the browser does not know
const SHAPES = [
  ["red", "circle", "left"],
  ["blue", "square", "up"],
  ["green", "triangle", "right"],
  ["yellow", "circle", "down"],
];
const RENDERED = { red: "#e11e23", blue: "#1e3ce1", green: "#23be37", yellow: "#f5e119" };
const CLIP_SECONDS = 1.5;

let attached = []; // {kind, file, address}; address: an object URL for the preview
let shapesRendered = 0;

function attach(files) {
  for (const file of files) {
    const isImage = file.type ? file.type.startsWith("image/") : IMAGE_NAMES.test(file.name);
    attached.push({ kind: isImage ? "image" : "video", file, address: URL.createObjectURL(file) });
  }
  showAttached();
}

function showAttached() {
  $("media").replaceChildren(
    ...attached.map((item) => {
      const remove = make("button", "remove", "Remove");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${item.file.name}`);
      remove.onclick = () => {
        attached = attached.filter((other) => other !== item);
        showAttached();
        $("question").focus();
      };
      const shown = preview(item);
      shown.append(remove);
      return shown;
    }),
  );
}

/** A list entry with the picture, or a player that shows the name of a format that the browser cannot play. */
function preview(item) {
  const view = make(item.kind === "image" ? "img" : "video");
  view.src = item.address;
  if (item.kind === "image") {
    view.alt = item.file.name;
  } else {
    view.muted = view.loop = view.playsInline = true;
    view.tabIndex = 0; // the controls would cover a small picture: they are there under the pointer and with the focus
    view.onpointerenter = view.onfocus = () => (view.controls = true);
    view.onpointerleave = view.onblur = () => (view.controls = false);
    view.autoplay = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    view.setAttribute("aria-label", item.file.name);
  }
  view.onerror = () => view.replaceWith(make("span", "no-preview muted", "no preview"));
  return make("li", "", view, make("span", "name", `${item.file.name}, ${bytes(item.file.size)}`));
}

/** The content part of a message. */
async function partOf(item) {
  const reader = new FileReader();
  await new Promise((resolve, reject) => {
    reader.onload = resolve;
    reader.onerror = () => reject(new ApiError(`${item.file.name}: ${reader.error.message}`));
    reader.readAsDataURL(item.file);
  });
  const data = reader.result.slice(reader.result.indexOf(",") + 1);
  const kind = `${item.kind}_url`;
  return { type: kind, [kind]: { url: `data:${item.file.type || "application/octet-stream"};base64,${data}` } };
}

/** A clip of a moving shape, recorded here; the bundled one where the browser cannot record WebM. */
async function renderShape() {
  const [colour, shape, motion] = SHAPES[shapesRendered++ % SHAPES.length];
  if (!globalThis.MediaRecorder?.isTypeSupported("video/webm") || !HTMLCanvasElement.prototype.captureStream) {
    const clip = await (await call("playground/clip.mp4")).blob();
    return new File([clip], "red circle.mp4", { type: "video/mp4" });
  }
  const canvas = make("canvas");
  [canvas.width, canvas.height] = [320, 240];
  draw(canvas, colour, shape, motion, 0);
  const recorder = new MediaRecorder(canvas.captureStream(24), { mimeType: "video/webm" });
  const recorded = [];
  recorder.ondataavailable = (event) => recorded.push(event.data);
  recorder.start();
  const begun = performance.now();
  for (let part = 0; part < 1; part = (performance.now() - begun) / 1000 / CLIP_SECONDS) {
    draw(canvas, colour, shape, motion, part);
    await new Promise((resolve) => setTimeout(resolve, 1000 / 24));
  }
  await new Promise((resolve) => {
    recorder.onstop = resolve;
    recorder.stop();
  });
  return new File(recorded, `${colour} ${shape}.webm`, { type: "video/webm" });
}

/** One frame; `part` of the way is done. */
function draw(canvas, colour, shape, motion, part) {
  const { width, height } = canvas;
  const brush = canvas.getContext("2d");
  const along = { left: [-1, 0], right: [1, 0], up: [0, -1], down: [0, 1] }[motion];
  const [x, y] = [width, height].map((side, axis) => side * (0.5 + along[axis] * (part - 0.5) * 0.55));
  const radius = height / 6;
  brush.fillStyle = "#5d6268";
  brush.fillRect(0, 0, width, height);
  brush.fillStyle = RENDERED[colour];
  brush.beginPath();
  if (shape === "circle") brush.arc(x, y, radius, 0, 7);
  if (shape === "square") brush.rect(x - radius, y - radius, 2 * radius, 2 * radius);
  if (shape === "triangle") {
    for (const corner of [0, 1, 2]) {
      const angle = (corner * 2 * Math.PI) / 3 - Math.PI / 2;
      brush.lineTo(x + 1.2 * radius * Math.cos(angle), y + 1.2 * radius * Math.sin(angle));
    }
  }
  brush.fill();
}

$("choose").onclick = () => $("files").click();
$("files").onchange = () => {
  attach($("files").files);
  $("files").value = ""; // the same file may be chosen again
};
$("shape").onclick = async () => {
  $("shape").disabled = true;
  $("shape").textContent = "Rendering";
  try {
    attach([await renderShape()]);
  } catch (error) {
    showError($("composer-error"), error);
  }
  $("shape").textContent = "Moving shape";
  $("shape").disabled = false;
};
addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").classList.add("over");
});
addEventListener("dragleave", (event) => event.relatedTarget ?? $("drop").classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  attach(event.dataTransfer.files);
});

// --- ask -------------------------------------------------------------------------------------------------------------

let model = null; // of /v1/models
let conversation = []; // the messages so far, with their media: the API keeps nothing between requests
let running = null; // the AbortController of the request in progress

/** The fields of the request that the settings name. Throws SyntaxError. */
function settings() {
  const fields = {};
  for (const { name, value } of $("settings").querySelectorAll("input")) {
    if (value.trim() === "") continue;
    if (name === "others") Object.assign(fields, JSON.parse(value));
    else if (name === "num_frames") fields.media_io_kwargs = { video: { num_frames: Number(value) } };
    else fields[name] = Number(value);
  }
  return fields;
}

/** Ask `messages` in a new entry of the list; `media` are those of the last message. False: no answer has begun. */
async function ask(messages, media) {
  const turn = $("turn-template").content.cloneNode(true).firstElementChild;
  const part = (name) => turn.querySelector(`.${name}`);
  part("media").append(...media.map(preview));
  part("question").textContent = messages.at(-1).content.at(-1).text;
  part("note").textContent = "Waiting for the first token";
  part("answer").setAttribute("aria-busy", "true"); // read aloud when it is complete
  $("turns").append(turn);
  setRunning(new AbortController());
  turn.scrollIntoView({ block: "nearest" });
  const answer = part("answer").appendChild(new Text());
  let accepted = false;
  try {
    const body = { model: model?.id, messages, stream: true, stream_options: { include_usage: true } };
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, return_timings: true, ...settings() }),
      signal: running.signal,
    });
    for await (const event of eventsOf(response)) {
      accepted = true;
      showEvent(event, answer, turn);
    }
  } catch (error) {
    part("note").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showError(part("error"), error);
  }
  part("again").hidden = false;
  part("answer").setAttribute("aria-busy", "false");
  part("again").onclick = () => running ?? ask(messages, media);
  if (accepted) conversation = [...messages, { role: "assistant", content: answer.data }];
  setRunning(null);
  turn.scrollIntoView({ block: "nearest" });
  return accepted;
}

/** Add what an event of the stream holds. */
function showEvent(event, answer, turn) {
  if (event.error) throw new ApiError(event.error.message);
  const [choice] = event.choices;
  const thoughts = turn.querySelector(".thoughts");
  if (choice?.delta.content) {
    const { scrollTop, clientHeight, scrollHeight } = answer.parentElement;
    answer.appendData(choice.delta.content);
    if (scrollTop + clientHeight > scrollHeight - 8) answer.parentElement.scrollTop = 1e6; // follow it
    turn.querySelector(".note").textContent = "";
  }
  for (const call of choice?.delta.tool_calls ?? []) thoughts.append(call.function.name ?? "", call.function.arguments);
  if (choice?.delta.reasoning_content) thoughts.append(choice.delta.reasoning_content);
  if (choice?.finish_reason === "length") turn.querySelector(".note").textContent = "Cut off at the maximum of tokens.";
  if (event.warnings) turn.querySelector(".note").textContent = event.warnings.join(" ");
  if (event.metrics) showTimings(turn, event.metrics, event.usage);
}

function showError(place, error) {
  const isOurs = error instanceof ApiError;
  const text = error instanceof SyntaxError ? `Other fields of the request: ${error.message}` : error.message;
  place.textContent = isOurs || !(error instanceof TypeError) ? text : "The server cannot be reached.";
  place.hidden = false;
}

function setRunning(controller) {
  running = controller;
  $("send").disabled = Boolean(controller);
  if (document.activeElement === $("stop")) $("question").focus(); // else the focus would be lost with the button
  $("stop").hidden = !controller;
  $("fresh").hidden = Boolean(controller) || !$("turns").children.length;
  $("send").textContent = conversation.length ? "Ask a follow-up" : "Ask";
}

$("composer").onsubmit = async (event) => {
  event.preventDefault();
  const [media, text] = [attached, $("question").value.trim()];
  if (running || !text) return;
  $("composer-error").hidden = true;
  try {
    settings();
    const content = [...(await Promise.all(media.map(partOf))), { type: "text", text }];
    attached = [];
    showAttached();
    $("question").value = "";
    if (await ask([...conversation, { role: "user", content }], media)) return;
    attached = [...media, ...attached]; // for another try
    showAttached();
    $("question").value ||= text;
  } catch (error) {
    showError($("composer-error"), error);
  }
};
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
};
$("stop").onclick = () => running?.abort();
$("fresh").onclick = () => {
  conversation = [];
  for (const view of $("turns").querySelectorAll("img, video")) URL.revokeObjectURL(view.src);
  $("turns").replaceChildren();
  setRunning(null);
  $("question").value ||= "Describe the video.";
  $("question").focus();
};

// --- see: where the time of an answer went ---------------------------------------------------------------------------

const STAGES = [ // in the order of a request
  ["fetch", "fetch"], ["admission", "admission"], ["media_decode", "decode"], ["process", "process"],
  ["transport", "transport"], ["queue", "queue"], ["encode", "encode"], ["prefill", "prefill"],
  ["generation", "generation"], ["other", "other"],
];

function showTimings(turn, timings, usage) {
  const seconds = Object.values(timings).reduce((sum, one) => sum + one, 0);
  const bar = turn.querySelector(".bar");
  const shown = STAGES.map(([stage, name]) => ({ stage, name, spent: timings[stage] }));
  const listed = shown.filter(({ spent }) => spent).map(({ name, spent }) => `${name} ${time(spent)}`);
  bar.setAttribute("aria-label", `${time(seconds)} in total: ${listed.join(", ")}`);
  bar.dataset.seconds = seconds;
  bar.replaceChildren(
    ...shown.map(({ stage, spent }) => {
      const segment = make("span", `stage ${stage}`);
      segment.dataset.seconds = spent;
      return segment;
    }),
  );
  turn.querySelector(".legend").replaceChildren(
    ...shown.map(({ stage, name, spent }) =>
      make("li", spent ? "" : "skipped", make("span", `swatch ${stage}`), `${name} `, make("b", "", time(spent))),
    ),
  );
  turn.querySelector(".levels").replaceChildren(...levels(timings, usage));
  turn.querySelector(".tokens").textContent = tokens(usage, seconds);
  turn.querySelector(".seen").hidden = false;
  scaleBars();
}

/** All bars have one scale, so that the second answer about a video is shorter where it is faster. */
function scaleBars() {
  const bars = [...document.querySelectorAll(".bar[data-seconds]")];
  const longest = Math.max(...bars.map((bar) => bar.dataset.seconds));
  for (const segment of bars.flatMap((bar) => [...bar.children])) {
    segment.style.width = `${(100 * segment.dataset.seconds) / longest}%`;
  }
}

/** Which caches spared work. Cached media have no decode and process stage, and what is not encoded has no encode. */
function levels(timings, usage) {
  const cached = usage.prompt_tokens_details.cached_tokens;
  const entry = (isHit, text) => make("li", isHit ? "hit" : "miss", text);
  const prefix = entry(cached > 0, `prefix cache: ${cached} of ${usage.prompt_tokens} tokens`);
  if (!usage.media) return [prefix];
  const [stored, encoded] = [timings.media_decode + timings.process === 0, timings.encode === 0];
  return [
    entry(stored, stored ? "media cache hit: no decode" : "media cache miss"),
    entry(encoded, encoded ? "encoder cache hit: no encode" : "encoder cache miss"),
    prefix,
  ];
}

function tokens(usage, seconds) {
  const { image_tokens: image, video_tokens: video } = usage.prompt_tokens_details;
  const text = usage.prompt_tokens - image - video;
  const kinds = [[text, "text"], [image, "image"], [video, "video"]].filter(([count]) => count);
  const prompt = `Prompt ${usage.prompt_tokens} tokens (${kinds.map(([count, kind]) => `${count} ${kind}`).join(", ")})`;
  const media = (usage.media ?? []).map((item) => {
    const frames = item.frames ? `, ${item.frames} frames` : "";
    return `${item.type} ${item.width} × ${item.height}${frames}`;
  });
  return [prompt, ...media, `answer ${usage.completion_tokens} tokens`, time(seconds)].join(" · ");
}

function time(seconds) {
  if (!seconds) return "0";
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const milliseconds = seconds * 1000;
  return milliseconds < 0.05 ? "<0.1 ms" : `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`;
}

function bytes(count) {
  const unit = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([size]) => count >= size);
  return unit ? `${(count / unit[0]).toFixed(1)} ${unit[1]}` : `${count} B`;
}

// --- see the server --------------------------------------------------------------------------------------------------

const CACHES = [
  ["mm_cache", "media cache, items"],
  ["encoder_cache", "encoder cache, items"],
  ["prefix_cache", "prefix cache, tokens"],
];

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
    const value = sum(element.dataset.metric);
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
  for (const [cache, name] of CACHES) {
    const [queries, hits] = [sum(`${cache}_queries_total`), sum(`${cache}_hits_total`)];
    showRow(cache, name, [queries, hits, queries - hits]);
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
  const engine = $("engine-template").content.cloneNode(true).firstElementChild;
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
  $("transports").append(make("div", "", make("dt", "", transport), value));
  return value;
}

function showRow(cache, name, values) {
  let row = document.querySelector(`[data-cache="${cache}"]`);
  if (!row) {
    const head = make("th", "", name);
    head.scope = "row";
    row = make("tr", "", head, ...values.map(() => make("td")));
    row.dataset.cache = cache;
    $("caches").append(row);
  }
  values.forEach((value, index) => setText(row.children[index + 1], value.toLocaleString("en")));
}

/** Every second while the page is visible. */
async function watchServer() {
  for (;;) {
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      continue;
    }
    try {
      model ??= (await (await call("v1/models")).json()).data[0];
      $("model").textContent = `${model.id} · ${model.max_model_len.toLocaleString("en")} tokens per request`;
      showServer(samplesOf(await (await call("metrics")).text()));
      setState("live", "live");
    } catch (error) {
      model = null; // another may be served next
      setState("down", error instanceof ApiError ? error.message : "The server cannot be reached.");
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function setState(name, text) {
  $("state").dataset.state = name;
  if ($("state").textContent !== text) $("state").textContent = text; // else it would be read aloud every second
}

watchServer();
