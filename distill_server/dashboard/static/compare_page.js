// The page that compares two to four jobs: a chart a metric with a line a job, and what differs in
// their configurations.

import {Curves} from "./curves.js";
import {badge, el} from "./dom.js";
import {heldOutOf, klOf, number, percent} from "./figures.js";
import {History} from "./history.js";
import {Fault, follow, get} from "./server.js";

const MS_BETWEEN_DRAWINGS = 500;
/** The largest number of jobs: a browser holds few connections to one server. */
export const MOST_COMPARED = 4;

/** Shows the jobs with these ids in `root`; returns the function that closes the page. */
export function openCompare(root, ids) {
  const page = new ComparePage(root, ids);
  page.open();
  return () => page.close();
}

class ComparePage {
  constructor(root, ids) {
    this.root = root;
    this.ids = [...new Set(ids)].slice(0, MOST_COMPARED);
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
    this.runs = jobs.map((job) => (
      {label: labelOf(job, jobs), method: job.kind, job, history: new History(job.started_at)}));
    this.body = el("tbody");
    this.root.append(
      el("p", {class: "crumbs"}, el("a", {href: "#/"}, "Jobs"), " / compare"),
      el("h1", {}, `${jobs.length} jobs`), this.table(),
      el("h2", {}, "Differences of configuration"), differences(this.runs),
      el("h2", {}, "Curves"), this.curves.view.element, this.curves.nothing, this.curves.main,
      this.curves.others);
    this.show();
    for (const run of this.runs) {
      this.closers.push(follow(`api/jobs/${encodeURIComponent(run.job.id)}/events`, {
        steps: (records) => this.add(run, records),
        fault: (error) => this.fail(error),
      }));
    }
    const redraw = new ResizeObserver(() => this.draw());
    redraw.observe(this.curves.main);
    this.closers.push(() => redraw.disconnect());
  }

  close() {
    this.closed = true;
    for (const end of this.closers) end();
  }

  add(run, records) {
    for (const record of records) run.history.add(record);
    const {state, step, max_steps: steps} = run.history.last;
    Object.assign(run.job, {state, step, max_steps: steps || run.job.max_steps});
    this.drawing ??= setTimeout(() => {
      this.drawing = null;
      this.draw();
      this.show();
    }, MS_BETWEEN_DRAWINGS);
  }

  draw() {
    if (!this.closed) this.curves.draw(this.runs);
  }

  table() {
    const columns = ["Job", "State", "Step", "Loss", "KL", "Held-out loss", "Accuracy"];
    return scrolled("Jobs", el("table", {class: "plain"},
      el("thead", {}, el("tr", {}, columns.map((name) => el("th", {scope: "col"}, name)))), this.body));
  }

  show() {
    this.body.replaceChildren(...this.runs.map(({job, history, label}, index) => {
      const metrics = {...job.metrics, ...history.metrics};
      const cells = [badge(job.state), `${job.step} / ${job.max_steps || "?"}`, number(metrics.loss),
        number(klOf(metrics)), number(heldOutOf(metrics)),
        percent(metrics["eval/accuracy"])];
      return el("tr", {}, el("th", {scope: "row"}, key(index), link(job, label)),
        cells.map((cell) => el("td", {}, cell)));
    }));
  }

  fail(error) {
    const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
    this.notice?.remove();
    this.notice = el("p", {class: "notice", role: "alert"}, sentence);
    this.root.prepend(this.notice);
  }
}

/** Returns the configuration's values by their dotted keys, such as `train.learning_rate`. A list is
 *  one value. */
export function flattened(config, prefix = "") {
  return Object.entries(config).flatMap(([name, value]) =>
    value && typeof value === "object" && !Array.isArray(value)
      ? flattened(value, `${prefix}${name}.`) : [[prefix + name, JSON.stringify(value)]]);
}

function differences(runs) {
  const configs = runs.map(({job}) => new Map(flattened(job.config)));
  const keys = [...new Set(configs.flatMap((config) => [...config.keys()]))].sort()
    .filter((name) => new Set(configs.map((config) => config.get(name))).size > 1);
  if (!keys.length) return el("p", {class: "hint"}, "The configurations are the same.");
  return scrolled("Differences", el("table", {class: "plain differences"},
    el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "Key"),
      runs.map(({label}, index) => el("th", {scope: "col"}, key(index), label)))),
    el("tbody", {}, keys.map((name) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, name)),
      configs.map((config) => el("td", {}, el("code", {}, config.get(name) ?? "-"))))))));
}

/** A table may be wider than a phone: it scrolls, also with the keyboard. */
function scrolled(name, table) {
  return el("div", {class: "wide", role: "region", "aria-label": name, tabindex: 0}, table);
}

function key(index) {
  return el("i", {class: `key line-${index}`, "aria-hidden": "true"});
}

function link(job, label) {
  return el("a", {href: `#/jobs/${encodeURIComponent(job.id)}`}, label);
}

/** A job's name, or its id if another job has the same name. */
function labelOf(job, jobs) {
  return jobs.some((other) => other !== job && other.name === job.name) ? job.id : job.name;
}
