// What all charts of a page have in common: the x axis, the smoothing and the zoomed range.

import {linearTicks, timeTicks} from "./axes.js";
import {el} from "./dom.js";
import {duration, number, shortDuration} from "./figures.js";
import {SMOOTHINGS} from "./smoothing.js";

// Each axis is named after its array in a series of History.
const AXES = {
  steps: {
    title: "step",
    ticks: (low, high, count) => linearTicks(low, high, count).filter(Number.isInteger),
    tick: (value) => number(value),
    label: (value) => `step ${value}`,
  },
  times: {title: "time", ticks: timeTicks, tick: shortDuration, label: duration},
  tokens: {
    title: "tokens",
    ticks: linearTicks,
    tick: (value) => number(value),
    label: (value) => `${number(Math.round(value))} tokens`,
  },
};

/** The controls above the charts, and their state. */
export class ChartView {
  /** `changed` is called when the charts must be drawn again. */
  constructor(changed) {
    this.changed = changed;
    this.axis = "steps";
    this.range = null;
    this.axes = el("select", {"aria-label": "Horizontal axis", change: () => this.choose(this.axes.value)},
      Object.entries(AXES).map(([name, {title}]) => el("option", {value: name}, title)));
    this.smoothings = el("select", {"aria-label": "Smoothing", change: () => this.changed()},
      [...SMOOTHINGS.keys()].map((name) => el("option", {value: name}, name)));
    this.smoothings.value = "moving average";
    this.whole = el("button", {type: "button", hidden: true, click: () => this.zoom(null)}, "Reset zoom");
    this.element = el("div", {class: "chart-view", hidden: true},
      el("label", {}, "x axis ", this.axes), el("label", {}, "smoothing ", this.smoothings), this.whole,
      el("span", {class: "hint"}, "drag across a chart to zoom, double-click to reset"));
  }

  /** Shows the controls if there are charts; tokens can be chosen if the steps tell them. */
  offer(shown, tokens) {
    this.element.hidden = !shown;
    this.axes.querySelector("[value=tokens]").disabled = !tokens;
  }

  choose(axis) {
    this.axis = axis;
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
