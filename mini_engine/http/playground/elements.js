// Elements of the page, and numbers as text. Text of the model and of the API is only ever set as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** An element with a class and children: elements, or strings that stay text. */
export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** The content of a template, which has one element. */
export const copyOf = (template) => $(template).content.cloneNode(true).firstElementChild;

/** Resolves at the next event of this name. */
export const once = (target, name) => new Promise((resolve) => target.addEventListener(name, resolve, { once: true }));

const EXPLAINED = {
  admission: "Queued for a permit to decode media: only so many items are decoded at the same time.",
  shm_store: "Media that the engine caches: written once into its shared memory, from where all its workers read them.",
};

/** A name, with a tooltip under the pointer and with the focus if it needs one. */
export function term(name) {
  const element = make("span", "", name);
  if (name in EXPLAINED) {
    element.className = "term";
    element.tabIndex = 0;
    element.dataset.tip = element.ariaDescription = EXPLAINED[name];
  }
  return element;
}

export function time(seconds) {
  if (!seconds) return "0";
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const milliseconds = seconds * 1000;
  return milliseconds < 0.05 ? "<0.1 ms" : `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`;
}

export function bytes(count) {
  const unit = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([size]) => count >= size);
  return unit ? `${(count / unit[0]).toFixed(1)} ${unit[1]}` : `${count} B`;
}
