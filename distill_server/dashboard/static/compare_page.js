// The page that compares jobs: the ends of their curves with the mean over seeds, a chart a metric with
// a line a job, and the keys that differ.

import {Curves} from "./curves.js";
import {keyOf} from "./curve.js";
import {badge, el, jobLink, scrollRegion} from "./dom.js";
import {heldOutOf, klOf, number, percent} from "./figures.js";
import {History} from "./history.js";
import {differingKeys, flattened, groupBySeed, interval} from "./seeds.js";
import {Fault, get, repeat} from "./server.js";

const SECONDS_BETWEEN_READS = 3;
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
/** The largest number of jobs. */
export const MOST_COMPARED = 50;
// The results of a job: the title of the column, its value, and how it is formatted.
const RESULTS = [
  ["Loss", ({loss}) => loss, number],
  ["KL", klOf, number],
  ["Reward", (metrics) => metrics["reward/mean"], number],
  ["Held-out loss", heldOutOf, number],
  ["Accuracy", (metrics) => metrics["eval/accuracy"], percent],
];

/** Shows the jobs with these ids in `root`; returns the function that closes the page. */
export function openCompare(root, ids) {
  const page = new ComparePage(root, [...new Set(ids)]);
  page.open();
  return () => page.close();
}

class ComparePage {
  constructor(root, ids) {
    this.root = root;
    this.ids = ids.slice(0, MOST_COMPARED);
    this.leftOut = ids.length - this.ids.length;
    this.curves = new Curves();
    this.closers = [];
  }

  async open() {
    let jobs;
    try {
      jobs = await Promise.all(this.ids.map((id) => get(`api/jobs/${encodeURIComponent(id)}`)));
    } catch (error) {
      this.fail(error);
      return;
    }
    if (this.closed) return;
    document.title = "compare - distill";
    this.runs = jobs.map((job, colour) => ({label: labelOf(job, jobs), method: job.kind, job, colour, lastSeq: 0,
      config: new Map(flattened(job.config)), history: new History(job.started_at)}));
    this.ends = el("div");
    this.root.append(
      el("p", {class: "crumbs"}, el("a", {href: "#/"}, "Jobs"), " / compare"),
      el("h1", {}, `${jobs.length} jobs`),
      ...(this.leftOut ? [el("p", {class: "notice"}, `${this.leftOut} further jobs are left out: the page compares at`
        + ` most ${MOST_COMPARED} jobs.`)] : []),
      this.ends, el("h2", {}, "Differences of configuration"), differences(this.runs),
      el("h2", {}, "Curves"), this.curves.view.element, this.curves.nothing, this.curves.main,
      this.curves.others, this.curves.table);
    this.show();
    const redraw = new ResizeObserver(() => this.draw());
    redraw.observe(this.curves.main);
    this.closers.push(() => redraw.disconnect(), repeat(SECONDS_BETWEEN_READS, () => this.read()));
  }

  close() {
    this.closed = true;
    for (const end of this.closers) end();
  }

  /** Reads the new steps of all jobs, one after the other: a browser holds few connections to a server.
   *  The first time, each job is drawn when it has been read; later, all jobs are drawn at the end. */
  async read() {
    const isFirst = this.runs.every(({lastSeq}) => !lastSeq);
    let isChanged = false;
    try {
      for (const run of this.runs) {
        isChanged = await this.readRun(run) || isChanged;
        if (isFirst) this.redraw();
      }
      this.notice?.remove();
    } catch (error) {
      this.fail(error);
    }
    if (isChanged && !isFirst) this.redraw();
  }

  /** Returns whether the job has new steps. */
  async readRun(run) {
    const {job, history} = run;
    // The last events of a job that has ended are read once.
    if (this.closed || run.isComplete) return false;
    const answer = await get(`api/jobs/${encodeURIComponent(job.id)}/steps?after=${run.lastSeq}`);
    run.isComplete = ENDED.includes(answer.state);
    if (answer.extremes) history.extremes = answer.extremes;
    run.lastSeq = answer.last_seq;
    history.addColumns(answer.events);
    if (!history.last) return false;
    const {state, step, max_steps: steps} = history.last;
    Object.assign(job, {state, step, max_steps: steps || job.max_steps});
    return answer.events.seq.length > 0;
  }

  redraw() {
    this.draw();
    this.show();
  }

  draw() {
    if (!this.closed) this.curves.draw(this.runs);
  }

  /** Shows the ends of the jobs, grouped by seed. */
  show() {
    const values = (run) => RESULTS.map(([, value]) => value({...run.job.metrics, ...run.history.metrics}));
    const rows = new Map(this.runs.map((run) => [run, values(run)]));
    const shown = RESULTS.map((_, column) => [...rows.values()].some((row) => Number.isFinite(row[column])));
    const columns = ["Job", "State", "Step", ...RESULTS.filter((_, column) => shown[column]).map(([title]) => title)];
    const cells = (row) => row.filter((_, column) => shown[column]).map((cell) => el("td", {}, cell));
    const means = (members) => RESULTS.map(([, , format], column) =>
      meanOf(members.map((run) => rows.get(run)[column]), format));
    const groups = groupBySeed(this.runs);
    this.ends.replaceChildren(scrollRegion("Ends", "", el("table", {class: "plain seeds"},
      el("thead", {}, el("tr", {}, columns.map((name) => el("th", {scope: "col"}, name)))),
      groups.map(({keys, members}) => el("tbody", {},
        members.length > 1 ? el("tr", {class: "mean"},
          el("th", {scope: "row", colspan: 3}, `mean of ${members.length} seeds`, ...keysOf(keys)),
          cells(means(members))) : null,
        members.map((run) => el("tr", {}, el("th", {scope: "row"}, key(run.colour), jobLink(run.job.id, run.label)),
          el("td", {}, badge(run.job.state)), el("td", {}, `${run.job.step} / ${run.job.max_steps || "?"}`),
          cells(RESULTS.map(([, , format], column) => format(rows.get(run)[column]))))))))));
  }

  fail(error) {
    const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
    this.notice?.remove();
    this.notice = el("p", {class: "notice", role: "alert"}, sentence);
    this.root.prepend(this.notice);
  }
}

/** Formats the mean and its 95% interval; "-" unless all seeds have a value. */
function meanOf(values, format) {
  const result = values.every(Number.isFinite) ? interval(values) : null;
  if (!result) return "-";
  // A smaller difference is that of a computer's rounding.
  if (result.half < 1e-9 * Math.abs(result.mean)) return `${format(result.mean)} \u00b1 0`;
  return `${format(result.mean)} \u00b1 ${format === number ? number(result.half, 2) : format(result.half)}`;
}

function keysOf(keys) {
  return keys.map(([name, value]) => [" ", el("code", {}, `${name} = ${value}`)]);
}

function differences(runs) {
  const names = differingKeys(runs.map(({config}) => config));
  if (!names.length) return el("p", {class: "hint"}, "The configurations are the same.");
  return scrollRegion("Differences", "", el("table", {class: "plain differences"},
    el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "Key"),
      runs.map(({label, colour}) => el("th", {scope: "col"}, key(colour), label)))),
    el("tbody", {}, names.map((name) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, name)),
      runs.map(({config}) => el("td", {}, el("code", {}, config.get(name) ?? "-"))))))));
}

function key(colour) {
  return el("i", {class: `key ${keyOf(colour)}`, "aria-hidden": "true"});
}

/** A job's name, or its id if another job has the same name. */
function labelOf(job, jobs) {
  return jobs.some((other) => other !== job && other.name === job.name) ? job.id : job.name;
}
