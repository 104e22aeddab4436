// The charts of a job and their metrics. Metrics without a chart appear under "Other metrics".

import {Curve} from "./curve.js";
import {el} from "./dom.js";

const rest = (prefix) => (name) => name.slice(prefix.length);
const one = (...names) => (name) => names.includes(name);
// `eval/anchor/...` are the metrics of the anchor, evaluated in place of the student.
const evaluated = (name) => name.slice("eval/".length).replace("anchor/", "anchor's ");

const CHARTS = [
  {title: "Loss", unit: "nats a token", holds: one("loss", "cross_entropy")},
  {
    title: "KL",
    unit: "nats a token, log axis",
    log: true,
    holds: (name) => /^(eval\/(anchor\/)?)?kl/.test(name),
    label: (name) => (name.startsWith("eval/") ? `held-out ${evaluated(name)}` : `to ${rest("kl/")(name)}`),
  },
  {
    title: "Reward",
    unit: "over the answers of a step",
    holds: one("reward/mean", "reward/std"),
    label: rest("reward/"),
  },
  {
    title: "Held out",
    unit: "accuracy and reward",
    holds: (name) => /^eval\/(anchor\/)?(accuracy|reward|pass)/.test(name),
    label: evaluated,
  },
  {
    title: "Head mass",
    unit: "probability in the top-k",
    holds: (name) => name.startsWith("topk/"),
    label: rest("topk/"),
  },
  {
    title: "Throughput",
    unit: "tokens a second",
    zero: true,
    holds: one("tokens_per_sec"),
    label: () => "scored",
  },
  {
    title: "Teacher wait",
    unit: "share of a step",
    zero: true,
    percent: true,
    holds: one("teacher wait"),
  },
  {title: "Time", unit: "seconds a step", zero: true, holds: (name) => name.startsWith("time/"),
    label: rest("time/")},
  {title: "Gradient", unit: "before clipping", holds: one("grad_norm"), label: () => "norm"},
];

/** All charts of a job: `main` holds those of CHARTS, `others` one chart for each other metric. */
export class Curves {
  constructor() {
    this.curves = CHARTS.map((spec) => new Curve(spec));
    this.known = new Map();
    this.main = el("div", {class: "curves"}, this.curves.map((curve) => curve.element));
    this.grid = el("div", {class: "curves"});
    this.others = el("details", {hidden: true},
      el("summary", {}, "Other metrics"), this.grid);
    this.nothing = el("p", {class: "hint"}, "No steps yet.");
  }

  /** Draws all charts that have data in this History; `others` only while they are open. */
  draw(history) {
    for (const name of history.series.keys()) {
      if (this.known.has(name) || CHARTS.some((spec) => spec.holds(name))) continue;
      const curve = new Curve({title: name, unit: "", holds: one(name)});
      this.known.set(name, curve);
      this.grid.append(curve.element);
    }
    this.others.hidden = !this.known.size;
    this.nothing.hidden = history.series.size > 0;
    for (const curve of this.curves) curve.draw(history);
    if (this.others.open) for (const curve of this.known.values()) curve.draw(history);
  }
}
