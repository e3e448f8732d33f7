// How an answer is shown: its text, where its time went, and which caches spared work.

import { make, term, time } from "./elements.js";

// --- the text --------------------------------------------------------------------------------------------------------

/** Elements of a small subset of Markdown: paragraphs, headings, lists, code, bold, italics. All else stays text, HTML
 * and links too: what a picture says must not become a link. */
export function markdown(text) {
  const blocks = [];
  let code = null;
  let list = null; // to which an entry is added
  let paragraph = null; // to which a line is added
  for (const line of text.split("\n")) {
    const [, heading] = line.match(/^#{1,6} (.*)/) ?? [];
    const [, number, entry] = line.match(/^\s*(?:[-*+]|(\d+)[.)]) (.*)/) ?? [];
    if (/^\s*```[^`]*$/.test(line)) {
      if (!code) blocks.push((code = make("pre")));
      else code = null;
      list = paragraph = null;
    } else if (code) {
      code.append(`${line}\n`);
    } else if (heading !== undefined) {
      blocks.push(make("h4", "", ...inline(heading)));
      list = paragraph = null;
    } else if (entry !== undefined) {
      const tag = number ? "OL" : "UL";
      if (list?.tagName !== tag) {
        blocks.push((list = make(tag)));
        if (number) list.start = number;
      }
      list.append(make("li", "", ...inline(entry)));
      paragraph = null;
    } else if (!line.trim()) {
      paragraph = null;
    } else if (paragraph) {
      paragraph.append("\n", ...inline(line));
    } else {
      blocks.push((paragraph = make("p", "", ...inline(line))));
      list = null;
    }
  }
  return blocks;
}

/** The parts of a line. */
function inline(line) {
  return line.split(/(`[^`]+`|\*\*[^*]+\*\*|\*[^*\s][^*]*\*)/).map((part, index) => {
    if (index % 2 === 0) return part;
    if (part.startsWith("`")) return make("code", "", part.slice(1, -1));
    return part.startsWith("**") ? make("strong", "", part.slice(2, -2)) : make("em", "", part.slice(1, -1));
  });
}

// --- its time --------------------------------------------------------------------------------------------------------

/** Fill `seen`, the part of an entry about its time. `timings` are in the order of a request, `pace` are texts: what this
 * page has measured. */
export function showTimings(seen, timings, usage, pace) {
  const seconds = Object.values(timings).reduce((sum, spent) => sum + spent, 0);
  const bar = seen.querySelector(".bar:not(.former)");
  if (bar.dataset.seconds) keepFormer(seen, bar);
  const shown = Object.entries(timings).map(([stage, spent]) => ({ stage, name: stage.replace("media_", ""), spent }));
  const listed = shown.filter(({ spent }) => spent).map(({ name, spent }) => `${name} ${time(spent)}`);
  bar.ariaLabel = `${time(seconds)} in the server: ${listed.join(", ")}`;
  bar.dataset.seconds = seconds;
  bar.replaceChildren(
    ...shown.filter(({ spent }) => spent).map(({ stage, spent }) => {
      const segment = make("span", `stage ${stage}`);
      segment.dataset.seconds = spent;
      return segment;
    }),
  );
  seen.querySelector(".legend").replaceChildren(
    ...shown.map(({ stage, name, spent }) =>
      make("li", spent ? "" : "skipped", make("span", `swatch ${stage}`), term(name), " ", make("b", "", time(spent))),
    ),
  );
  const chips = [`server ${time(seconds)}`, ...pace].map((text) => make("span", "chip", text));
  seen.querySelector(".chips").replaceChildren(...[...chips, ...levels(timings, usage)].flatMap((chip) => [chip, " "]));
  seen.querySelector(".tokens").textContent = tokens(usage);
  seen.hidden = false;
  scaleBars();
}

/** The bar of the answer that was replaced stays, thin, to compare. */
function keepFormer(seen, bar) {
  seen.querySelector(".former")?.remove();
  const former = bar.cloneNode(true);
  former.classList.add("former");
  former.ariaLabel = `Before: ${bar.ariaLabel}`;
  bar.before(former);
}

/** All bars have one scale, so that the second answer about a video is shorter where it is faster. */
function scaleBars() {
  const bars = [...document.querySelectorAll(".bar[data-seconds]")];
  const longest = Math.max(...bars.map((bar) => bar.dataset.seconds));
  for (const segment of bars.flatMap((bar) => [...bar.children])) {
    segment.style.width = `${(100 * segment.dataset.seconds) / longest}%`;
  }
}

/** Which caches spared work: of each item the patches or its embeddings; of facts alone it is decoded, as a new one. */
function levels(timings, { media, prompt_tokens: total, prompt_tokens_details: { cached_tokens: cached } }) {
  const entry = (isHit, text) => make("span", isHit ? "chip hit" : "chip", text);
  const prefix = entry(cached > 0, `prefix cache ${cached} of ${total}`);
  if (!media) return [prefix];
  const items = ["patches", "embeddings", "facts", null].map((kind, index) => {
    const count = media.filter((item) => item.cached === kind).length;
    return count && entry(index < 2, `media ${kind ?? "new"} ${count} of ${media.length}`);
  });
  return [...items.filter(Boolean), entry(!timings.encode, `encoder cache ${timings.encode ? "miss" : "hit"}`), prefix];
}

function tokens(usage) {
  const { image_tokens: image, video_tokens: video } = usage.prompt_tokens_details;
  const text = usage.prompt_tokens - image - video;
  const kinds = [[text, "text"], [image, "image"], [video, "video"]].filter(([count]) => count);
  const listed = kinds.map(([count, kind]) => `${count} ${kind}`).join(", ");
  return `Prompt ${usage.prompt_tokens} tokens (${listed}) · answer ${usage.completion_tokens} tokens`;
}
