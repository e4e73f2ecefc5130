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

// A name, with its definition in a tooltip if it has one.
function term(name, shown = name, attributes = {}) {
  const tip = Object.hasOwn(data.terms, name) ? data.terms[name] : "";
  const known = tip ? { "data-tip": tip, tabindex: "0" } : {};
  return element("span", { ...attributes, ...known }, ...breakable(shown));
}

// Shows the definition of a name below it, within the window.
function explain(event) {
  const target = event.target.closest?.("[data-tip]");
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

for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, explain);
document.addEventListener("focusout", () => { find("tip").hidden = true; });
document.addEventListener("scroll", () => { find("tip").hidden = true; }, true);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") find("tip").hidden = true;
});

const title = data.runs.map((run) => run.title).join(" · ");
find("title").replaceChildren(...breakable(title));
document.title = `${title} · run report`;
find("written").textContent = `Written ${data.written}`;
