// What a job is: its models, data, owner and labels, the keys that its user set, and its pipeline.

import {badge, el} from "./dom.js";

const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
// A longer value is cut; the configuration at the end of the page shows it in full.
const MOST_CHARACTERS = 80;

/** The section below the title of a job's page. */
export class SummaryView {
  constructor(job) {
    this.verdict = el("p", {class: "verdict", hidden: true});
    this.pipeline = el("nav", {class: "pipeline", "aria-label": "Pipeline", tabindex: 0, hidden: true});
    this.element = el("section", {class: "summary"}, identity(job), keys(job), this.verdict, this.pipeline);
    this.show(job);
  }

  /** Updates what changes while a job runs: its verdict, and the states in its pipeline. */
  show({id, verdict, pipeline}) {
    this.verdict.textContent = verdict;
    this.verdict.hidden = !verdict;
    this.pipeline.hidden = !pipeline.length;
    this.isLive = pipeline.some((job) => job.id !== id && !ENDED.includes(job.state));
    this.pipeline.replaceChildren(...stagesOf(pipeline).map((stage) =>
      el("ol", {}, stage.map((job) => el("li", {}, member(job, job.id === id))))));
  }
}

function identity({kind, summary, owner, labels}) {
  const {student, teacher, data} = summary ?? {};
  return el("p", {class: "identity"},
    el("b", {}, kind.replace("_", "-")), " ",
    student ? el("code", {}, student) : null,
    teacher ? [student ? " <- " : "", el("code", {}, teacher)] : null,
    data ? [" on ", el("code", {}, data)] : null,
    owner ? [", by ", filter(owner, owner)] : null,
    Object.entries(labels).map(([name, text]) => [" ", labelLink(name, text)]));
}

function keys({summary}) {
  if (!summary?.changed_keys.length) return null;
  return el("p", {class: "keys hint"}, "set by you:", summary.changed_keys.map(([key, value]) => {
    const text = JSON.stringify(value);
    const shown = text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)} ...` : text;
    return [" ", el("code", {title: text}, `${key} = ${shown}`)];
  }));
}

/** Creates a link to the jobs with a label, or to the results of a sweep. */
function labelLink(name, text) {
  return filter(`${name}=${text}`, `${name}=${text}`, name === "sweep" ? "table" : "");
}

function filter(words, text, page = "") {
  return el("a", {class: "label", href: `#/${page}?${new URLSearchParams({search: words})}`}, text);
}

/** Returns the jobs of a pipeline in stages: a job is in the stage after the last job before it. */
export function stagesOf(pipeline) {
  const depths = new Map();
  for (const {id, before} of pipeline) {
    depths.set(id, Math.max(0, ...before.map((other) => (depths.get(other) ?? -1) + 1)));
  }
  const stages = [];
  for (const job of pipeline) (stages[depths.get(job.id)] ??= []).push(job);
  return stages.filter(Boolean);
}

function member({id, name, kind, state}, current) {
  return el("a", {href: `#/jobs/${encodeURIComponent(id)}`, title: name, "aria-current": current ? "page" : null},
    badge(state), el("span", {}, name), el("small", {}, kind.replace("_", "-")));
}
