// The rollout inspector: one prompt at a time, with all of its responses.

const BAR = 50; // percent of the bar on each side of zero

// Each with its run, and a key: "step/number", behind the run if there are several.
const groups = data.runs.flatMap((run, number) => run.groups.map((group, at) => {
  const place = `${group.step}/${at - run.groups.findIndex((each) => each.step === group.step)}`;
  return { ...group, run: run.title, key: isComparison ? `${number}/${place}` : place };
}));

const state = { shown: [], at: 0, isWhole: false, query: "" };
const selects = {}; // select elements by filtered property

const valuesOf = {
  ...(isComparison ? { run: (group) => [group.run] } : {}),
  step: (group) => [String(group.step)],
  source: (group) => [group.source],
  role: (group) => group.responses.map((response) => response.role).filter(Boolean),
  outcome: (group) => [group.outcome],
};

function buildFilters() {
  for (const [name, of] of Object.entries(valuesOf)) {
    const values = [...new Set(groups.flatMap(of))];
    if (!values.length) continue;
    selects[name] = element(
      "select", { id: `filter-${name}` }, element("option", { value: "" }, "all"),
      ...values.map((value) => element("option", { value }, value)),
    );
    selects[name].addEventListener("change", filter);
    find("filters").append(element("label", {}, element("span", {}, name), selects[name]));
  }
  const search = element("input", { id: "search", type: "search", placeholder: "question, response, id" });
  search.addEventListener("input", filter);
  find("filters").prepend(element("label", { class: "search" }, element("span", {}, "search"), search));
  const clear = element("button", { id: "clear", type: "button" }, "Clear");
  clear.addEventListener("click", clearFilters);
  find("filters").append(clear);
}

function clearFilters() {
  for (const select of Object.values(selects)) select.value = "";
  find("search").value = "";
  filter();
}

// What the search looks through, in small letters.
const searched = (group) => group.searched ??= [
  group.id, group.source, group.question, group.gold, ...group.choices,
  ...group.responses.flatMap((response) => [response.answer, response.text]),
].join("\n").toLowerCase();

// Keeps the current group if it passes the filters.
function filter() {
  const current = state.shown[state.at];
  const chosen = Object.entries(selects).filter(([, select]) => select.value);
  state.query = find("search").value.toLowerCase();
  state.shown = groups.filter((group) => searched(group).includes(state.query)
    && chosen.every(([name, select]) => valuesOf[name](group).includes(select.value)));
  find("clear").hidden = !chosen.length && !state.query;
  find("list").replaceChildren(...state.shown.map(listed));
  show(Math.max(state.shown.indexOf(current), 0));
}

// A text with what was searched for marked; a letter that has no equally long small one stops that.
function found(text) {
  const small = text.toLowerCase();
  if (!state.query || small.length !== text.length) return [text];
  const parts = [];
  let from = 0;
  for (let at = small.indexOf(state.query); at >= 0; at = small.indexOf(state.query, from)) {
    parts.push(text.slice(from, at), element("mark", {}, text.slice(at, at + state.query.length)));
    from = at + state.query.length;
  }
  return [...parts, text.slice(from)];
}

const mark = (response) => ({ right: "✓", wrong: "✗" })[response.verdict] || "~";
const classOf = (text) => text.replace(/ /g, "-");

const whereOf = ({ run, step, source, id }) => `${isComparison ? `${run} · ` : ""}step ${step} · ${source} ${id}`;

function listed(group, index) {
  const strip = group.responses.map((response) =>
    element("i", { class: `mark ${classOf(response.verdict)} ${classOf(response.role)}` }, mark(response)));
  const made = element(
    "button", { type: "button", role: "option", tabindex: "-1" },
    element("span", { class: "where" }, ...breakable(whereOf(group))),
    element("span", { class: "muted" }, group.outcome),
    element("span", { class: "strip", "aria-hidden": "true" }, ...strip),
  );
  made.addEventListener("click", () => show(index));
  return made;
}

function show(index) {
  const { shown } = state;
  state.at = index;
  const group = shown[index];
  find("place").textContent = group ? `${index + 1} of ${shown.length}` : "none";
  find("previous").disabled = index <= 0;
  find("next").disabled = index >= shown.length - 1;
  const list = find("list");
  [...list.children].forEach((each, i) => each.setAttribute("aria-selected", i === index));
  const item = list.children[index];
  if (item) {
    const top = item.offsetTop - list.offsetTop;
    list.scrollTop = Math.max(Math.min(list.scrollTop, top), top + item.offsetHeight - list.clientHeight);
  }
  const empty = groups.length ? "No group passes these filters." : "No rollouts are here yet.";
  find("group").replaceChildren(...(group ? detail(group) : [element("p", { class: "muted" }, empty)]));
  find("group").querySelectorAll(".text").forEach(clip);
  if (group) find("group").dataset.key = group.key;
}

function detail(group) {
  const largest = Math.max(...group.responses.map((response) => Math.abs(response.advantage)), 1e-9);
  const images = group.pictures.map((src, i) => element(
    "figure", {},
    src
      ? element("img", { src, alt: `image ${i + 1} of the question` })
      : element("p", { class: "muted" }, "image not readable"),
    group.images?.[i] ? element("figcaption", { class: "muted" }, sizes(group.images[i])) : null,
  ));
  const choices = group.choices.length
    ? element("ol", { class: "choices" }, ...group.choices.map((choice) => element("li", {}, choice))) : null;
  return [
    element(
      "div", { class: "prompt" }, element("div", { class: "pictures" }, ...images),
      element(
        "div", {},
        element("p", { class: "muted" }, ...found(whereOf(group)), " · ", term(group.outcome)),
        element("p", { class: "question" }, ...question(group)), choices,
        element("p", { class: "gold" }, term("gold", "gold", { class: "muted" }), " ", element("b", {}, group.gold)),
        rendered(group),
      ),
    ),
    legend(group),
    ...group.responses.map((response) => card(response, group, largest)),
  ];
}

function question(group) {
  return group.question.split("<image>").flatMap((text, i) =>
    i ? [element("span", { class: "slot" }, `image ${i}`), ...found(text)] : found(text));
}

// An image's size as given and as the model sees it, in pixels.
function sizes({ given, resized, tokens }) {
  const [from, to] = [given, resized].map(([width, height]) => `${width}×${height}`);
  return `image ${from}${from === to ? "" : ` → ${to}`}, ${format(tokens)} ${tokens === 1 ? "token" : "tokens"}`;
}

// The prompt with the template's special tokens, if the log has it.
function rendered(group) {
  if (!group.rendered) return null;
  return element(
    "details", { class: "rendered" }, element("summary", {}, "Prompt as the model sees it"),
    element("pre", {}, ...found(group.rendered)),
  );
}

function legend(group) {
  const kinds = [["think", "rationale"], ["answer", "answer"]];
  if (group.repair && group.repair.has_context) kinds.push(["context", "given: the failed rationale"], ["cue", "cue"]);
  return element("p", { class: "key" }, ...kinds.map(([kind, name]) => element("span", { class: kind }, name)));
}

function card(response, group, largest) {
  const isRepair = response.role === "reflected" && group.repair;
  const title = element(
    "header", {},
    element("h3", {}, isRepair ? "second try" : `#${response.number}`),
    response.role ? term(response.role, response.role, { class: `role ${classOf(response.role)}` }) : null,
    term(response.verdict, `${mark(response)} ${response.verdict}`, { class: `verdict ${classOf(response.verdict)}` }),
    response.reason ? element("span", { class: "reason muted", title: "what decided" }, response.reason) : null,
    response.answer ? element("span", { class: "said" }, response.answer) : null,
    group.repair && group.repair.of === response.number
      ? element("span", { class: "muted" }, group.outcome === "repaired" ? "replaced by its repair" : "tried again")
      : null,
    ...response.notes.map((note) => element("span", { class: "note" }, note)),
  );
  return element(
    "article", { class: `response ${classOf(response.role)}` },
    title, numbers(response, largest), isRepair ? change(group.repair) : null,
    ...texts(segments(response, group), isRepair),
  );
}

function numbers(response, largest) {
  const pair = (name, value, defined = name) =>
    element("div", {}, element("dt", {}, term(defined, name)), element("dd", {}, value));
  const side = (Math.abs(response.advantage) / largest) * BAR;
  const bar = element("span", { class: "bar", "aria-hidden": "true" });
  const fill = element("i", { class: response.advantage < 0 ? "down" : "up" });
  fill.style.width = `${side}%`;
  fill.style.left = `${response.advantage < 0 ? BAR - side : BAR}%`;
  bar.append(fill);
  const lengths = `${response.think_tokens} + ${response.answer_tokens} of ${response.tokens}`;
  return element(
    "dl", { class: "numbers" },
    pair("reward", format(response.reward), "reward of a response"),
    ...Object.entries(response.components).map(([name, value]) => pair(name, format(value), "component")),
    response.distance === null ? null : pair("d", format(response.distance)),
    response.raw === null ? null : pair("A raw", format(response.raw, { signed: true })),
    pair("A", format(response.advantage, { signed: true })),
    pair("tokens", lengths),
    element("div", { class: "advantage" }, bar),
  );
}

function change(repair) {
  return element(
    "p", { class: "change" }, `Repairs #${repair.of}: `,
    element("b", {}, repair.before || "no answer"), " → ", element("b", {}, repair.after || "no answer"),
    repair.has_context ? null : ". It is trained as an answer to the prompt alone, so its context is not here",
    repair.cue && !repair.has_context ? `; the cue was: ${repair.cue.trim()}` : null,
  );
}

// [start, end] of a tag's span, tags included; a missing tag gives the text's start or end.
function extent(text, tag) {
  const start = Math.max(text.indexOf(`<${tag}>`), 0);
  const end = text.indexOf(`</${tag}>`, start);
  return [start, end < 0 ? text.length : end + tag.length + 3];
}

// The text of a response as [kind, part]: "context" and "cue" were forced, the rest was sampled.
function segments({ role, text, answer, think_tokens }, { repair, think_tag }) {
  const numGiven = role === "reflected" ? repair.num_given : 0;
  const given = [...text].slice(0, numGiven).join(""); // counted in code points, not in UTF-16
  const cueStart = given.length - (given.endsWith(repair?.cue) ? repair.cue.length : 0);
  const spans = {
    context: [0, cueStart],
    cue: [cueStart, given.length],
    think: think_tokens ? extent(text, think_tag) : [0, 0],
    answer: answer ? extent(text, "answer") : [0, 0],
  };
  const bounds = [...new Set([0, text.length, ...Object.values(spans).flat()])].sort((a, b) => a - b);
  const kindAt = (at) => Object.keys(spans).find((kind) => spans[kind][0] <= at && at < spans[kind][1]);
  return bounds.slice(1).map((end, i) => [kindAt(bounds[i]) || "text", text.slice(bounds[i], end)]);
}

// A reflected row is shown in two columns: forced and sampled text.
function texts(parts, isRepair) {
  const isGiven = ([kind]) => kind === "context" || kind === "cue";
  const given = parts.filter(isGiven);
  const whole = (parts) =>
    element("div", { class: "text" }, ...parts.map(([kind, text]) => element("span", { class: kind }, ...found(text))));
  if (!isRepair || !given.length) return [whole(parts)];
  const side = (name, parts) => element("div", {}, element("h4", {}, name), whole(parts));
  return [element(
    "div", { class: "beside" }, side("given", given), side("written", parts.filter((each) => !isGiven(each))),
  )];
}

// Clips long texts and adds a button that shows the rest.
function clip(text) {
  const isWhole = state.isWhole || Boolean(state.query);
  text.classList.toggle("clipped", !isWhole);
  if (isWhole || text.scrollHeight <= text.clientHeight + 4) {
    text.classList.remove("clipped");
    return;
  }
  const more = element("button", { type: "button", class: "more" }, "whole text");
  more.addEventListener("click", () => {
    text.classList.remove("clipped");
    more.remove();
  });
  text.after(more);
}

function move(by) {
  const to = state.at + by;
  if (to >= 0 && to < state.shown.length) show(to);
}

function moveStep(by) {
  const steps = [...new Set(state.shown.map((group) => group.step))];
  const wanted = steps[steps.indexOf(state.shown[state.at]?.step) + by];
  if (wanted !== undefined) show(state.shown.findIndex((group) => group.step === wanted));
}

// Shows the groups of the step nearest to `step`.
function inspect(step) {
  if (!groups.length) return;
  const away = (group) => Math.abs(group.step - step);
  clearFilters();
  show(groups.indexOf(groups.reduce((a, b) => (away(b) < away(a) ? b : a))));
  find("inspector").scrollIntoView();
}

function toggleWhole() {
  state.isWhole = !state.isWhole;
  show(state.at);
}

// [keys, description for the help, action].
const KEYS = [
  [["j", "→"], "next group", () => move(1)],
  [["k", "←"], "previous group", () => move(-1)],
  [["J"], "first group of the next step", () => moveStep(1)],
  [["K"], "first group of the previous step", () => moveStep(-1)],
  [["e"], "whole texts, or their beginnings", toggleWhole],
  [["/"], "search", () => find("search").focus()],
  [["f"], "to the filters", () => find("filters").querySelector("select")?.focus()],
  [["x"], "clear search and filters", clearFilters],
  [["?"], "this help; Esc closes it", () => find("help").showModal()],
];
const ARROWS = { ArrowRight: "→", ArrowLeft: "←" };

document.addEventListener("keydown", (event) => {
  const [, , act] = KEYS.find(([keys]) => keys.includes(ARROWS[event.key] || event.key)) || [];
  const isTyping = event.target.closest?.("select, input, dialog");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !act) return;
  act();
  event.preventDefault();
});
for (const [keys, does] of KEYS) {
  const names = keys.flatMap((key) => [element("kbd", {}, key), " "]);
  find("keys").append(element("div", {}, element("dt", {}, ...names), element("dd", {}, does)));
}
find("previous").addEventListener("click", () => move(-1));
find("next").addEventListener("click", () => move(1));
find("help-button").addEventListener("click", () => find("help").showModal());

const numLogged = data.runs.reduce((sum, run) => sum + run.logged.length, 0);
const numShown = new Set(groups.map((group) => `${group.run} ${group.step}`)).size;
const thinned = numShown && numShown < numLogged
  ? ` Older steps are thinned to keep this file within ${format(data.max_megabytes)} MB.` : "";
find("sample").textContent =
  `Groups of ${numShown} of the ${numLogged} logged steps, each outcome in turn ` +
  `and so not in proportion.${thinned}`;
find("inspector").classList.toggle("empty", !groups.length);
buildFilters();
filter();
