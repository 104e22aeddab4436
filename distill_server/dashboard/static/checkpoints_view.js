// The checkpoints of a job with their sizes and evaluations.

import {el} from "./dom.js";
import {ago, bytes, moment, number} from "./figures.js";
import {Fault, get} from "./server.js";

/** The section with the checkpoints. */
export class CheckpointsView {
  constructor(path, job) {
    this.path = path;
    this.job = job;
    /** Marks `{kind, step, text}` of the charts. */
    this.marks = [];
    this.list = el("div", {class: "checkpoints-list"});
    this.element = el("details", {class: "checkpoints", toggle: () => this.refresh()},
      el("summary", {}, "Checkpoints"), this.list);
  }

  /** Reads the checkpoints again. */
  async refresh() {
    try {
      const {checkpoints} = await get(`${this.path}/checkpoints`);
      this.marks = checkpoints.map(({step}) => ({kind: "checkpoint", step, text: `checkpoint ${step}`}));
      if (!this.element.open) return;
      this.list.replaceChildren(...(checkpoints.length
        ? [total(checkpoints), table(checkpoints), hint(this.job, checkpoints)]
        : [el("p", {class: "hint"}, "No checkpoints.")]));
    } catch (error) {
      const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
      this.list.replaceChildren(el("p", {class: "notice", role: "alert"}, sentence));
    }
  }
}

function total(checkpoints) {
  const size = checkpoints.reduce((sum, one) => sum + one.bytes, 0);
  return el("p", {class: "hint"}, `${checkpoints.length} on the disk, ${bytes(size)} together`);
}

function table(checkpoints) {
  const metric = checkpoints.find((one) => one.held_out)?.held_out.metric;
  const columns = ["Step", ...metric ? [metric] : [], "Size", "Saved"];
  return el("table", {class: "plain"},
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", {scope: "col"}, name)))),
    el("tbody", {}, checkpoints.map(({step, bytes: size, saved_at: time, held_out: result, is_best: isBest}) =>
      el("tr", {class: isBest ? "best" : null},
        el("th", {scope: "row"}, String(step)),
        metric ? el("td", {}, isBest ? el("b", {}, "best: ") : null, number(result?.value)) : null,
        el("td", {}, bytes(size)), el("td", {title: moment(time)}, ago(time))))));
}

/** Says which weights `distill pull` takes. */
function hint({id, state, step}, checkpoints) {
  const [choice, word] = checkpoints.some((one) => one.is_best) ? ["best", "best"] : ["last", "newest"];
  const rule = state === "SUCCEEDED" ? `takes the export, which has the weights of the last step, ${step}.`
    : "takes the export, which a job has when it has succeeded.";
  return el("p", {class: "hint"}, el("code", {}, `distill pull ${id}`), ` ${rule} For the ${word} checkpoint: `,
    el("code", {}, `distill pull ${id} --checkpoint ${choice}`));
}
