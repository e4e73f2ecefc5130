// Curves: one small chart per group of metrics; the charts of a stage share a cursor.

const STAGES = {
  rl: "Reinforcement learning",
  rl_eval: "Evaluation during reinforcement learning",
  sft: "Cold start",
  sft_eval: "Evaluation during the cold start",
};
const HEIGHT = 168;
const EDGE = { left: 46, right: 10, top: 8, bottom: 22 };
const NUM_COLORS = 6;
const NUM_FIRST = 6; // charts of a stage outside "more charts", so that the rollouts stay near the top

function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

function range(chart) {
  const values = chart.series.flatMap((each) => each.values).filter((value) => value !== null);
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (low > 0 && low < 0.6 * high) low = 0;
  if (low === high) {
    const around = Math.abs(low) || 1;
    [low, high] = low === 0 ? [0, 1] : [low - around / 2, high + around / 2];
  }
  return [low, high];
}

class Chart {
  constructor(chart, stage) {
    this.chart = chart;
    this.stage = stage;
    this.readouts = chart.series.map(() => element("b"));
    const legend = element("ul", { class: "legend" });
    chart.series.forEach((series, i) => {
      const swatch = element("i", { class: `swatch s${i % NUM_COLORS}` });
      legend.append(element("li", {}, swatch, element("span", {}, series.name), this.readouts[i]));
    });
    const unit = chart.unit ? element("span", { class: "muted" }, ` ${chart.unit}`) : null;
    this.svg = shape("svg", { role: "img", tabindex: "0", "aria-label": chart.title });
    this.figure = element(
      "figure", {}, element("figcaption", {}, element("h3", {}, chart.title), unit), this.svg, legend,
    );
    this.svg.addEventListener("pointermove", (event) => stage.point(this.nearest(event)));
    this.svg.addEventListener("pointerleave", () => stage.point(null));
    this.svg.addEventListener("click", (event) => stage.choose(this.nearest(event)));
    this.svg.addEventListener("keydown", (event) => stage.key(event));
    this.svg.addEventListener("blur", () => stage.point(null));
  }

  x(step) {
    const { steps } = this.stage;
    const span = steps.at(-1) - steps[0] || 1;
    return EDGE.left + ((step - steps[0]) / span) * (this.width - EDGE.left - EDGE.right);
  }

  y(value) {
    const [low, high] = this.range;
    return HEIGHT - EDGE.bottom - ((value - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  }

  nearest(event) {
    const place = event.clientX - this.svg.getBoundingClientRect().left;
    const away = this.stage.steps.map((step) => Math.abs(this.x(step) - place));
    return away.indexOf(Math.min(...away));
  }

  draw() {
    this.width = Math.max(this.figure.clientWidth, 160);
    this.range = range(this.chart);
    const { steps } = this.stage;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    this.svg.replaceChildren();
    for (const value of ticks(...this.range, 4)) {
      const y = this.y(value).toFixed(1);
      this.svg.append(
        shape("line", { class: "grid", x1: EDGE.left, x2: this.width - EDGE.right, y1: y, y2: y }),
        shape("text", { class: "tick", x: EDGE.left - 6, y, dy: "0.32em", "text-anchor": "end" }, format(value)),
      );
    }
    const inner = ticks(steps[0], steps.at(-1) || 1, 4).filter(Number.isInteger);
    for (const step of inner) {
      const place = { class: "tick", x: this.x(step).toFixed(1), y: HEIGHT - 4, "text-anchor": "middle" };
      this.svg.append(shape("text", place, format(step)));
    }
    this.chart.series.forEach((series, i) => {
      const known = steps.map((step, j) => [step, series.values[j]]).filter(([, value]) => value !== null);
      const points = known.map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
      const dashes = i >= NUM_COLORS ? { "stroke-dasharray": "4 3" } : {};
      this.svg.append(shape("polyline", { class: `line s${i % NUM_COLORS}`, points: points.join(" "), ...dashes }));
      if (known.length === 1) {
        const [cx, cy] = points[0].split(",");
        this.svg.append(shape("circle", { class: `dot s${i % NUM_COLORS}`, cx, cy, r: 3 }));
      }
    });
    this.cursor = shape("g", { class: "cursor" });
    this.svg.append(this.cursor);
    this.point(this.stage.index);
  }

  // Shows the values at one step; for null, the last values.
  point(index) {
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    if (index !== null) {
      const x = this.x(this.stage.steps[index]).toFixed(1);
      this.cursor.append(shape("line", { x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    }
    this.chart.series.forEach((series, i) => {
      const value = index === null ? series.values.findLast((each) => each !== null) : series.values[index];
      this.readouts[i].textContent = format(value);
      if (index === null || value === null) return;
      const place = { cx: this.x(this.stage.steps[index]).toFixed(1), cy: this.y(value).toFixed(1) };
      this.cursor.append(shape("circle", { class: `dot s${i % NUM_COLORS}`, r: 3, ...place }));
    });
  }
}

class Stage {
  constructor(stage, isOpen) {
    this.steps = stage.steps;
    this.index = null;
    this.name = stage.name;
    this.readout = element("span", { class: "muted readout" });
    this.charts = stage.charts.map((chart) => new Chart(chart, this));
    const figures = this.charts.map((chart) => chart.figure);
    const thinned = stage.stride > 1 ? `, every ${stage.stride}th drawn` : "";
    this.element = element(
      "details", { class: "stage", open: isOpen },
      element(
        "summary", {}, element("h2", {}, STAGES[stage.name] || stage.name),
        element("span", { class: "muted" }, ` steps ${stage.steps[0]} to ${stage.steps.at(-1)}${thinned}`), this.readout,
      ),
      element("div", { class: "charts" }, ...figures.slice(0, NUM_FIRST)),
      figures.length > NUM_FIRST ? element(
        "details", { class: "rest" }, element("summary", {}, `${figures.length - NUM_FIRST} more charts`),
        element("div", { class: "charts" }, ...figures.slice(NUM_FIRST)),
      ) : null,
    );
    new ResizeObserver(() => this.charts.forEach((chart) => chart.draw())).observe(this.element);
  }

  point(index) {
    this.index = index;
    this.readout.textContent = index === null ? "" : `step ${this.steps[index]}`;
    for (const chart of this.charts) chart.point(index);
  }

  choose(index) {
    if (this.name === "rl") inspect(this.steps[index]);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const from = this.index === null ? this.steps.length - (move > 0 ? 1 : 0) : this.index;
      this.point(Math.min(Math.max(from + move, 0), this.steps.length - 1));
      event.preventDefault();
      event.stopPropagation();
    } else if (event.key === "Enter" && this.index !== null) this.choose(this.index);
  }
}

// A value with its interval, if any, in the table of evaluations (stages of one step).
function cell(values, name) {
  if (!values.has(name)) return element("td", {});
  const interval = values.has(`${name}_low`)
    ? ` (${format(values.get(`${name}_low`))} to ${format(values.get(`${name}_high`))})` : "";
  return element("td", {}, element("b", {}, format(values.get(name))), interval);
}

function table(stages) {
  const columns = stages.map((stage) => new Map(
    stage.charts.flatMap((chart) => chart.series.map((each) => [each.name, each.values[0]])),
  ));
  const names = [...new Set(columns.flatMap((values) => [...values.keys()]))]
    .filter((name) => !/_(low|high)$/.test(name)).sort((a, b) => (b === "acc") - (a === "acc"));
  const head = stages.map((stage) => element(
    "th", { scope: "col" }, stage.name.replace(/^evaluate_/, "after "),
  ));
  return [
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Evaluation"), ...head)),
    element("tbody", {}, ...names.map((name) => element(
      "tr", {}, element("th", { scope: "row" }, name), ...columns.map((values) => cell(values, name)),
    ))),
  ];
}

const isEvaluation = (stage) => stage.name.startsWith("evaluate");
const evaluations = data.stages.filter(isEvaluation);
if (evaluations.length) find("evaluations").append(...table(evaluations));
const curves = data.stages.filter((stage) => !isEvaluation(stage)).reverse();
// The last stage and the evaluations inside it are open.
const isOpen = (stage) => stage === curves[0] || curves[0].name === `${stage.name}_eval`;
curves.forEach((stage) => find("stages").append(new Stage(stage, isOpen(stage)).element));
if (!data.stages.length) find("stages").append(element("p", { class: "muted" }, "Nothing is logged yet."));
