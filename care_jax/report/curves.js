// Curves: a small chart per group of metrics, or per metric if runs are compared; the charts of a
// stage share a cursor.

const EDGE = { left: 42, right: 10, top: 6, bottom: 20 };
const HEIGHT = 140;
const SMALL = { left: 28, right: 6, top: 4, bottom: 6 }; // edges of a small multiple
const SMALL_HEIGHT = 64;
const NUM_FIRST = 6; // charts of a stage outside "more charts", so that the rollouts stay near the top

const view = { smoothing: 0, hidden: new Set() }; // of all charts; hidden are the numbers of runs

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

function range(lines) {
  const values = lines.flatMap(({ values, low, high }) => [...values, ...(low || []), ...(high || [])])
    .filter((value) => value !== null);
  if (!values.length) return [0, 1];
  let low = values.reduce((a, b) => Math.min(a, b));
  let high = values.reduce((a, b) => Math.max(a, b));
  if (low > 0 && low < 0.6 * high) low = 0;
  if (low === high) {
    const around = Math.abs(low) || 1;
    [low, high] = low === 0 ? [0, 1] : [low - around / 2, high + around / 2];
  }
  return [low, high];
}

// Exponential moving average of the known values, without the bias towards the first:
// s_t = β·s_{t-1} + (1 - β)·x_t, divided by 1 - β^t.
function smooth(values, beta) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = beta * sum + (1 - beta) * value;
    weight = beta * weight + (1 - beta);
    return sum / weight;
  });
}

// The series of a chart as lines {name, run, values, low, high, color}: an interval belongs to its
// metric, and the color is that of the run if runs are compared.
function linesOf(series) {
  const bound = (each, end) => series.find((other) => other.run === each.run && other.name === each.name + end)?.values;
  const isBound = (each) => /_(low|high)$/.test(each.name)
    && series.some((other) => other.run === each.run && other.name === each.name.replace(/_(low|high)$/, ""));
  return series.filter((each) => !isBound(each)).map((each, i) =>
    ({ ...each, low: bound(each, "_low"), high: bound(each, "_high"), color: isComparison ? each.run : i }));
}

// A chart of one metric for each metric of a chart.
function splitByMetric(chart) {
  const lines = linesOf(chart.series);
  return [...new Set(lines.map(({ name }) => name))].map((name) => (
    { title: name, unit: chart.unit, lines: lines.filter((line) => line.name === name) }));
}

class Chart {
  constructor({ title, unit, lines, name = title }, stage, small = null) {
    Object.assign(this, { lines, stage, small, title });
    this.edge = small ? SMALL : EDGE;
    this.height = small ? SMALL_HEIGHT : HEIGHT;
    this.readouts = lines.map(() => [element("b"), element("span", { class: "average" })]);
    this.items = lines.map((line, i) => element(
      "li", {}, small && !isComparison ? null : swatch(line.color),
      isComparison || small ? null : term(line.name), ...this.readouts[i],
    ));
    const legend = element("ul", { class: "legend" }, ...this.items);
    const heading = small || isComparison ? term(title, name) : title;
    this.svg = shape("svg", { role: "img", tabindex: "0", "aria-label": title });
    this.figure = element(
      "figure", { class: small ? "small" : null },
      element("figcaption", {}, element("h3", {}, heading), unit ? element("span", { class: "muted" }, unit) : null),
      this.svg, legend,
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
    return this.edge.left + ((step - steps[0]) / span) * (this.width - this.edge.left - this.edge.right);
  }

  y(value) {
    const [low, high] = this.range;
    const { top, bottom } = this.edge;
    return this.height - bottom - ((value - low) / (high - low)) * (this.height - top - bottom);
  }

  nearest(event) {
    const place = event.clientX - this.svg.getBoundingClientRect().left;
    const away = this.stage.steps.map((step) => Math.abs(this.x(step) - place));
    return away.indexOf(Math.min(...away));
  }

  points(values) {
    return this.stage.steps.map((step, i) => [step, values[i]]).filter(([, value]) => value !== null)
      .map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
  }

  draw() {
    this.width = Math.max(this.figure.clientWidth, 120);
    this.shown = this.lines.filter((line) => !view.hidden.has(line.run));
    this.range = this.small ? range(this.small.filter((line) => !view.hidden.has(line.run))) : range(this.shown);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.replaceChildren(...this.axes());
    const beta = this.stage.isSmoothed ? view.smoothing : 0;
    this.averages = new Map(this.shown.map((line) => [line, beta ? smooth(line.values, beta) : null]));
    for (const line of this.shown) this.svg.append(...this.strokes(line, this.averages.get(line)));
    this.cursor = shape("g", { class: "cursor" });
    this.svg.append(this.cursor);
    this.point(this.stage.index);
  }

  axes() {
    const { left, right } = this.edge;
    const { steps } = this.stage;
    const made = ticks(...this.range, this.small ? 2 : 4).flatMap((value) => {
      const y = this.y(value).toFixed(1);
      return [
        shape("line", { class: "grid", x1: left, x2: this.width - right, y1: y, y2: y }),
        shape("text", { class: "tick", x: left - 5, y, dy: "0.32em", "text-anchor": "end" }, format(value)),
      ];
    });
    if (this.small) return made;
    const inner = ticks(steps[0], steps.at(-1) || 1, 5).filter(Number.isInteger);
    return [...made, ...inner.map((step) => {
      const anchor = this.x(step) > this.width - 20 ? "end" : "middle";
      return shape("text", { class: "tick", x: this.x(step).toFixed(1), y: this.height - 3, "text-anchor": anchor }, format(step));
    })];
  }

  strokes(line, average) {
    const color = `s${line.color % NUM_COLORS}`;
    const points = this.points(line.values);
    const made = [];
    if (line.low && line.high) {
      const around = [...this.points(line.high), ...this.points(line.low).reverse()].join(" ");
      made.push(shape("polygon", { class: `band ${color}`, points: around }));
    }
    if (average) made.push(shape("polyline", { class: `line raw ${color}`, points: points.join(" ") }));
    const dashes = `d${line.color % NUM_COLORS}`;
    const drawn = average ? this.points(average) : points;
    made.push(shape("polyline", { class: `line ${color} ${dashes}`, points: drawn.join(" ") }));
    if (points.length === 1) {
      const [cx, cy] = points[0].split(",");
      made.push(shape("circle", { class: `dot ${color}`, cx, cy, r: 3 }));
    }
    return made;
  }

  // Shows the values at one step; for null, the last values.
  point(index) {
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    if (index !== null) {
      const x = this.x(this.stage.steps[index]).toFixed(1);
      this.cursor.append(shape("line", { x1: x, x2: x, y1: this.edge.top, y2: this.height - this.edge.bottom }));
    }
    this.lines.forEach((line, i) => {
      this.items[i].hidden = view.hidden.has(line.run);
      const at = index ?? line.values.findLastIndex((each) => each !== null);
      const [value, average] = [line.values[at], this.averages.get(line)?.[at]];
      const isKnown = value !== null && value !== undefined;
      const ends = isKnown && line.low ? ` (${format(line.low[at])} to ${format(line.high[at])})` : "";
      this.readouts[i][0].textContent = format(value);
      this.readouts[i][1].textContent = isKnown && average !== undefined ? `avg ${format(average)}` : ends;
      if (index === null || !isKnown || view.hidden.has(line.run)) return;
      const place = { cx: this.x(this.stage.steps[index]).toFixed(1), cy: this.y(value).toFixed(1) };
      this.cursor.append(shape("circle", { class: `dot s${line.color % NUM_COLORS}`, r: 3, ...place }));
    });
  }
}

class Stage {
  constructor(stage, isOpen) {
    this.steps = stage.steps;
    this.index = null;
    this.name = stage.name;
    this.isSmoothed = !stage.name.endsWith("_eval"); // an evaluation has few points, with intervals
    this.readout = element("span", { class: "muted readout" });
    this.charts = [];
    const whole = stage.charts.filter((chart) => !chart.is_split);
    // One metric per chart if runs are compared: the first of each of the first charts comes first.
    const found = whole.map((chart) => isComparison ? splitByMetric(chart) : [{ ...chart, lines: linesOf(chart.series) }]);
    const first = found.slice(0, NUM_FIRST).map(([each]) => this.figure(each));
    const rest = [...found.slice(0, NUM_FIRST).flatMap((each) => each.slice(1)), ...found.slice(NUM_FIRST).flat()]
      .map((each) => this.figure(each));
    const thinned = stage.stride > 1 ? `, every ${stage.stride}th drawn` : "";
    this.element = element(
      "details", { class: "stage", open: isOpen },
      element(
        "summary", {}, element("h2", {}, STAGES[stage.name] || stage.name),
        element("span", { class: "muted" }, ` steps ${format(stage.steps[0])} to ${format(stage.steps.at(-1))}${thinned}`), this.readout,
      ),
      element("div", { class: "charts first" }, ...first),
      ...stage.charts.filter((chart) => chart.is_split).map((chart) => this.multiples(chart)),
      rest.length ? element(
        "details", { class: "rest" }, element("summary", {}, `${rest.length} more charts`),
        element("div", { class: "charts" }, ...rest),
      ) : null,
    );
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  figure(panel, small = null) {
    const chart = new Chart(panel, this, small);
    this.charts.push(chart);
    return chart.figure;
  }

  // A small chart per metric, all with the scale of all; what their names begin with is left out.
  multiples(chart) {
    const panels = splitByMetric(chart);
    const all = panels.flatMap((each) => each.lines);
    const folder = folderOf(panels.map((each) => each.title));
    const figures = panels.map(({ title, lines }) => {
      const colored = isComparison ? lines : lines.map((line) => ({ ...line, color: 0 }));
      return this.figure({ title, name: title.slice(folder.length), unit: "", lines: colored }, all);
    });
    return element(
      "section", { class: "split" }, element("h3", {}, chart.title), element("div", { class: "multiples" }, ...figures),
    );
  }

  draw() {
    for (const chart of this.charts) chart.draw();
  }

  point(index) {
    this.index = index;
    this.readout.textContent = index === null ? "" : `step ${format(this.steps[index])}`;
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

// The last stage first, each before the evaluations inside it; the last and its evaluations are open.
const baseOf = ({ name }) => name.replace(/_eval$/, "");
const curves = data.stages.filter((stage) => !stage.name.startsWith("evaluate_"));
const order = [...new Set(curves.map(baseOf))].reverse();
curves.sort((a, b) => order.indexOf(baseOf(a)) - order.indexOf(baseOf(b)));
const stages = curves.map((stage) => new Stage(stage, baseOf(stage) === order[0]));
find("stages").append(...stages.map((stage) => stage.element));
if (!data.stages.length) find("stages").append(element("p", { class: "muted" }, "Nothing is logged yet."));
find("curves").classList.toggle("empty", !stages.length);

function setSmoothing() {
  view.smoothing = Number(find("smoothing").value);
  find("smoothed").textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
  for (const stage of stages) stage.draw();
}

// A button per run, which hides its lines.
function runButton(run) {
  const button = element("button", { type: "button", "aria-pressed": "true" }, swatch(run), ...breakable(data.runs[run].title));
  button.addEventListener("click", () => {
    const isHidden = !view.hidden.delete(run) && Boolean(view.hidden.add(run));
    button.setAttribute("aria-pressed", !isHidden);
    for (const stage of stages) stage.draw();
  });
  return button;
}

if (isComparison) find("runs").append(...data.runs.map((_, run) => runButton(run)));
find("smoothing-name").dataset.tip = "Exponential moving average: the share of the step before. Thin lines and bold figures are as logged.";
find("smoothing").addEventListener("input", setSmoothing);
setSmoothing();
