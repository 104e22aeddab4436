// Collects a job's metrics from its events. Steps that a later attempt repeats are replaced.

const CLOCK_STEPS = 40;

/** The metrics of one job over its steps. */
export class History {
  constructor() {
    /** `{steps, values}` by metric: two arrays of equal length, with steps ascending. */
    this.series = new Map();
    this.metrics = {};
    this.last = null;
    this.clock = [];
  }

  /** Adds one event of the job. */
  add(record) {
    if (this.last && record.attempt !== this.last.attempt) this.clock = [];
    this.last = record;
    if (!Object.keys(record.metrics).length) return;
    this.forget(record.step);
    Object.assign(this.metrics, record.metrics);
    this.clock.push([record.step, record.time]);
    if (this.clock.length > CLOCK_STEPS) this.clock.shift();
    for (const [name, value] of Object.entries(record.metrics)) this.put(name, record.step, value);
    const wait = record.metrics["time/teacher_wait"] / record.metrics["time/step"];
    if (Number.isFinite(wait)) this.put("teacher wait", record.step, wait);
  }

  put(name, step, value) {
    if (!this.series.has(name)) this.series.set(name, {steps: [], values: []});
    const {steps, values} = this.series.get(name);
    steps.push(step);
    values.push(value);
  }

  /** The first and the last step that have a metric: `{low, high}`. */
  get steps() {
    const ends = [...this.series.values()].filter(({steps}) => steps.length)
      .map(({steps}) => [steps[0], steps.at(-1)]);
    return {
      low: Math.min(...ends.map(([first]) => first)),
      high: Math.max(...ends.map(([, last]) => last)),
    };
  }

  /** Removes the values from `step` on: a resumed attempt repeats the steps after its checkpoint. */
  forget(step) {
    for (const {steps, values} of this.series.values()) {
      while (steps.length && steps.at(-1) >= step) {
        steps.pop();
        values.pop();
      }
    }
  }

  /** The remaining seconds at the speed of the last 40 steps; null before two steps. */
  get secondsLeft() {
    if (this.last?.state !== "RUNNING" || this.clock.length < 2 || !this.last.max_steps) return null;
    const [[first, began], [last, now]] = [this.clock[0], this.clock.at(-1)];
    if (last <= first || now <= began) return null;
    return ((now - began) / (last - first)) * Math.max(0, this.last.max_steps - last);
  }
}
