// Collects a job's metrics from its events. Steps that a later attempt repeats are replaced.

import {nearest} from "./axes.js";

const CLOCK_STEPS = 40;
// The axes of the charts: the step, seconds since the start, and sums over the steps.
const AXES = ["steps", "times", "tokens", "flops"];
// A longer reason of a fault is cut; the page has it in full.
const MOST_CHARACTERS = 80;
const SUMS = ["tokens", "flops"];

/** The metrics of one job over its steps. */
export class History {
  /** `began` is the Unix time from which the job's time counts; 0: from its first step. */
  constructor(began = 0) {
    this.began = began;
    /** `{steps, times, tokens, flops, values}` by metric: arrays of equal length, all but the last
     *  ascending. Times are seconds since `began`, tokens and FLOPs the sums up to the step. */
    this.series = new Map();
    /** The values of the axes for all steps. */
    this.places = Object.fromEntries(AXES.map((axis) => [axis, []]));
    /** `{attempt, curves}`: the extreme values of events that the server has deleted. */
    this.extremes = {attempt: 0, curves: {}};
    /** `{kind, step, text}` of attempts and faults. */
    this.marks = [];
    /** The attempt that has begun and has no step yet; 0: none. */
    this.awaited = 0;
    this.metrics = {};
    this.last = null;
    this.clock = [];
  }

  /** Adds a message of the job's events: columns with the fields of an event. */
  addColumns({metrics, ...columns}) {
    const names = Object.keys(metrics);
    for (const row of columns.seq.keys()) {
      const measured = names.filter((name) => metrics[name][row] !== null);
      const fields = Object.entries(columns).map(([name, column]) => [name, column[row]]);
      this.add({...Object.fromEntries(fields),
        metrics: Object.fromEntries(measured.map((name) => [name, metrics[name][row]]))});
    }
  }

  /** Adds one event of the job. */
  add(record) {
    this.markState(record);
    if (this.last && record.attempt !== this.last.attempt) this.clock = [];
    this.last = record;
    if (!Object.keys(record.metrics).length) return;
    this.forget(record.step);
    this.began ||= record.time;
    this.count(record);
    Object.assign(this.metrics, record.metrics);
    this.clock.push([record.step, record.time]);
    if (this.clock.length > CLOCK_STEPS) this.clock.shift();
    for (const [name, value] of Object.entries(record.metrics)) this.put(name, value);
    const wait = record.metrics["time/teacher_wait"] / record.metrics["time/step"];
    if (Number.isFinite(wait)) this.put("teacher wait", wait);
  }

  /** Marks the end of an attempt by a fault, and the first step of the next one. */
  markState({attempt, state, reason, step, metrics}) {
    const {last} = this;
    const isNext = last && attempt !== last.attempt;
    const wasRunning = last && !["SUCCEEDED", "CANCELLED", "FAILED"].includes(last.state);
    if (reason && wasRunning && (isNext || state === "FAILED")) {
      const text = `fault: ${reason.slice(0, MOST_CHARACTERS)}`;
      this.marks.push({kind: "fault", step: this.places.steps.at(-1) ?? step, text});
    }
    if (isNext) this.awaited = attempt;
    if (!this.awaited || !Object.keys(metrics).length) return;
    if (attempt > this.extremes.attempt) this.forgetExtremes(step);
    this.marks.push({kind: "attempt", step, text: `attempt ${attempt} began`});
    this.awaited = 0;
  }

  put(name, value) {
    if (!this.series.has(name)) {
      this.series.set(name, Object.fromEntries([...AXES, "values"].map((list) => [list, []])));
    }
    const series = this.series.get(name);
    for (const axis of AXES) series[axis].push(this.places[axis].at(-1));
    series.values.push(value);
  }

  /** Adds a step's place on the axes. The steps that the server left out count as this one. */
  count({step, time, metrics}) {
    const {places} = this;
    const steps = step - (places.steps.at(-1) ?? step - 1);
    for (const name of SUMS) places[name].push((places[name].at(-1) ?? 0) + (metrics[name] ?? 0) * steps);
    places.steps.push(step);
    places.times.push(time - this.began);
  }

  /** Whether the axes of tokens and FLOPs have values: `{tokens, flops}`. */
  get sums() {
    return Object.fromEntries(SUMS.map((name) => [name, this.places[name].at(-1) > 0]));
  }

  /** The first and the last value of an axis: `{low, high}`. */
  range(axis) {
    return {low: this.places[axis][0] ?? Infinity, high: this.places[axis].at(-1) ?? -Infinity};
  }

  /** Returns marks `{kind, step, text}` with their places on the axes, in order of the steps. */
  placed(marks) {
    const {steps} = this.places;
    if (!steps.length) return [];
    return [...marks].sort((one, other) => one.step - other.step).map(({kind, step, text}) => {
      const index = nearest(steps, step);
      return {kind, text, ...Object.fromEntries(AXES.map((axis) => [axis, this.places[axis][index]]))};
    });
  }

  /** Marks of the evaluations that the charts have. */
  get evaluations() {
    const evaluated = [...this.series].filter(([name]) => name.startsWith("eval/"));
    const steps = new Set(evaluated.flatMap(([, series]) => series.steps));
    return [...steps].map((step) => ({kind: "evaluation", step, text: "evaluation"}));
  }

  /** The share of the time of all steps for which the trainer waited for the teacher, as in "Time in steps". */
  get teacherWait() {
    const total = (name) => this.series.get(name)?.values.reduce((sum, value) => sum + value, 0);
    return total("time/teacher_wait") / total("time/step");
  }

  /** Removes the values from `step` on: a resumed attempt repeats the steps after its checkpoint. */
  forget(step) {
    for (const lists of [this.places, ...this.series.values()]) {
      while (lists.steps.length && lists.steps.at(-1) >= step) {
        for (const list of Object.values(lists)) list.pop();
      }
    }
  }

  forgetExtremes(first) {
    for (const {steps, values} of Object.values(this.extremes.curves)) {
      const count = steps.filter((step) => step < first).length;
      steps.length = values.length = count;
    }
  }

  /** Returns a metric as a line of a chart: `xs` and `values` with the extreme values between those of
   *  the events, and `sampled`, `{xs, values}` of the events only. */
  line(name, axis) {
    const {steps, [axis]: xs, values} = this.series.get(name);
    const sampled = {xs, values};
    const extremes = this.extremes.curves[name];
    if (!extremes?.steps.length) return {...sampled, sampled};
    const points = [...values.map((value, i) => [steps[i], xs[i], value]),
      ...extremes.steps.map((step, i) => [step, this.placeOf(step, axis), extremes.values[i]])];
    points.sort(([one], [other]) => one - other);
    return {xs: points.map(([, x]) => x), values: points.map(([, , value]) => value), sampled};
  }

  /** Returns the place of a step on an axis, between those of the nearest steps. */
  placeOf(step, axis) {
    const {steps, [axis]: places} = this.places;
    const near = nearest(steps, step);
    const first = Math.max(0, Math.min(steps[near] <= step ? near : near - 1, steps.length - 2));
    const share = (step - steps[first]) / (steps[first + 1] - steps[first]);
    return Number.isFinite(share) ? places[first] + share * (places[first + 1] - places[first]) : places[near];
  }

  /** The remaining seconds at the speed of the last 40 steps; null before two steps. */
  get secondsLeft() {
    if (this.last?.state !== "RUNNING" || this.clock.length < 2 || !this.last.max_steps) return null;
    const [[first, began], [last, now]] = [this.clock[0], this.clock.at(-1)];
    if (last <= first || now <= began) return null;
    return ((now - began) / (last - first)) * Math.max(0, this.last.max_steps - last);
  }
}
