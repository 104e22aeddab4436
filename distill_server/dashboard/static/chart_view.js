// What all charts of a page have in common: the x axis, the smoothing, the zoomed range and the point
// whose values they show.

import {el} from "./dom.js";
import {duration, number, shortDuration} from "./figures.js";
import {SMOOTHINGS} from "./smoothing.js";

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const DAYS = [2, 5, 10, 20, 50, 100].map((count) => count * 86400);
const COUNTS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].flatMap((power) =>
  [1, 2, 5].map((digit) => digit * 10 ** power));

// Each axis is named after its array in a series of History. `steps` are the possible distances of
// ticks; without them, uPlot chooses.
const AXES = {
  steps: {title: "step", steps: COUNTS, tick: (value) => number(value), label: (value) => `step ${value}`},
  times: {title: "time", steps: [...SECONDS, ...DAYS], tick: shortDuration, label: duration},
  tokens: {title: "tokens", tick: (value) => number(value), label: (value) => `${number(Math.round(value))} tokens`},
  flops: {title: "FLOPs", tick: (value) => number(value), label: (value) => `${number(value)} FLOPs`},
};
/** The marks of a job below its charts: their symbols and names. */
export const MARKS = {
  attempt: ["\u2506", "attempt began"],
  fault: ["\u2715", "fault"],
  checkpoint: ["\u25b2", "checkpoint"],
  evaluation: ["\u2502", "evaluation"],
};

/** The controls above the charts, and their state. */
export class ChartView {
  /** `changed` is called when the charts must be drawn again, `pointed` with the value of the x axis
   *  at the pointer, or null. */
  constructor(changed, pointed) {
    this.changed = changed;
    this.pointed = pointed;
    this.axis = "steps";
    this.range = null;
    this.marks = [];
    this.axes = el("select", {"aria-label": "Horizontal axis", change: () => this.choose(this.axes.value)},
      Object.entries(AXES).map(([name, {title}]) => el("option", {value: name}, title)));
    this.smoothings = el("select", {"aria-label": "Smoothing", change: () => this.changed()},
      [...SMOOTHINGS.keys()].map((name) => el("option", {value: name}, name)));
    this.smoothings.value = "moving average";
    this.whole = el("button", {type: "button", hidden: true, click: () => this.zoom(null)}, "Reset zoom");
    this.symbols = el("span", {class: "marks"});
    this.element = el("div", {class: "chart-view", hidden: true},
      el("label", {}, "x axis ", this.axes), el("label", {}, "smoothing ", this.smoothings), this.whole,
      el("span", {class: "hint"}, "drag across a chart to zoom, double-click to reset"), this.symbols);
  }

  /** Shows the controls if there are charts; tokens and FLOPs can be chosen if the steps tell them. */
  offer(shown, {tokens, flops}) {
    this.element.hidden = !shown;
    this.axes.querySelector("[value=tokens]").disabled = !tokens;
    this.axes.querySelector("[value=flops]").disabled = !flops;
  }

  /** Sets the marks of the charts: `{kind, text, steps, times, tokens, flops}`. */
  mark(marks) {
    this.marks = marks;
    const kinds = Object.entries(MARKS).filter(([kind]) => marks.some((mark) => mark.kind === kind));
    this.symbols.replaceChildren(...kinds.map(([kind, [symbol, name]]) =>
      el("span", {}, el("i", {class: kind, "aria-hidden": "true"}, symbol), ` ${name} `)));
  }

  choose(axis) {
    this.axis = axis;
    this.pointed(null);
    this.zoom(null);
  }

  /** Shows the range `{low, high}` of the x axis in all charts; null shows everything. */
  zoom(range) {
    this.range = range;
    // A button that vanishes loses the focus to the page.
    if (!range && document.activeElement === this.whole) this.axes.focus();
    this.whole.hidden = !range;
    this.changed();
  }

  smooth(values) {
    return SMOOTHINGS.get(this.smoothings.value)(values);
  }

  get unit() {
    return AXES[this.axis];
  }
}
