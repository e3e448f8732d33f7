// Requests to this server's API, with the key that it asks for.

import { $, once } from "./elements.js";

export let key = ""; // in memory only
let keyAsked = null; // the promise of a dialog that is open

/** What the API says is wrong. */
export class ApiError extends Error {}

/** What to show of an error: the API's text, or that of this page. A fetch that fails is a TypeError, or a time-out. */
export function textOf(error) {
  if (error instanceof ApiError) return error.message;
  if (error instanceof SyntaxError) return `Other fields of the request: ${error.message}`;
  return error instanceof TypeError || error.name === "TimeoutError" ? "The server cannot be reached" : error.message;
}

/** A response with status 200. Asks for the key as often as the API does; throws ApiError for other refusals.
 * `timeout`, in milliseconds, is for one attempt. */
export async function call(path, { timeout, ...options } = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    if (timeout) options.signal = AbortSignal.timeout(timeout);
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const text = await response.text();
    const message = apiMessage(text) ?? `${response.status}: ${text.slice(0, 300)}`;
    if (response.status !== 401) throw new ApiError(message);
    if (used === key) await (keyAsked ??= askForKey(used ? message : "This server requires an API key."));
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

async function askForKey(message) {
  $("key-reason").textContent = message;
  $("key").value = "";
  $("key-dialog").showModal();
  await once($("key-dialog"), "close");
  keyAsked = null;
}

$("key-dialog").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  $("key-dialog").close();
});

/** The server-sent events of a response, parsed. */
export async function* eventsOf(response) {
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
