"use strict";
// Shared by all parts: the data, element construction, number formatting, definitions of names.

const data = JSON.parse(document.getElementById("data").textContent);
const isComparison = data.runs.length > 1;

const find = (id) => document.getElementById(id);

// An element with attributes; strings among the children become text, never markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function format(value, { signed = false } = {}) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value)) text = size.toLocaleString("en-US");
  else if (size >= 1000) text = Math.round(size).toLocaleString("en-US");
  else if (size >= 0.001) text = String(Number(size.toPrecision(3)));
  else text = size.toExponential(1);
  return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
}

// A long name that may wrap after "/", "_" and ".".
const breakable = (name) =>
  name.split(/(?<=[/_.])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));

// The folder that all names are in: "acc/made/" of "acc/made/a" and "acc/made/b".
function folderOf(names) {
  const folders = names.map((name) => name.split("/").slice(0, -1));
  const end = folders[0].findIndex((part, i) => folders.some((each) => each[i] !== part));
  return folders[0].slice(0, end < 0 ? undefined : end).map((part) => `${part}/`).join("");
}

// A name, with its definition in a tooltip if it has one.
function term(name, shown = name, attributes = {}) {
  const tip = Object.hasOwn(data.terms, name) ? data.terms[name] : "";
  const known = tip ? { "data-tip": tip, tabindex: "0" } : {};
  return element("span", { ...attributes, ...known }, ...breakable(shown));
}

// The name whose definition is shown, and the definition: below it, within the window.
let explained = null;

function explain(target) {
  explained = target;
  const tip = find("tip");
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  target.setAttribute("aria-describedby", "tip");
  const box = target.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const isBelow = box.bottom + tip.offsetHeight + 10 < window.innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${isBelow ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
}

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => explain(event.target.closest?.("[data-tip]") ?? null));
}
document.addEventListener("focusout", () => explain(null));
document.addEventListener("scroll", () => explain(explained), true); // as a focus may scroll to its name
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") explain(null);
});

const title = data.runs.map((run) => run.title).join(" · ");
find("title").replaceChildren(...breakable(title));
document.title = `${title} · run report`;
find("written").textContent = `Written ${data.written}`;
