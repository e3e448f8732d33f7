// The playground: asks this server over its public API, and shows where the time of each answer went
// (`return_timings`), which frames the model saw (`usage.media`) and what the server holds (`/metrics`).

import { markdown, showTimings } from "./answer.js";
import { ApiError, call, eventsOf, textOf } from "./api.js";
import { $, copyOf, time } from "./elements.js";
import { attachSample, dataUrl, framesOf, preview, putBack, showError, takeAttached } from "./media.js";
import { model, watchServer } from "./server.js";
import { curl, placeholder, python } from "./snippets.js";

const SAVED = "conversation"; // in the storage of this tab: its texts, neither files nor key
const TICK = 100; // milliseconds between two views of an answer that arrives
const LEAST_TOKENS = 5; // after the first, for a rate: fewer may arrive together

// The conversation: {question, media, answer, fields, entry, part}. `answer` is null of a question without one, which
// is in no later request; `fields` are the settings of its request; `part` finds a part of its entry by a class.
let turns = [];
let running = null; // the AbortController of the request in progress

// --- requests --------------------------------------------------------------------------------------------------------

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

/** The turns whose texts and media are sent with the question of `turn`, and this itself. */
const sentWith = (turn) => [...turns.slice(0, turns.indexOf(turn)).filter(({ answer }) => answer !== null), turn];

/** The files in a request, in order; those that a reload has lost are not sent. */
const filesOf = (sent) => sent.flatMap(({ media }) => media.filter(({ file }) => file));

/** The request of a turn, with the URL of each file, from a map. */
function requestOf(turn, urls) {
  const messages = sentWith(turn).flatMap((sent) => {
    const parts = filesOf([sent]).map((item) => {
      const kind = `${item.kind}_url`;
      return { type: kind, [kind]: { url: urls.get(item) } };
    });
    const question = { role: "user", content: [...parts, { type: "text", text: sent.question }] };
    return sent === turn ? [question] : [question, { role: "assistant", content: sent.answer }];
  });
  return { model: model?.id, messages, ...turn.fields };
}

async function urlsOf(files, urlOf) {
  return new Map(await Promise.all(files.map(async (item) => [item, await urlOf(item)])));
}

/** A text of the API with the names of files: it calls the second video of a conversation "video 2". */
function withNames(text, files) {
  return text.replace(/\b(image|video) (\d+)\b/g, (label, kind, number) => {
    return files.filter((item) => item.kind === kind)[number - 1]?.name ?? label;
  });
}

/** Ask the question of a turn; another answer is replaced by the first token of the new one. */
async function ask(turn) {
  const { part } = turn;
  const files = filesOf(sentWith(turn));
  const run = { stage: "reading files", begun: performance.now(), text: "", thoughts: "", shown: "", count: 0, files };
  setRunning(new AbortController());
  part("note").textContent = "";
  part("error").hidden = true;
  part("answer").ariaBusy = "true"; // read aloud when it is complete
  const timer = setInterval(() => showProgress(turn, run), TICK);
  showProgress(turn, run);
  try {
    turn.fields = settings();
    const body = requestOf(turn, await urlsOf(files, dataUrl));
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    run.stage = "waiting for the first token";
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options, return_timings: true }),
      signal: running.signal,
    });
    for await (const event of eventsOf(response)) receive(event, run, turn);
  } catch (error) {
    const isStop = error.name === "AbortError";
    part(isStop ? "note" : "error").textContent = isStop ? "Stopped." : withNames(textOf(error), files);
    part("error").hidden = isStop;
  }
  clearInterval(timer);
  showProgress(turn, run);
  part("pace").textContent = "";
  if (run.report) showReport(turn, run.report);
  part("answer").ariaBusy = "false";
  part("actions").hidden = false;
  setRunning(null);
  if (run.first) save();
}

/** Take what an event of the stream holds. */
function receive(event, run, turn) {
  if (event.error) throw new ApiError(event.error.message);
  const [choice] = event.choices;
  run.count = event.usage?.completion_tokens ?? run.count;
  if (!run.first) {
    Object.assign(run, { first: performance.now(), stage: "generating" });
    turn.part("seen").hidden = true; // it is of the answer before
  }
  run.text += choice?.delta.content ?? "";
  run.thoughts += choice?.delta.reasoning_content ?? "";
  for (const { function: made } of choice?.delta.tool_calls ?? []) run.thoughts += (made.name ?? "") + made.arguments;
  turn.answer = run.text;
  if (choice?.finish_reason === "length") turn.part("note").textContent = "Cut off at the maximum of tokens.";
  if (event.warnings) turn.part("note").textContent = withNames(event.warnings.join(" "), run.files);
  if (event.metrics) run.report = { timings: event.metrics, usage: event.usage, toFirst: run.first - run.begun };
}

/** What has arrived, the stage and a clock; then the time to the first token, and the tokens per second from there. */
function showProgress({ part }, run) {
  const now = performance.now();
  const texts = [run.stage, time((now - run.begun) / 1000)];
  if (run.first) texts.push(`TTFT ${time((run.first - run.begun) / 1000)}`);
  if (now > run.first + TICK) texts.push(perSecond(run.count, (now - run.first) / 1000));
  part("pace").textContent = texts.join(" · ");
  const arrived = run.thoughts + run.text;
  if (!run.first || arrived === run.shown) return;
  run.shown = arrived;
  part("thoughts").textContent = run.thoughts;
  part("answer").replaceChildren(...markdown(run.text));
}

/** Where the time of an answer went, and the frames that the model saw. */
function showReport({ part, media }, { timings, usage, toFirst }) {
  const pace = [`TTFT ${time(toFirst / 1000)}`];
  const later = usage.completion_tokens - 1;
  if (later >= LEAST_TOKENS) pace.push(perSecond(later, timings.generation));
  showTimings(part("seen"), timings, usage, pace);
  const seen = usage.media?.slice(-media.length);
  part("frames").replaceChildren(...media.map((item, index) => framesOf(item, seen[index])));
}

const perSecond = (count, seconds) => `${(count / seconds).toFixed(count < 10 * seconds ? 1 : 0)} tokens/s`;

/** Whatever an entry grows by, its end stays in view if it was. */
function follow(entry) {
  let before = Infinity; // its height
  new ResizeObserver(() => {
    const { top, height } = entry.getBoundingClientRect();
    const limit = $("composer").getBoundingClientRect().top;
    if (top + before <= limit && top + height > limit) entry.scrollIntoView({ block: "end" });
    before = height;
  }).observe(entry);
}

// --- the conversation ------------------------------------------------------------------------------------------------

/** Add a turn and its entry. */
function addTurn({ question, media, answer = null }) {
  const entry = copyOf("turn-template");
  const part = (name) => entry.querySelector(`.${name}`);
  const turn = { question, media, answer, fields: {}, entry, part };
  part("question").textContent = question;
  part("media").append(...media.map(preview));
  part("answer").append(...markdown(answer ?? ""));
  part("actions").hidden = answer === null;
  part("again").hidden = media.some(({ file }) => !file);
  part("details").ontoggle = () => entry.scrollIntoView({ block: "nearest" });
  part("again").onclick = () => running ?? ask(turn);
  part("curl").onclick = () => copy(turn, curl);
  part("python").onclick = () => copy(turn, python);
  turns.push(turn);
  $("turns").append(entry);
  follow(entry);
  return turn;
}

/** Copy the request of a turn as a program. The clipboard's own API is missing on pages over plain HTTP. */
async function copy(turn, write) {
  const text = write(requestOf(turn, await urlsOf(filesOf(sentWith(turn)), placeholder)));
  const fill = (event) => {
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  };
  addEventListener("copy", fill, { once: true });
  document.execCommand("copy");
  turn.part("note").textContent = "Copied.";
}

/** Keep the texts over a reload of this tab. */
function save() {
  const answered = turns.filter(({ answer }) => answer !== null);
  sessionStorage.setItem(SAVED, JSON.stringify(answered, ["question", "answer", "media", "kind", "name"]));
}

function setRunning(controller) {
  running = controller;
  $("send").ariaDisabled = String(Boolean(controller)); // not `disabled`, which would lose the focus
  if (document.activeElement === $("stop")) $("question").focus(); // likewise
  $("stop").hidden = !controller;
  $("fresh").hidden = Boolean(controller) || !turns.length;
  $("intro").hidden = turns.length > 0;
}

$("composer").onsubmit = async (event) => {
  event.preventDefault();
  await ready;
  const question = $("question").value.trim();
  if (running || !question) return;
  try {
    settings();
  } catch (error) {
    showError(textOf(error));
    return;
  }
  showError("");
  const media = takeAttached();
  $("question").value = "";
  const turn = addTurn({ question, media });
  const asked = ask(turn); // which shows its progress
  turn.entry.scrollIntoView({ block: "end" });
  await asked;
  if (turn.answer !== null) return;
  putBack(media); // for another try
  $("question").value ||= question;
};
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
};
$("stop").onclick = () => running?.abort();
$("fresh").onclick = () => {
  for (const { address } of turns.flatMap(({ media }) => media)) URL.revokeObjectURL(address);
  sessionStorage.removeItem(SAVED);
  turns = [];
  $("turns").replaceChildren();
  begin();
  $("question").focus();
};

/** A new conversation. */
function begin() {
  setRunning(null);
  $("question").value ||= "Describe the video.";
  return attachSample().catch(() => null); // the page does without
}

const saved = JSON.parse(sessionStorage.getItem(SAVED) ?? "[]");
saved.forEach(addTurn);
const ready = saved.length ? setRunning(null) : begin();
watchServer();
