// A line chart of metrics over steps. Pointer and arrow keys select the step whose values it shows.

import {domain, linearTicks, logTicks, share} from "./axes.js";
import {el, setText, svg} from "./dom.js";
import {number, percent, tickLabels} from "./figures.js";

const HEIGHT = 180;
const MARGIN = {left: 46, right: 12, top: 10, bottom: 22};
const MOST_COLOURS = 6;
// Lines with at most this many points also get dots, so that rare evaluations are visible.
const FEW_POINTS = 60;

/** One chart with its legend. */
export class Curve {
  /** `spec` has title and unit, and may have label(name), log, zero and percent; `holds(name)`
   *  selects the metrics of the chart. See curves.js. */
  constructor(spec) {
    this.spec = spec;
    this.lines = [];
    this.cursor = null;
    this.drawing = svg("svg", {
      class: "drawing",
      height: HEIGHT,
      role: "img",
      tabindex: 0,
      pointermove: (event) => this.point(event),
      pointerleave: () => this.moveTo(null),
      blur: () => this.moveTo(null),
      keydown: (event) => this.onKey(event),
    });
    this.legend = el("ul", {class: "legend"});
    this.element = el("figure", {class: "curve", hidden: true},
      el("figcaption", {}, el("h3", {}, spec.title), el("span", {class: "hint"}, spec.unit)),
      this.drawing, this.legend);
  }

  /** Draws the chart's metrics of a History. All charts have the same range of steps. A chart
   *  without data is hidden. */
  draw(history) {
    const names = [...history.series.keys()].filter(this.spec.holds).sort(evaluationsLast);
    this.lines = names.map((name) => ({name, ...history.series.get(name)}))
      .filter((line) => line.steps.length);
    this.element.hidden = !this.lines.length;
    if (this.element.hidden) return;
    this.width = Math.max(200, this.element.clientWidth - 2);
    const {low, high} = history.steps;
    this.x = {low, high: Math.max(high, low + 1), log: false};
    this.y = domain(this.lines.flatMap((line) => line.values), this.spec);
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.drawing.setAttribute("width", this.width);
    this.mark = svg("g", {class: "mark"});
    this.drawing.replaceChildren(this.grid(), ...this.lines.map((_, i) => this.line(i)), this.mark);
    this.drawLegend();
    this.moveTo(this.cursor);
  }

  across(step) {
    return MARGIN.left + share(step, this.x) * (this.width - MARGIN.left - MARGIN.right);
  }

  down(value) {
    return HEIGHT - MARGIN.bottom - share(value, this.y) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  grid() {
    const group = svg("g", {class: "grid"});
    const right = this.width - MARGIN.right;
    const {low, high, log} = this.y;
    const ticks = log ? logTicks(low, high) : linearTicks(low, high, 4);
    const labels = this.spec.percent ? ticks.map(percent) : tickLabels(ticks);
    for (const [index, tick] of ticks.entries()) {
      const y = this.down(tick);
      group.append(
        svg("line", {x1: MARGIN.left, x2: right, y1: y, y2: y}),
        svg("text", {x: MARGIN.left - 6, y: y + 4, "text-anchor": "end"}, labels[index]));
    }
    for (const tick of linearTicks(this.x.low, this.x.high, Math.max(2, this.width / 110))) {
      if (!Number.isInteger(tick)) continue;
      const x = this.across(tick);
      const anchor = x > right - 12 ? "end" : "middle";
      group.append(svg("text",
        {x: anchor === "end" ? this.width - 4 : x, y: HEIGHT - 5, "text-anchor": anchor}, number(tick)));
    }
    return group;
  }

  line(index) {
    const points = this.points(this.lines[index]);
    const group = svg("g", {class: `line line-${index % MOST_COLOURS}`});
    const path = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`);
    group.append(svg("path", {d: path.join("")}));
    if (points.length > FEW_POINTS) return group;
    group.append(...points.map(([x, y]) => svg("circle", {cx: x, cy: y, r: 2})));
    return group;
  }

  /** Returns the points of a line in pixels; if several steps share a pixel column, only the lowest
   *  and the highest value. */
  points({steps, values}) {
    const columns = new Map();
    for (let i = 0; i < steps.length; i += 1) {
      if (this.y.log && values[i] <= 0) continue;
      const [x, y] = [this.across(steps[i]), this.down(values[i])];
      const column = steps.length > 2 * this.width ? Math.round(x) : i;
      const known = columns.get(column);
      if (!known) columns.set(column, {x, low: y, high: y});
      else Object.assign(known, {low: Math.max(known.low, y), high: Math.min(known.high, y)});
    }
    return [...columns.values()].flatMap(({x, low, high}) =>
      low === high ? [[x, low]] : [[x, low], [x, high]]);
  }

  drawLegend() {
    this.readings = this.lines.map(() => el("b"));
    this.legend.replaceChildren(...this.lines.map((line, index) =>
      el("li", {class: `line-${index % MOST_COLOURS}`},
        el("i", {"aria-hidden": "true"}), `${this.label(line.name)} `, this.readings[index],
        this.hidden(line))));
  }

  hidden({values}) {
    const count = this.y.log ? values.filter((value) => value <= 0).length : 0;
    return count ? el("small", {}, ` (${count} at or below 0 not drawn)`) : null;
  }

  label(name) {
    return (this.spec.label ? this.spec.label(name) : name).replaceAll("_", " ");
  }

  figure(value) {
    return this.spec.percent ? percent(value) : number(value);
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const inner = this.width - MARGIN.left - MARGIN.right;
    const way = ((event.clientX - box.left) * (this.width / box.width) - MARGIN.left) / inner;
    this.moveTo(this.x.low + Math.min(1, Math.max(0, way)) * (this.x.high - this.x.low));
  }

  onKey(event) {
    const {steps} = longest(this.lines);
    const at = this.cursor === null ? steps.length - 1 : nearest(steps, this.cursor);
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1};
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.moveTo(steps[Math.min(steps.length - 1, Math.max(0, moves[event.key]))]);
  }

  /** Shows the values of all lines at the step nearest to `step`; null means the last step. */
  moveTo(step) {
    this.cursor = step;
    const told = this.lines.map((line, index) => {
      const at = step === null ? line.steps.length - 1 : nearest(line.steps, step);
      setText(this.readings[index], this.figure(line.values[at]));
      return `${this.label(line.name)} ${this.figure(line.values[at])}`;
    });
    const {steps} = longest(this.lines);
    const shown = step === null ? steps.at(-1) : steps[nearest(steps, step)];
    const sentence = `${this.spec.title} at step ${shown}: ${told.join(", ")}`;
    this.drawing.setAttribute("aria-label", sentence);
    this.mark.replaceChildren();
    if (step === null) return;
    const x = this.across(shown);
    const left = x > this.width - 90;
    this.mark.append(
      svg("line", {x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom}),
      svg("text", {x: left ? x - 5 : x + 5, y: MARGIN.top + 9, "text-anchor": left ? "end" : "start"},
        `step ${shown}`));
  }
}

function evaluationsLast(one, other) {
  const late = (name) => Number(name.startsWith("eval/"));
  return late(one) - late(other) || (one < other ? -1 : 1);
}

function longest(lines) {
  return lines.reduce((most, line) => (line.steps.length > most.steps.length ? line : most));
}

/** Returns the index of the nearest step, by binary search in the ascending list. */
function nearest(steps, wanted) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - steps[low] < steps[high] - wanted ? low : high;
}
