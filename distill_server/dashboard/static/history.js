// Collects a job's metrics from its events. Steps that a later attempt repeats are replaced.

const CLOCK_STEPS = 40;

/** The metrics of one job over its steps. */
export class History {
  /** `began` is the Unix time from which the job's time counts; 0: from its first step. */
  constructor(began = 0) {
    this.began = began;
    /** `{steps, times, tokens, values}` by metric: arrays of equal length, all but the last
     *  ascending. Times are seconds since `began`, tokens all learned tokens up to the step. */
    this.series = new Map();
    this.tokens = [];
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
    this.began ||= record.time;
    this.time = record.time - this.began;
    this.count(record);
    Object.assign(this.metrics, record.metrics);
    this.clock.push([record.step, record.time]);
    if (this.clock.length > CLOCK_STEPS) this.clock.shift();
    for (const [name, value] of Object.entries(record.metrics)) this.put(name, record.step, value);
    const wait = record.metrics["time/teacher_wait"] / record.metrics["time/step"];
    if (Number.isFinite(wait)) this.put("teacher wait", record.step, wait);
  }

  put(name, step, value) {
    if (!this.series.has(name)) this.series.set(name, {steps: [], times: [], tokens: [], values: []});
    const found = this.series.get(name);
    found.steps.push(step);
    found.times.push(this.time);
    found.tokens.push(this.learned);
    found.values.push(value);
  }

  /** Adds a step's tokens. A step that stands for several has the mean of theirs. */
  count({step, metrics}) {
    const [lastStep, before] = this.tokens.at(-1) ?? [step - 1, 0];
    this.learned = before + (metrics.tokens ?? 0) * (step - lastStep);
    this.tokens.push([step, this.learned]);
  }

  /** The first and the last value of an axis, `steps`, `times` or `tokens`: `{low, high}`. */
  range(axis) {
    let [low, high] = [Infinity, -Infinity];
    for (const {[axis]: xs} of this.series.values()) {
      if (!xs.length) continue;
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs.at(-1));
    }
    return {low, high};
  }

  /** The share of the time of all steps for which the trainer waited for the teacher, as in "Time in steps". */
  get teacherWait() {
    const total = (name) => this.series.get(name)?.values.reduce((sum, value) => sum + value, 0);
    return total("time/teacher_wait") / total("time/step");
  }

  /** Removes the values from `step` on: a resumed attempt repeats the steps after its checkpoint. */
  forget(step) {
    while (this.tokens.length && this.tokens.at(-1)[0] >= step) this.tokens.pop();
    for (const found of this.series.values()) {
      while (found.steps.length && found.steps.at(-1) >= step) {
        for (const list of Object.values(found)) list.pop();
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
