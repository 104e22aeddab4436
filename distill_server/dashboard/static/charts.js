// Which metric is in which chart, and the charts that come first for a method.

const [TRAINING, SPEED] = ["Training", "Speed and memory"];
/** The theme of metrics without a chart in CHARTS. */
export const OTHER = "Other metrics";
export const THEMES = [TRAINING, SPEED, OTHER];
const FIRST = {rl: ["Reward", "Held out", "KL"], eval: ["Held out"], capture: ["Throughput"]};
const FIRST_OF_OTHERS = ["Loss", "KL", "Held out"];

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

export const CHARTS = [
  {
    title: "Loss",
    theme: TRAINING,
    unit: "nats a token",
    holds: one("loss", "cross_entropy", "eval/cross_entropy"),
    label: (name) => name.replace("eval/", "held-out "),
  },
  {
    title: "KL",
    theme: TRAINING,
    unit: "nats a token",
    log: true,
    holds: (name) => /^(eval\/(anchor\/)?)?kl/.test(name) && !isError(name),
    label: (name) => (name.startsWith("eval/") ? `held-out ${evaluated(name)}` : `to ${rest("kl/")(name)}`),
  },
  {
    title: "Reward",
    theme: TRAINING,
    unit: "over the answers of a step",
    holds: one("reward/mean", "reward/std"),
    label: rest("reward/"),
  },
  {
    title: "Held out",
    theme: TRAINING,
    unit: "accuracy and reward",
    holds: (name) => /^eval\/(anchor\/)?(accuracy|reward|pass)/.test(name) && !isError(name),
    label: evaluated,
  },
  {
    title: "Head mass",
    theme: TRAINING,
    unit: "probability in the top-k",
    holds: (name) => /^topk\/.*mass$/.test(name),
    label: rest("topk/"),
  },
  {
    title: "Importance weights",
    theme: TRAINING,
    unit: "1 on-policy",
    holds: (name) => name in WEIGHTS,
    label: (name) => WEIGHTS[name],
  },
  {
    title: "Sampler",
    theme: TRAINING,
    unit: "KL to the student, nats a token",
    zero: true,
    holds: one("ratio/kl"),
    label: () => "KL",
  },
  {
    title: "Staleness",
    theme: TRAINING,
    unit: "steps behind, mean over tokens",
    zero: true,
    holds: one("rollout/lag"),
    label: () => "lag",
  },
  {
    title: "Throughput",
    theme: SPEED,
    unit: "tokens a second",
    zero: true,
    holds: one("tokens_per_sec"),
    label: () => "scored",
  },
  {
    title: "Teacher wait",
    theme: SPEED,
    unit: "share of a step",
    zero: true,
    percent: true,
    holds: one("teacher wait"),
  },
  {title: "Time", theme: SPEED, unit: "seconds a step", zero: true, holds: (name) => name.startsWith("time/"),
    label: rest("time/")},
  {title: "MFU", theme: SPEED, unit: "of the GPUs' peak", zero: true, percent: true,
    holds: one("mfu")},
  {title: "Memory", theme: SPEED, unit: "GiB", zero: true, holds: (name) => name.startsWith("memory/"),
    label: rest("memory/")},
  {title: "Gradient", theme: TRAINING, unit: "before clipping", holds: one("grad_norm"), label: () => "norm"},
];

/** Returns whether a chart comes first for jobs of one of these methods; the others are folded by theme. */
export function comesFirst({title}, methods) {
  return methods.some((method) => (FIRST[method] ?? FIRST_OF_OTHERS).includes(title));
}

/** Returns the label of a metric in its chart. */
export function labelOf(name) {
  const {label} = CHARTS.find(({holds}) => holds(name)) ?? {};
  return (label ? label(name) : name).replaceAll("_", " ");
}
