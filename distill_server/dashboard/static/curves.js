// The charts of one or several jobs and their metrics.

import {CHARTS, comesFirst, labelOf, OTHER, THEMES} from "./charts.js";
import {ChartView} from "./chart_view.js";
import {Curve} from "./curve.js";
import {el, scrollRegion, setText} from "./dom.js";
import {number} from "./figures.js";

// A shorter line may still change.
const LEAST_CONSTANT = 50;

/** All charts of one job, or of several: `main` holds the charts that come first for the methods of the
 *  jobs, `others` the other charts, folded by theme. One job has its metrics of a kind in one chart;
 *  several jobs have a chart a metric. */
export class Curves {
  constructor() {
    this.view = new ChartView(() => this.draw(this.runs), (x) => this.point(x));
    // The colours of the system's dark mode.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(this.runs));
    this.runs = [];
    // The charts by title, and the place of each element in CHARTS.
    this.known = new Map();
    this.places = new Map();
    this.main = el("div", {class: "curves"});
    this.others = el("div");
    this.folds = new Map();
    this.values = el("tbody");
    this.table = valuesTable(this.values, () => this.draw(this.runs));
    this.nothing = el("p", {class: "hint"}, "No steps yet.");
  }

  /** Draws jobs `{label, method, history}`; a folded chart only while its theme is open. */
  draw(runs) {
    this.runs = runs;
    const names = [...new Set(runs.flatMap(({history}) => [...history.series.keys()]))];
    const hasSum = (sum) => runs.some(({history}) => history.sums[sum]);
    this.view.offer(names.length > 0, {tokens: hasSum("tokens"), flops: hasSum("flops")});
    this.table.hidden = !names.length;
    this.nothing.hidden = names.length > 0;
    if (!names.length) return;
    const lines = new Map([...this.known.values()].map((curve) => [curve, []]));
    for (const name of names.sort(evaluationsLast)) {
      const curve = this.chart(name);
      if (!lines.has(curve)) lines.set(curve, []);
      lines.get(curve).push(...this.lines(name, lines.get(curve).length));
    }
    const range = this.view.range ?? rangeOf(runs, this.view.axis);
    for (const fold of this.folds.values()) fold.constants = [];
    for (const [curve, drawn] of lines) {
      const fold = this.folds.get(curve.element.parentElement.dataset.theme);
      if (fold && !fold.element.open) continue;
      const constant = fold && drawn.length > 0 && drawn.every(isConstant);
      if (constant) {
        curve.element.hidden = true;
        fold.constants.push(...drawn.map(({label, values}) => `${curve.spec.title}, ${label}: ${number(values[0])}`));
      } else curve.draw(drawn, range);
    }
    if (this.table.open) this.values.replaceChildren(...names.flatMap((name) => valuesRows(name, runs)));
    for (const {constants, note} of this.folds.values()) {
      setText(note, constants.length ? `Constant: ${constants.join("; ")}` : "");
    }
  }

  /** Shows in all charts the values at a point of the x axis; null: the last values. */
  point(x) {
    for (const curve of this.known.values()) curve.moveTo(x);
  }

  /** Returns the chart of a metric; makes it at its place if there is none. */
  chart(name) {
    const place = CHARTS.findIndex(({holds}) => holds(name));
    const spec = CHARTS[place] ?? {title: name, unit: "", theme: OTHER};
    const title = this.runs.length > 1 ? titleOf(name, spec) : spec.title;
    if (this.known.has(title)) return this.known.get(title);
    const curve = new Curve({...spec, title}, this.view);
    this.known.set(title, curve);
    this.places.set(curve.element, place < 0 ? CHARTS.length : place);
    const first = comesFirst(spec, this.runs.map(({method}) => method));
    const grid = first ? this.main : this.foldOf(spec.theme).grid;
    const next = [...grid.children].find((other) => this.places.get(other) > this.places.get(curve.element));
    grid.insertBefore(curve.element, next ?? null);
    return curve;
  }

  /** Returns the folded section of a theme; makes it at its place if there is none. */
  foldOf(theme) {
    if (this.folds.has(theme)) return this.folds.get(theme);
    const grid = el("div", {class: "curves", "data-theme": theme});
    const note = el("p", {class: "hint"});
    const element = el("details", {toggle: () => this.draw(this.runs)}, el("summary", {}, theme), grid, note);
    const later = THEMES.slice(THEMES.indexOf(theme) + 1).map((other) => this.folds.get(other)?.element);
    this.others.insertBefore(element, later.find(Boolean) ?? null);
    this.folds.set(theme, {element, grid, note, constants: []});
    return this.folds.get(theme);
  }

  /** Returns the lines of a metric; `drawn` is the number of lines that its chart already has. */
  lines(name, drawn) {
    const alone = this.runs.length === 1;
    const held = name.startsWith("eval/");
    return this.runs.filter(({history}) => history.series.get(name)?.values.length).map((run) => ({
      ...run.history.line(name, this.view.axis),
      label: alone ? labelOf(name) : run.label,
      colour: alone ? drawn : this.runs.indexOf(run),
      held,
      alone,
    }));
  }
}

function valuesTable(body, toggle) {
  const columns = ["Metric", "Last", "Step", "Lowest", "Highest"];
  return el("details", {toggle, class: "values", hidden: true}, el("summary", {}, "Table of values"),
    scrollRegion("Values", "", el("table", {class: "plain"},
      el("thead", {}, el("tr", {}, columns.map((name) => el("th", {scope: "col"}, name)))), body)));
}

function valuesRows(name, runs) {
  return runs.filter(({history}) => history.series.get(name)?.values.length).map(({label, history}) => {
    const {xs: steps, values} = history.line(name, "steps");
    const extremes = [Math.min, Math.max].map((extreme) => values.reduce((one, other) => extreme(one, other)));
    const cells = [number(values.at(-1)), steps.at(-1), ...extremes.map((value) => number(value))];
    return el("tr", {}, el("th", {scope: "row"}, runs.length > 1 ? `${name}, ${label}` : name),
      cells.map((cell) => el("td", {}, String(cell))));
  });
}

function titleOf(name, {title}) {
  const label = labelOf(name);
  return label.toLowerCase() === title.toLowerCase() ? title : `${title}: ${label}`;
}

function rangeOf(runs, axis) {
  const ranges = runs.map(({history}) => history.range(axis));
  return {low: Math.min(...ranges.map(({low}) => low)), high: Math.max(...ranges.map(({high}) => high))};
}

function evaluationsLast(one, other) {
  const late = (name) => Number(name.startsWith("eval/"));
  return late(one) - late(other) || (one < other ? -1 : 1);
}

/** Returns whether a line has at least 50 points, all with the same value. */
function isConstant({values}) {
  return values.length >= LEAST_CONSTANT && values.every((value) => value === values[0]);
}
