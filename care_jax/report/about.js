// What the runs are, and the table of their evaluations.

const STAGES = {
  rl: "Reinforcement learning",
  rl_eval: "Evaluation during reinforcement learning",
  sft: "Cold start",
  sft_eval: "Evaluation during the cold start",
};
const NUM_COLORS = 6;

const swatch = (index) => element("i", { class: `swatch s${index % NUM_COLORS} d${index % NUM_COLORS}` });
const headings = (first, cells) => element(
  "thead", {}, element("tr", {}, element("th", { scope: "col" }, first), ...cells),
);
const runHeading = (run, attributes = {}) =>
  element("th", { scope: "col", ...attributes }, swatch(run), ...breakable(data.runs[run].title));

// A line of parts that breaks between them: a command and its arguments, or keys.
const lineCell = (parts, kind) =>
  element("td", { class: kind }, ...parts.flatMap((part) => [element("span", {}, part), " "]));

function factCell(label, text) {
  if (label === "Command" && text) return lineCell(text.split(" "), "code");
  return Array.isArray(text) ? lineCell(text, "keys") : element("td", {}, text ?? "–");
}

// Rows of [label, a text per run], with a heading per run if there are several.
function factTable(rows) {
  const body = rows.map(([label, texts]) => element(
    "tr", {}, element("th", { scope: "row" }, ...breakable(label)),
    ...texts.map((text) => factCell(label, text)),
  ));
  return element(
    "table", { class: "facts" },
    isComparison ? headings("", data.runs.map((_, run) => runHeading(run))) : null, element("tbody", {}, ...body),
  );
}

// Rows of the names that any run has.
function rowsOf(part) {
  const found = data.runs.map((run) => new Map(run.about[part]));
  const names = [...new Set(found.flatMap((each) => [...each.keys()]))];
  return names.map((name) => [name, found.map((each) => each.get(name))]);
}

function folded(name, rows, attributes = {}) {
  if (!rows.length) return [];
  const summary = element("summary", {}, `${name} (${rows.length})`);
  return [element("details", { class: "more-facts", ...attributes }, summary, element("div", { class: "scroll" }, factTable(rows)))];
}

function about() {
  const settings = rowsOf("settings");
  const facts = rowsOf("facts");
  if (isComparison) {
    const differing = settings.filter(([, texts]) => new Set(texts).size > 1);
    return [
      element("div", { class: "scroll" }, factTable(facts)),
      ...folded("Settings that differ", differing, { open: differing.length < 20 }),
    ];
  }
  const changed = data.runs[0].about.changed;
  if (changed.length) facts.push(["Changed", [changed.map(([key, value]) => `${key} = ${value}`)]]);
  return [
    ...(facts.length ? [factTable(facts)] : []),
    element("div", { class: "folds" }, ...folded("All settings", settings), ...folded("All versions", rowsOf("versions"))),
  ];
}

// The evaluations of a run as {run, label, values}, in order: the first that there is inside a
// stage, those after the stages, and the last inside a stage if none follows it.
function evaluationsOf(run) {
  const found = [];
  const at = (stage, index) => new Map(stage.charts.flatMap((chart) => chart.series
    .filter((each) => each.run === run && each.name !== "seconds" && each.values[index] !== null)
    .map((each) => [each.name, each.values[index]])));
  const add = (label, values) => values.size && found.push({ run, label, values });
  const own = data.stages.filter((stage) => stage.charts.some((chart) => chart.series.some((each) => each.run === run)));
  const isAfter = (stage) => stage.name.startsWith("evaluate_");
  const last = own.findLastIndex((stage) => stage.name.endsWith("_eval"));
  own.forEach((stage, i) => {
    const name = stage.name.replace(/_eval$/, "");
    const known = stage.steps.map((_, index) => index).filter((index) => at(stage, index).size);
    if (isAfter(stage)) add(stage.name === "evaluate_start" ? "at the start" : stage.name.replace("evaluate_", "after "), at(stage, known[0]));
    else if (stage.name.endsWith("_eval")) {
      const isFirst = !found.length;
      if (isFirst) add(`${name} step ${format(stage.steps[known[0]])}`, at(stage, known[0]));
      const isLast = i === last && !own.slice(i).some(isAfter) && (known.length > 1 || !isFirst);
      if (isLast) add(`${name} step ${format(stage.steps[known.at(-1)])}`, at(stage, known.at(-1)));
    }
  });
  return found;
}

const ORDER = [/^acc$/, /^mean\//, /\/acc$/, /pass@/, /^fmt$/, /^acc\//, /./];
const placeOf = (name) => ORDER.findIndex((pattern) => pattern.test(name));

// A value with its interval, if any.
function cell(values, name) {
  if (!values.has(name)) return element("td", {});
  const interval = values.has(`${name}_low`)
    ? element("span", { class: "interval" }, ` (${format(values.get(`${name}_low`))} to ${format(values.get(`${name}_high`))})`) : null;
  return element("td", {}, element("b", {}, format(values.get(name))), interval);
}

function changeCell(columns, name) {
  const [first, last] = [columns[0].values.get(name), columns.at(-1).values.get(name)];
  const isKnown = first !== undefined && last !== undefined && first !== last;
  return element("td", { class: "delta" }, isKnown ? format(last - first, { signed: true }) : "");
}

function evaluationTable() {
  const runs = data.runs.map((_, run) => evaluationsOf(run));
  const names = [...new Set(runs.flat().flatMap(({ values }) => [...values.keys()]))]
    .filter((name) => !/_(low|high)$/.test(name))
    .sort((a, b) => placeOf(a) - placeOf(b));
  if (!names.length) return [];
  const shown = runs.filter((columns) => columns.length);
  const hasChange = (columns) => columns.length > 1;
  const above = isComparison ? element(
    "tr", {}, element("td", {}),
    ...shown.map((columns) => runHeading(columns[0].run, { colspan: columns.length + hasChange(columns) })),
  ) : null;
  const head = headings("Evaluation", shown.flatMap((columns) => [
    ...columns.map(({ label }) => element("th", { scope: "col" }, label)),
    ...(hasChange(columns) ? [element("th", { scope: "col" }, "change")] : []),
  ]));
  if (above) head.prepend(above);
  const row = (name, label, attributes = {}) => element(
    "tr", attributes, element("th", { scope: "row" }, term(name, label)),
    ...shown.flatMap((columns) => [
      ...columns.map(({ values }) => cell(values, name)), ...(hasChange(columns) ? [changeCell(columns, name)] : []),
    ]),
  );
  const sources = names.filter((name) => name.startsWith("acc/"));
  const folder = sources.length ? folderOf(sources) : "";
  const rows = names.flatMap((name) => {
    if (!sources.includes(name)) return [row(name, name)];
    const heading = element("tr", {}, element("th", { scope: "rowgroup", colspan: 3 }, folder));
    return [...(name === sources[0] ? [heading] : []), row(name, name.slice(folder.length), { class: "indented" })];
  });
  return [head, element("tbody", {}, ...rows)];
}

document.body.classList.toggle("comparison", isComparison);
find("about").append(...about());
find("evaluations").append(...evaluationTable());
find("results").hidden = !find("evaluations").children.length;
