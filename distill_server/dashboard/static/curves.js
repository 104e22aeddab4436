// The charts of one or several jobs and their metrics. Metrics without a chart appear under "Other metrics".

import {ChartView} from "./chart_view.js";
import {Curve} from "./curve.js";
import {el} from "./dom.js";

const rest = (prefix) => (name) => name.slice(prefix.length);
const one = (...names) => (name) => names.includes(name);
// A standard error is no value of its chart: on the log axis of the KL it would hide the curves.
const isError = (name) => name.endsWith("_stderr");
// `eval/anchor/...` are the metrics of the anchor, evaluated in place of the student.
const evaluated = (name) => name.slice("eval/".length).replace("anchor/", "anchor's ");

const WEIGHTS = {
  "ratio/ess": "effective share of samples",
  "ratio/mean": "mean",
  "ratio/bounded": "share clipped or masked",
};

const CHARTS = [
  {
    title: "Loss",
    unit: "nats a token",
    holds: one("loss", "cross_entropy", "eval/cross_entropy"),
    label: (name) => name.replace("eval/", "held-out "),
  },
  {
    title: "KL",
    unit: "nats a token, log axis",
    log: true,
    holds: (name) => /^(eval\/(anchor\/)?)?kl/.test(name) && !isError(name),
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
    holds: (name) => /^eval\/(anchor\/)?(accuracy|reward|pass)/.test(name) && !isError(name),
    label: evaluated,
  },
  {
    title: "Head mass",
    unit: "probability in the top-k",
    holds: (name) => /^topk\/.*mass$/.test(name),
    label: rest("topk/"),
  },
  {
    title: "Importance weights",
    unit: "1 on-policy",
    holds: (name) => name in WEIGHTS,
    label: (name) => WEIGHTS[name],
  },
  {
    title: "Sampler",
    unit: "KL to the student, nats a token",
    zero: true,
    holds: one("ratio/kl"),
    label: () => "KL",
  },
  {
    title: "Staleness",
    unit: "steps behind, mean over tokens",
    zero: true,
    holds: one("rollout/lag"),
    label: () => "lag",
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
  {title: "MFU", unit: "of the GPUs' peak", zero: true, percent: true, holds: one("mfu")},
  {title: "Memory", unit: "GiB", zero: true, holds: (name) => name.startsWith("memory/"),
    label: rest("memory/")},
  {title: "Gradient", unit: "before clipping", holds: one("grad_norm"), label: () => "norm"},
];

/** All charts of one job, or of several: `main` holds those of CHARTS, `others` those of all other
 *  metrics. One job has its metrics of a kind in one chart; several jobs have a chart a metric. */
export class Curves {
  constructor() {
    this.view = new ChartView(() => this.draw(this.runs));
    this.runs = [];
    // The charts by title, and the place of each element in CHARTS.
    this.known = new Map();
    this.places = new Map();
    this.main = el("div", {class: "curves"});
    this.grid = el("div", {class: "curves"});
    this.others = el("details", {hidden: true, toggle: () => this.draw(this.runs)},
      el("summary", {}, "Other metrics"), this.grid);
    this.nothing = el("p", {class: "hint"}, "No steps yet.");
  }

  /** Draws jobs `{label, history}`; the charts in `others` only while they are open. */
  draw(runs) {
    this.runs = runs;
    const names = [...new Set(runs.flatMap(({history}) => [...history.series.keys()]))];
    this.view.offer(names.length > 0, runs.some(({history}) => history.learned > 0));
    this.nothing.hidden = names.length > 0;
    if (!names.length) return;
    const lines = new Map([...this.known.values()].map((curve) => [curve, []]));
    for (const name of names.sort(evaluationsLast)) {
      const curve = this.chart(name);
      if (!lines.has(curve)) lines.set(curve, []);
      lines.get(curve).push(...this.lines(name, lines.get(curve).length));
    }
    this.others.hidden = !this.grid.children.length;
    const range = this.view.range ?? rangeOf(runs, this.view.axis);
    for (const [curve, drawn] of lines) {
      if (this.others.open || this.places.has(curve.element)) curve.draw(drawn, range);
    }
  }

  /** Returns the chart of a metric; makes it at its place if there is none. */
  chart(name) {
    const place = CHARTS.findIndex(({holds}) => holds(name));
    const spec = CHARTS[place] ?? {title: name, unit: ""};
    const title = this.runs.length > 1 ? titleOf(name, spec) : spec.title;
    if (this.known.has(title)) return this.known.get(title);
    const curve = new Curve({...spec, title}, this.view);
    this.known.set(title, curve);
    if (place < 0) {
      this.grid.append(curve.element);
      return curve;
    }
    this.places.set(curve.element, place);
    const next = [...this.main.children].find((other) => this.places.get(other) > place);
    this.main.insertBefore(curve.element, next ?? null);
    return curve;
  }

  /** Returns the lines of a metric; `drawn` is the number of lines that its chart already has. */
  lines(name, drawn) {
    const alone = this.runs.length === 1;
    const held = name.startsWith("eval/");
    return this.runs.filter(({history}) => history.series.has(name)).map((run) => ({
      ...run.history.series.get(name),
      label: alone ? labelOf(name) : run.label,
      colour: alone ? drawn : this.runs.indexOf(run),
      held,
      alone,
    }));
  }
}

function labelOf(name) {
  const {label} = CHARTS.find(({holds}) => holds(name)) ?? {};
  return (label ? label(name) : name).replaceAll("_", " ");
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
