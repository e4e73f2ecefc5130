"use strict";
// Shared by both parts: the data, element construction, number formatting.

const data = JSON.parse(document.getElementById("data").textContent);

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

find("title").textContent = data.title;
document.title = `${data.title} · run report`;
find("written").textContent = `Written ${data.written}`;
