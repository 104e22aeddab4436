// The time of each stage of a step: stacked bars over equal parts of the steps, and the shares.

import {el, svg} from "./dom.js";
import {number, percent, shortDuration} from "./figures.js";

// In the order of a step, as in the report (clients/cli/plots/stages.py). Learning is the rest.
const STAGES = [
  {label: "sampling rollouts", metric: "time/rollout", colour: 6},
  {label: "computing rewards", metric: "time/reward", colour: 1},
  {label: "scoring by the anchor", metric: "time/anchor", colour: 0},
  {label: "log-probs of the old policy", metric: "time/old_policy", colour: 5},
  {label: "waiting for the teacher", metric: "time/teacher_wait", colour: 4},
  {label: "loss, forward and backward", metric: null, colour: 3},
  {label: "optimizer", metric: "time/optim", colour: 2},
];
// The label of time/rollout in a job that samples no answers: it has no length/truncated.
const WITHOUT_ANSWERS = "making the sequences";
const MOST_BARS = 30;
// The units of the drawing, which is stretched to the width of the page.
const [WIDTH, HEIGHT, GAP] = [1000, 100, 3];

/** The section with the bars; hidden until a step was timed. */
export class StagesView {
  constructor() {
    this.highest = el("span");
    this.first = el("span");
    this.last = el("span");
    this.bars = svg("svg", {class: "stages", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, height: 130,
      preserveAspectRatio: "none", role: "img"});
    this.legend = el("ul", {class: "shares"});
    this.element = el("section", {class: "card", hidden: true}, el("h2", {}, "Time in steps"),
      el("p", {class: "hint"}, this.highest), this.bars,
      el("p", {class: "hint ends"}, this.first, this.last), this.legend);
  }

  /** Draws the steps of a job's History. */
  draw(history) {
    const whole = history.series.get("time/step");
    this.element.hidden = !whole?.steps.length;
    if (this.element.hidden) return;
    const stages = stagesOf(history);
    const bars = barsOf(history, stages, MOST_BARS);
    const highest = Math.max(...bars.map(({seconds}) => sum(seconds))) || 1;
    this.bars.replaceChildren(...bars.flatMap((bar, place) => {
      const width = WIDTH / bars.length;
      let below = 0;
      return stages.map(({label, colour}, stage) => {
        const tall = (HEIGHT * bar.seconds[stage]) / highest;
        below += tall;
        const steps = bar.first === bar.last ? `step ${bar.first}` : `steps ${bar.first} to ${bar.last}`;
        return svg("rect", {class: `line-${colour}`, x: place * width + GAP / 2, y: HEIGHT - below,
          width: width - GAP, height: tall},
        svg("title", {}, `${steps}, ${label}: ${shortDuration(bar.seconds[stage])}`));
      });
    }));
    const [{seconds: means}] = barsOf(history, stages, 1);
    const total = sum(means);
    const shares = stages.map(({label}, stage) => `${label} ${percent(means[stage] / total)}`);
    this.bars.setAttribute("aria-label", `Time in steps: ${shares.join(", ")}`);
    this.highest.textContent = `seconds a step, up to ${number(highest, 3)}`;
    this.first.textContent = `step ${whole.steps[0]}`;
    this.last.textContent = `step ${whole.steps.at(-1)}`;
    this.legend.replaceChildren(...stages.map(({label, colour}, stage) =>
      el("li", {class: `line-${colour}`}, el("i"), `${label} `,
        el("b", {}, percent(means[stage] / total)), ` ${shortDuration(means[stage])} a step`)));
  }
}

/** Returns the stages that a job has. A stage whose total rounds to 0 seconds and to 0% is none. */
export function stagesOf({series}) {
  const total = (metric) => sum(series.get(metric)?.values ?? []);
  const whole = total("time/step");
  const counts = (seconds) => seconds >= 0.5 || (whole > 0 && seconds >= 0.005 * whole);
  return STAGES.filter(({metric}) => !metric || counts(total(metric))).map((stage) =>
    (stage.metric !== "time/rollout" || series.has("length/truncated")
      ? stage : {...stage, label: WITHOUT_ANSWERS}));
}

/** Returns at most `most` bars `{first, last, seconds}`: the mean seconds of a step by stage. */
function barsOf({series}, stages, most) {
  const {steps, values} = series.get("time/step");
  const found = stages.map(({metric}) => metric && bySteps(series.get(metric)));
  const every = steps.map((step, place) => {
    const seconds = found.map((stage) => stage?.get(step) ?? 0);
    seconds[stages.findIndex(({metric}) => !metric)] = Math.max(0, values[place] - sum(seconds));
    return seconds;
  });
  const size = Math.ceil(steps.length / most);
  const starts = Array.from({length: Math.ceil(steps.length / size)}, (_, bar) => bar * size);
  return starts.map((start) => {
    const part = every.slice(start, start + size);
    return {first: steps[start], last: steps[start + part.length - 1],
      seconds: stages.map((_, stage) => sum(part.map((seconds) => seconds[stage])) / part.length)};
  });
}

function bySteps({steps, values}) {
  return new Map(steps.map((step, place) => [step, values[place]]));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
