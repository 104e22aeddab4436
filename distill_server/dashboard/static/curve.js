// A line chart of metrics, drawn by uPlot. Pointer and arrow keys select the point whose values all
// charts show; dragging and the keys + and - zoom.

import {domain, nearest} from "./axes.js";
import {colourOf, el, setText} from "./dom.js";
import {number, percent, tickLabels} from "./figures.js";
import {drawMarks, marksAt} from "./marks.js";

const HEIGHT = 190;
const COLOURS = 7;
// The lines after each seven colours are dashed.
const DASHES = [[], [7, 3], [2, 3]];
// Lines with at most this many points also get dots, so that rare evaluations are visible.
const FEW_POINTS = 60;
// Pixels of the widest character of a tick, and around it.
const CHARACTER = 6.6;
const GAP = 14;
// A shorter drag is a click.
const DRAG_PIXELS = 6;

/** Returns the classes of the key of a line: its colour, and whether it is dashed. */
export function keyOf(colour) {
  return `line-${colour % COLOURS}${colour < COLOURS ? "" : " dashed"}`;
}

/** One chart with its legend. */
export class Curve {
  /** `spec` has title and unit, and may have log, zero and percent; see charts.js. `view` is the
   *  ChartView of the page. */
  constructor(spec, view) {
    this.spec = spec;
    this.view = view;
    this.lines = [];
    this.cursor = null;
    this.drawing = el("div", {
      class: "drawing",
      role: "img",
      tabindex: 0,
      pointerleave: () => this.view.pointed(null),
      blur: () => this.view.pointed(null),
      keydown: (event) => this.onKey(event),
    });
    this.unit = el("span", {class: "hint"}, spec.unit);
    this.place = el("li", {class: "place"});
    this.legend = el("ul", {class: "legend"});
    this.element = el("figure", {class: "curve", hidden: true},
      el("figcaption", {}, el("h3", {}, spec.title), this.unit), this.drawing, this.legend);
  }

  /** Draws lines `{label, colour, held, alone, xs, values, sampled}` over the range `{low, high}`.
   *  `held`: never smoothed. `alone`: of the only job. Extreme values, which only `values` has, do not
   *  count for a smooth line: its means would be too large or too small. A chart without points is
   *  hidden. */
  draw(lines, {low, high}) {
    this.lines = lines;
    this.element.hidden = !lines.length;
    if (this.element.hidden) return;
    this.x = {low, high: high > low ? high : low + 1};
    for (const line of lines) this.prepare(line);
    this.y = domain(lines.flatMap((line) => line.seen), this.spec);
    setText(this.unit, this.y.log ? `${this.spec.unit}, log axis` : this.spec.unit);
    this.plot();
    this.drawLegend();
    // uPlot sets its scales in a microtask.
    queueMicrotask(() => this.moveTo(this.cursor));
  }

  /** Smooths a line, and finds its values in the range. */
  prepare(line) {
    const {xs, values, sampled} = line;
    const smooth = line.held ? sampled.values : this.view.smooth(sampled.values);
    line.smooth = smooth === sampled.values ? null : smooth;
    const inside = values.filter((_, i) => this.x.low <= xs[i] && xs[i] <= this.x.high);
    line.seen = inside.length ? inside : values;
  }

  /** Gives uPlot the lines; a chart with other lines or another axis is made anew. */
  plot() {
    const width = Math.max(200, this.element.clientWidth - 2);
    const made = JSON.stringify([this.view.axis, this.y.log,
      this.lines.map(({label, colour, smooth, values}) => [label, colour, !smooth, values.length > FEW_POINTS])]);
    const data = this.data();
    if (this.made !== made) {
      this.uplot?.destroy();
      this.made = made;
      this.uplot = new uPlot(this.options(width), data, this.drawing);
    } else {
      if (this.uplot.width !== width) this.uplot.setSize({width, height: HEIGHT});
      this.uplot.setData(data);
    }
  }

  /** Returns the lines on one list of x values, as uPlot takes them: raw values, then smooth ones. */
  data() {
    const shown = (values) => (this.y.log ? values.map((value) => (value > 0 ? value : null)) : values);
    return uPlot.join(this.lines.flatMap(({xs, values, smooth, sampled}) =>
      [[xs, shown(values)], ...(smooth ? [[sampled.xs, shown(smooth)]] : [])]));
  }

  options(width) {
    const soft = () => colourOf("--soft");
    const {steps} = this.view.unit;
    return {
      width,
      height: HEIGHT,
      padding: [10, 18, 0, 0],
      legend: {show: false},
      cursor: {y: false, points: {show: false}, drag: {x: true, y: false, setScale: false, dist: DRAG_PIXELS},
        bind: {dblclick: () => () => this.view.zoom(null)}},
      scales: {
        x: {time: false, range: () => [this.x.low, this.x.high]},
        y: {distr: this.y.log ? 3 : 1, range: () => [this.y.low, this.y.high]},
      },
      axes: [
        {stroke: soft, grid: {show: false}, ticks: {show: false}, size: 26, gap: 2, space: 70, font: "11px system-ui",
          ...(steps ? {incrs: steps} : {}), values: (_, ticks) => ticks.map(this.view.unit.tick)},
        {stroke: soft, ticks: {show: false}, gap: 4, space: 36, font: "11px system-ui",
          grid: {stroke: () => colourOf("--rule"), width: 1, filter: (_, ticks) => this.rules(ticks)},
          values: (_, ticks) => this.labels(ticks), size: (_, labels) => this.sizeOf(labels)},
      ],
      series: [{}, ...this.lines.flatMap((line) => this.series(line))],
      hooks: {
        setCursor: [(plot) => this.point(plot)],
        setSelect: [(plot) => this.select(plot)],
        drawClear: [(plot) => drawMarks(plot, this.view)],
      },
    };
  }

  series({colour, smooth, values}) {
    const stroke = (alpha) => () => `${colourOf(`--line-${colour % COLOURS}`)}${alpha}`;
    const dash = DASHES[Math.floor(colour / COLOURS) % DASHES.length];
    const few = {show: values.length <= FEW_POINTS, size: 5};
    const raw = {stroke: stroke(smooth ? "47" : ""), width: smooth ? 1 : 1.6, dash, spanGaps: true,
      points: smooth ? {show: false} : few};
    return smooth ? [raw, {stroke: stroke(""), width: 1.6, dash, spanGaps: true, points: {show: false}}] : [raw];
  }

  labels(ticks) {
    if (this.spec.percent) return ticks.map(percent);
    const shown = tickLabels(ticks.filter((tick) => tick !== null));
    return ticks.map((tick) => (tick === null ? "" : shown.shift()));
  }

  /** Leaves out the lines of a log axis between powers of ten. */
  rules(ticks) {
    if (!this.y.log) return ticks;
    return ticks.map((tick) => (Number.isInteger(+Math.log10(tick).toFixed(9)) ? tick : null));
  }

  sizeOf(labels) {
    return GAP + CHARACTER * Math.max(4, ...(labels ?? []).map((label) => label.length));
  }

  drawLegend() {
    this.readings = this.lines.map(() => el("b"));
    this.legend.replaceChildren(...this.lines.map((line, index) =>
      el("li", {},
        el("i", {class: keyOf(line.colour), "aria-hidden": "true"}),
        `${line.label} `,
        this.readings[index], this.hidden(line))), this.place);
  }

  hidden({values}) {
    const count = this.y.log ? values.filter((value) => value <= 0).length : 0;
    return count ? el("small", {}, ` (${count} at or below 0 not drawn)`) : null;
  }

  figure(value) {
    return this.spec.percent ? percent(value) : number(value);
  }

  /** The pointer has moved: all charts show the values there. */
  point(plot) {
    const {left} = plot.cursor;
    if (left >= 0) this.view.pointed(plot.posToVal(left, "x"));
  }

  select(plot) {
    const {left, width} = plot.select;
    if (width < DRAG_PIXELS) return;
    const [low, high] = [left, left + width].map((pixel) => plot.posToVal(pixel, "x"));
    plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    this.view.zoom({low, high});
  }

  onKey(event) {
    const xs = longest(this.lines).xs.filter((x) => this.x.low <= x && x <= this.x.high);
    if (!xs.length) return;
    const at = this.cursor === null ? xs.length - 1 : nearest(xs, this.cursor);
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1};
    const zooms = {"+": 0.25, "-": 1, Escape: Infinity};
    if (event.key in moves) this.view.pointed(xs[Math.min(xs.length - 1, Math.max(0, moves[event.key]))]);
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
    if (this.element.hidden || !this.uplot) return;
    const told = this.lines.map((line, index) => {
      const figure = this.figure(valueAt(line, x));
      setText(this.readings[index], figure);
      return `${line.label} ${figure}`;
    });
    const {xs} = longest(this.lines);
    const shown = x === null ? xs.at(-1) : xs[nearest(xs, x)];
    const place = [this.view.unit.label(shown), ...(x === null ? [] : marksAt(this.view, shown))].join(", ");
    this.drawing.setAttribute("aria-label", `${this.spec.title} at ${place}: ${told.join(", ")}`);
    const seen = x !== null && this.x.low <= shown && shown <= this.x.high;
    setText(this.place, seen ? place : "");
    this.uplot.setCursor({left: seen ? this.uplot.valToPos(shown, "x") : -10, top: 0}, false);
  }
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
