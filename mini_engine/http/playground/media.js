// Videos and images: attaching them, the sample, clips that are rendered here, and the frames that the model sees.

import { call, textOf } from "./api.js";
import { $, bytes, make, once } from "./elements.js";

// Of files whose type the browser does not know, or mistakes.
const NAMES = {
  image: /\.(avif|bmp|gif|heic|heif|jpe?g|png|tiff?|webp)$/i,
  video: /\.(3gp|avi|flv|m2ts|m4v|mkv|mov|mp4|mpe?g|mts|ogv|ts|webm|wmv)$/i,
};
const SHAPES = [ // name, colour, corners (none: a circle), and the way it goes; x to the right, y down
  ["blue square", "#1e3ce1", [[-1, -1], [1, -1], [1, 1], [-1, 1]], [0, -1]],
  ["green triangle", "#23be37", [[0, -1.2], [1.04, 0.6], [-1.04, 0.6]], [1, 0]],
  ["yellow circle", "#f5e119", [], [0, 1]],
  ["red circle", "#e11e23", [], [-1, 0]],
];
const CLIP_SECONDS = 1.5;
const MOST_FRAMES = 64; // that are shown of a video
const FRAME_PIXELS = 256; // of a shown frame's width, at most
const INSIDE = 0.004; // seconds into a frame; Chromium may show an uneven one for longer than it lasts
const PRESENTED = 250; // milliseconds after which a frame that is not presented is the one that was there before

// What the next question is about: {kind, name, file, address, isSample}. `address` is an object URL; an item that was
// lost by a reload has no file.
let attached = [];
let shapesRendered = 0;

/** Attach videos and images; they replace the sample. Other files are refused. */
export function attach(files, isSample = false) {
  const kindOf = ({ name, type }) =>
    ["image", "video"].find((kind) => type.startsWith(`${kind}/`) || NAMES[kind].test(name));
  const items = [...files].map((file) => ({ kind: kindOf(file), name: file.name, file, isSample }));
  const refused = items.filter(({ kind }) => !kind).map(({ name }) => name);
  showError(refused.length ? `Neither a video nor an image: ${refused.join(", ")}` : "");
  const accepted = items.filter(({ kind }) => kind);
  for (const item of accepted) item.address = URL.createObjectURL(item.file);
  if (accepted.length) setAttached([...attached.filter((item) => !item.isSample), ...accepted]);
}

/** The attached items, which are no longer attached. */
export function takeAttached() {
  const items = attached;
  setAttached([]);
  return items;
}

/** Attach items again, before those that were attached meanwhile. */
export const putBack = (items) => setAttached([...items, ...attached]);

function setAttached(items) {
  attached = items;
  $("media").replaceChildren(...attached.map(attachment));
}

/** A preview that can be removed. */
function attachment(item) {
  const remove = make("button", "remove", "×");
  remove.type = "button";
  remove.title = remove.ariaLabel = `Remove ${item.name}`;
  remove.onclick = () => {
    setAttached(attached.filter((other) => other !== item));
    $("question").focus();
  };
  const shown = preview(item);
  shown.append(remove);
  return shown;
}

export function showError(text) {
  $("composer-error").textContent = text;
  $("composer-error").hidden = !text;
}

/** A list entry with the picture, or a player that shows the name of a format that the browser cannot play. */
export function preview(item) {
  const missing = (text) => make("span", "no-preview muted", text);
  if (!item.file) return make("li", "", missing("not kept"), make("span", "name", item.name));
  const view = make(item.kind === "image" ? "img" : "video");
  view.src = item.address;
  if (item.kind === "image") {
    view.alt = item.name;
  } else {
    view.muted = view.loop = view.playsInline = true;
    view.tabIndex = 0; // the controls would cover a small picture: they are there under the pointer and with the focus
    view.onpointerenter = view.onfocus = () => (view.controls = true);
    view.onpointerleave = view.onblur = () => (view.controls = false);
    view.autoplay = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    view.ariaLabel = item.name;
  }
  view.onerror = () => view.replaceWith(missing("no preview"));
  const sample = item.isSample ? "sample: " : "";
  return make("li", "", view, make("span", "name", `${sample}${item.name}, ${bytes(item.file.size)}`));
}

/** The file as a `data:` URL, which is kept for the requests to come. */
export function dataUrl(item) {
  item.url ??= new Promise((resolve, reject) => {
    const reader = new FileReader();
    const head = `data:${mediaType(item)};base64,`;
    reader.onload = () => resolve(head + reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error(`${item.name}: ${reader.error.message}`));
    reader.readAsDataURL(item.file);
  });
  return item.url;
}

export const mediaType = ({ file }) => file.type || "application/octet-stream";

// --- the frames that the model sees ----------------------------------------------------------------------------------

/** Thumbnails of an item, drawn here from its file: of the size, and at the times, that the response reports. */
export function framesOf(item, seen) {
  const times = seen.timestamps ?? [null];
  const every = Math.ceil(times.length / MOST_FRAMES);
  const count = seen.timestamps ? `${times.length} frames of ` : "";
  const size = `${seen.width} × ${seen.height}, ${seen.tokens} tokens`;
  const title = `${item.name} as the model sees it: ${count}${size}${every > 1 ? `; one in ${every} is shown` : ""}`;
  const list = make("ol", "strip");
  list.tabIndex = 0; // the keyboard scrolls it
  list.ariaLabel = title;
  drawFrames(list, item, seen, times.filter((_, index) => index % every === 0)).catch(() => {
    list.replaceChildren(make("li", "muted", "This browser cannot show them."));
  });
  return make("div", "", make("p", "muted", title), list);
}

async function drawFrames(list, item, { width, height }, times) {
  const source = make(item.kind === "image" ? "img" : "video");
  const failed = once(source, "error").then(() => Promise.reject(new Error(item.name)));
  const arrived = (event) => Promise.race([once(source, event), failed]);
  source.muted = true;
  source.src = item.address;
  await arrived(item.kind === "image" ? "load" : "loadeddata");
  for (const seconds of times) {
    if (seconds !== null) {
      const presented = new Promise((resolve) => source.requestVideoFrameCallback?.(resolve));
      source.currentTime = seconds + INSIDE;
      await arrived("seeked"); // when it may still show the frame before, or none
      await Promise.race([presented, new Promise((resolve) => setTimeout(resolve, PRESENTED))]);
    }
    const canvas = make("canvas");
    const scale = Math.min(1, FRAME_PIXELS / width);
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    canvas.getContext("2d").drawImage(source, 0, 0, canvas.width, canvas.height);
    list.append(make("li", "", canvas, seconds === null ? "" : `${seconds.toFixed(2)} s`));
  }
}

// --- clips -----------------------------------------------------------------------------------------------------------

/** Attach the bundled clip, so that the first click has something to ask about. */
export async function attachSample() {
  const clip = await (await call("playground/clip.mp4")).blob();
  if (!attached.length) attach([new File([clip], "red circle.mp4", { type: "video/mp4" })], true);
}

/** A clip of a moving shape, recorded here. */
async function renderShape() {
  const [name, ...shape] = SHAPES[shapesRendered++ % SHAPES.length];
  const canvas = make("canvas");
  [canvas.width, canvas.height] = [320, 240];
  draw(canvas, shape, 0);
  const recorder = new MediaRecorder(canvas.captureStream(24), { mimeType: "video/webm" });
  const recorded = [];
  recorder.ondataavailable = (event) => recorded.push(event.data);
  recorder.start();
  const begun = performance.now();
  for (let part = 0; part < 1; part = (performance.now() - begun) / 1000 / CLIP_SECONDS) {
    draw(canvas, shape, part);
    await new Promise((resolve) => setTimeout(resolve, 1000 / 24));
  }
  recorder.stop();
  await once(recorder, "stop");
  return new File(recorded, `${name}.webm`, { type: "video/webm" });
}

/** One frame; `part` of the way is done. */
function draw(canvas, [colour, corners, way], part) {
  const { width, height } = canvas;
  const brush = canvas.getContext("2d");
  const [x, y] = [width, height].map((side, axis) => side * (0.5 + way[axis] * (part - 0.5) * 0.55));
  const radius = height / 6;
  brush.fillStyle = "#5d6268";
  brush.fillRect(0, 0, width, height);
  brush.fillStyle = colour;
  brush.beginPath();
  if (!corners.length) brush.arc(x, y, radius, 0, 7);
  for (const [right, down] of corners) brush.lineTo(x + right * radius, y + down * radius);
  brush.fill();
}

const canRecord = globalThis.MediaRecorder?.isTypeSupported("video/webm") && HTMLCanvasElement.prototype.captureStream;
$("shape").hidden = !canRecord;
$("choose").onclick = () => $("files").click();
$("files").onchange = () => {
  attach($("files").files);
  $("files").value = ""; // the same file may be chosen again
};
$("shape").onclick = async () => {
  if ($("shape").ariaDisabled === "true") return; // not `disabled`, which would lose the focus
  $("shape").ariaDisabled = "true";
  $("shape").textContent = "Recording";
  try {
    attach([await renderShape()]);
  } catch (error) {
    showError(textOf(error));
  }
  $("shape").textContent = "Moving shape";
  $("shape").ariaDisabled = "false";
};
addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return; // office programs add a picture of the text
  event.preventDefault();
  attach(files);
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  $("composer").classList.add("over");
});
addEventListener("dragleave", (event) => event.relatedTarget ?? $("composer").classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  $("composer").classList.remove("over");
  attach(event.dataTransfer.files);
});
