// The checkpoints of a job with their sizes.

import {el} from "./dom.js";
import {ago, bytes, moment} from "./figures.js";
import {Fault, get} from "./server.js";

/** The section with the checkpoints. */
export class CheckpointsView {
  constructor(path) {
    this.path = path;
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
      this.list.replaceChildren(...(checkpoints.length ? [total(checkpoints), table(checkpoints)]
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
  return el("table", {class: "plain"},
    el("thead", {}, el("tr", {}, ["Step", "Size", "Saved"].map((name) => el("th", {scope: "col"}, name)))),
    el("tbody", {}, checkpoints.map(({step, bytes: size, saved_at: time}) => el("tr", {},
      el("th", {scope: "row"}, String(step)), el("td", {}, bytes(size)),
      el("td", {title: moment(time)}, ago(time))))));
}
