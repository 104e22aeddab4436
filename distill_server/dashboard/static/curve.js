// A line chart of metrics. Pointer and arrow keys select the point whose values it shows; dragging
// and the keys + and - zoom.

import {domain, linearTicks, logTicks, nearest, share} from "./axes.js";
import {el, setText, svg} from "./dom.js";
import {number, percent, tickLabels} from "./figures.js";

const HEIGHT = 180;
const MARGIN = {left: 46, right: 12, top: 10, bottom: 22};
const MOST_COLOURS = 6;
// Lines with at most this many points also get dots, so that rare evaluations are visible.
const FEW_POINTS = 60;
// Pixels of the widest character of a tick, and between a tick and its line.
const CHARACTER = 6.6;
const GAP = 6;
// A shorter drag is a click.
const DRAG_PIXELS = 6;

/** One chart with its legend. */
export class Curve {
  /** `spec` has title and unit, and may have log, zero and percent; see curves.js. `view` is the
   *  ChartView of the page. */
  constructor(spec, view) {
    this.spec = spec;
    this.view = view;
    this.lines = [];
    this.cursor = null;
    this.drawing = svg("svg", {
      class: "drawing",
      height: HEIGHT,
      role: "img",
      tabindex: 0,
      pointerdown: (event) => this.press(event),
      pointermove: (event) => this.point(event),
      pointerup: (event) => this.release(event),
      pointercancel: () => this.drop(),
      pointerleave: () => this.moveTo(null),
      dblclick: () => this.view.zoom(null),
      blur: () => this.moveTo(null),
      keydown: (event) => this.onKey(event),
    });
    this.legend = el("ul", {class: "legend"});
    this.element = el("figure", {class: "curve", hidden: true},
      el("figcaption", {}, el("h3", {}, spec.title), el("span", {class: "hint"}, spec.unit)),
      this.drawing, this.legend);
  }

  /** Draws lines `{label, colour, held, steps, times, tokens, values}` over the range `{low, high}`.
   *  `held`: never smoothed. A chart without points is hidden. */
  draw(lines, {low, high}) {
    const {axis} = this.view;
    this.lines = lines.filter((line) => line.values.length).map((line) => ({...line, xs: line[axis]}));
    this.element.hidden = !this.lines.length;
    if (this.element.hidden) return;
    this.width = Math.max(200, this.element.clientWidth - 2);
    this.x = {low, high: high > low ? high : low + 1, log: false};
    for (const line of this.lines) this.cut(line);
    this.y = domain(this.lines.flatMap((line) => line.seen), this.spec);
    const {low: bottom, high: top, log} = this.y;
    this.ticks = log ? logTicks(bottom, top) : linearTicks(bottom, top, 4);
    this.labels = this.spec.percent ? this.ticks.map(percent) : tickLabels(this.ticks);
    const longest = Math.max(...this.labels.map((label) => label.length));
    this.left = Math.max(MARGIN.left, GAP + CHARACTER * longest);
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.drawing.setAttribute("width", this.width);
    this.mark = svg("g", {class: "mark"});
    const [left, right] = [this.left - 4, this.width - MARGIN.right + 4];
    // A nested drawing cuts off what is outside of the zoomed range.
    const inner = {x: left, y: 0, width: right - left, height: HEIGHT};
    this.drawing.replaceChildren(this.grid(),
      svg("svg", {...inner, viewBox: `${left} 0 ${right - left} ${HEIGHT}`},
        this.lines.map((line) => this.line(line))), this.mark);
    this.drawLegend();
    this.moveTo(this.cursor);
  }

  /** Keeps the points of a line in the range, and one on each side, to which its ends lead. */
  cut(line) {
    const {xs, values} = line;
    const smooth = line.held ? values : this.view.smooth(values);
    let [first, end] = [0, xs.length];
    while (first + 1 < end && xs[first + 1] < this.x.low) first += 1;
    while (end - 1 > first && xs[end - 2] > this.x.high) end -= 1;
    line.raw = {xs: xs.slice(first, end), values: values.slice(first, end)};
    line.smooth = smooth === values ? null : {xs: line.raw.xs, values: smooth.slice(first, end)};
    const inside = line.raw.values.filter((_, i) => this.x.low <= line.raw.xs[i] && line.raw.xs[i] <= this.x.high);
    line.seen = inside.length ? inside : line.raw.values;
  }

  across(x) {
    return this.left + share(x, this.x) * (this.width - this.left - MARGIN.right);
  }

  down(value) {
    return HEIGHT - MARGIN.bottom - share(value, this.y) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  grid() {
    const group = svg("g", {class: "grid"});
    const right = this.width - MARGIN.right;
    for (const [index, tick] of this.ticks.entries()) {
      const y = this.down(tick);
      group.append(
        svg("line", {x1: this.left, x2: right, y1: y, y2: y}),
        svg("text", {x: this.left - GAP, y: y + 4, "text-anchor": "end"}, this.labels[index]));
    }
    const {unit} = this.view;
    for (const tick of unit.ticks(this.x.low, this.x.high, Math.max(2, this.width / 110))) {
      const x = this.across(tick);
      const anchor = x > right - 12 ? "end" : "middle";
      group.append(svg("text",
        {x: anchor === "end" ? this.width - 4 : x, y: HEIGHT - 5, "text-anchor": anchor}, unit.tick(tick)));
    }
    return group;
  }

  line({colour, raw, smooth}) {
    const group = svg("g", {class: `line line-${colour % MOST_COLOURS}`});
    const points = this.points(raw);
    group.append(svg("path", {d: path(points), class: smooth && "raw"}));
    if (smooth) group.append(svg("path", {d: path(this.points(smooth))}));
    if (points.length > FEW_POINTS || smooth) return group;
    group.append(...points.map(([x, y]) => svg("circle", {cx: x, cy: y, r: 2})));
    return group;
  }

  /** Returns the points of a line in pixels; if several share a pixel column, only the lowest and the
   *  highest value. */
  points({xs, values}) {
    const columns = new Map();
    for (let i = 0; i < xs.length; i += 1) {
      if (this.y.log && values[i] <= 0) continue;
      const [x, y] = [this.across(xs[i]), this.down(values[i])];
      const column = xs.length > 2 * this.width ? Math.round(x) : i;
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
      el("li", {class: `line-${line.colour % MOST_COLOURS}`},
        el("i", {"aria-hidden": "true"}), `${line.label} `, this.readings[index], this.hidden(line))));
  }

  hidden({values}) {
    const count = this.y.log ? values.filter((value) => value <= 0).length : 0;
    return count ? el("small", {}, ` (${count} at or below 0 not drawn)`) : null;
  }

  figure(value) {
    return this.spec.percent ? percent(value) : number(value);
  }

  /** Returns the x value under the pointer, within the range. */
  under(event) {
    const box = this.drawing.getBoundingClientRect();
    const inner = this.width - this.left - MARGIN.right;
    const way = ((event.clientX - box.left) * (this.width / box.width) - this.left) / inner;
    return this.x.low + Math.min(1, Math.max(0, way)) * (this.x.high - this.x.low);
  }

  press(event) {
    if (event.button !== 0) return;
    this.from = {x: this.under(event), pixel: event.clientX};
    this.drawing.setPointerCapture(event.pointerId);
  }

  point(event) {
    const x = this.under(event);
    this.moveTo(x);
    if (!this.from) return;
    const [left, right] = [this.across(this.from.x), this.across(x)].sort((one, other) => one - other);
    this.mark.prepend(svg("rect", {x: left, y: MARGIN.top, width: right - left,
      height: HEIGHT - MARGIN.top - MARGIN.bottom}));
  }

  release(event) {
    const {from} = this;
    this.from = null;
    if (!from || Math.abs(event.clientX - from.pixel) < DRAG_PIXELS) return;
    const [low, high] = [from.x, this.under(event)].sort((one, other) => one - other);
    if (high > low) this.view.zoom({low, high});
  }

  drop() {
    this.from = null;
    this.moveTo(null);
  }

  onKey(event) {
    const {xs} = longest(this.lines);
    const at = this.cursor === null ? xs.length - 1 : nearest(xs, this.cursor);
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1};
    const zooms = {"+": 0.25, "-": 1, Escape: Infinity};
    if (event.key in moves) this.moveTo(xs[Math.min(xs.length - 1, Math.max(0, moves[event.key]))]);
    else if (event.key in zooms) this.zoomAround(xs[at], zooms[event.key]);
    else return;
    event.preventDefault();
  }

  /** Zooms to `reach` times the width of the range on each side of `x`; Infinity shows everything. */
  zoomAround(x, reach) {
    const side = (this.x.high - this.x.low) * reach;
    this.view.zoom(Number.isFinite(side) ? {low: x - side, high: x + side} : null);
  }

  /** Shows the values of all lines at the point nearest to `x`; null means the last one. */
  moveTo(x) {
    this.cursor = x;
    const told = this.lines.map((line, index) => {
      const figure = this.figure(valueAt(line, x));
      setText(this.readings[index], figure);
      return `${line.label} ${figure}`;
    });
    const {xs} = longest(this.lines);
    const shown = x === null ? xs.at(-1) : xs[nearest(xs, x)];
    const label = this.view.unit.label(shown);
    this.drawing.setAttribute("aria-label", `${this.spec.title} at ${label}: ${told.join(", ")}`);
    this.mark.replaceChildren();
    if (x === null || shown < this.x.low || shown > this.x.high) return;
    const at = this.across(shown);
    const left = at > this.width - 90;
    this.mark.append(
      svg("line", {x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom}),
      svg("text", {x: left ? at - 5 : at + 5, y: MARGIN.top + 9, "text-anchor": left ? "end" : "start"},
        label));
  }
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function longest(lines) {
  return lines.reduce((most, line) => (line.xs.length > most.xs.length ? line : most));
}

/** Returns the value nearest to `x`; of a job among several, none outside of its points. */
function valueAt({xs, values, alone}, x) {
  if (x === null) return values.at(-1);
  if (!alone && (x < xs[0] || x > xs.at(-1))) return undefined;
  return values[nearest(xs, x)];
}
