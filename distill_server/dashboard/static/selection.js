// The selected jobs of the list, and what can be done with all of them.

import {MOST_COMPARED} from "./compare_page.js";
import {ask} from "./dialog.js";
import {el, setText} from "./dom.js";
import {Fault, post} from "./server.js";

const MOST_FAULTS = 5;

/** The ids of the selected jobs, and a bar of buttons, which is hidden without a selected job. */
export class Selection {
  /** `mayAct`: whether the token allows changes. `changed` is called after a change of the ids. */
  constructor(ids, mayAct, changed) {
    this.ids = new Set(ids);
    this.changed = changed;
    this.count = el("b", {role: "status"});
    this.compare = button("Compare", "", () => this.openCompare());
    this.outcome = el("p", {class: "outcome", role: "alert", hidden: true});
    this.dialog = el("dialog", {});
    this.actions = mayAct ? [
      button("Cancel ...", "danger", () => this.askCancel()),
      button("Remove ...", "danger", () => this.askRemove()),
      button("Pin", "", () => this.send("pin", {pinned: true}, "pinned")),
      button("Unpin", "", () => this.send("pin", {pinned: false}, "unpinned")),
    ] : [];
    this.bar = el("div", {class: "selection", role: "group", "aria-label": "Selected jobs"},
      this.count, this.compare, this.actions, button("Clear", "quiet", () => this.clear()));
    this.element = el("div", {}, this.bar, this.outcome, this.dialog);
    this.show();
  }

  /** Selects jobs, or none of them. */
  set(ids, chosen) {
    for (const id of ids) {
      if (chosen) this.ids.add(id);
      else this.ids.delete(id);
    }
    this.outcome.hidden = true;
    this.show();
    this.changed();
  }

  clear() {
    this.set([...this.ids], false);
  }

  show() {
    const {size} = this.ids;
    this.bar.hidden = !size;
    setText(this.count, `${size} selected`);
    this.compare.disabled = size < 2 || size > MOST_COMPARED;
    this.compare.title = size > MOST_COMPARED ? `at most ${MOST_COMPARED} jobs` : size < 2 ? "select another job" : "";
  }

  openCompare() {
    location.hash = `#/compare/${[...this.ids].map(encodeURIComponent).join()}`;
  }

  askCancel() {
    ask(this.dialog, `Cancel ${jobs(this.ids.size)}?`, [
      el("p", {}, "Running jobs first save a checkpoint, so that they can be resumed. Jobs that have ended do not"
        + " change."),
    ], [
      ["Cancel the jobs", "strong danger", () => this.send("cancel", {now: false}, "cancelled")],
      ["Cancel without checkpoints", "danger", () => this.send("cancel", {now: true}, "cancelled")],
      ["Close", "", () => {}],
    ]);
  }

  askRemove() {
    ask(this.dialog, `Remove ${jobs(this.ids.size)}?`, [
      el("p", {}, "This deletes the jobs with their checkpoints, exports and logs, and cannot be undone. Pinned jobs,"
        + " and jobs that have not ended, are kept."),
    ], [
      [`Remove ${jobs(this.ids.size)}`, "strong danger", () => this.send("remove", {}, "removed")],
      ["Close", "", () => {}],
    ]);
  }

  /** Sends a request for each job, one after the other, and tells the errors. */
  async send(wish, values, done) {
    const faults = [];
    let count = 0;
    const ids = [...this.ids];
    for (const button of this.actions) button.disabled = true;
    for (const [index, id] of ids.entries()) {
      this.tell(`${wish} ${index + 1} of ${jobs(ids.length)} ...`, false);
      try {
        await post(`api/jobs/${encodeURIComponent(id)}/${wish}`, values);
        count += 1;
        if (wish === "remove") this.ids.delete(id);
      } catch (error) {
        faults.push(error instanceof Fault ? error.sentence : `${id}: the server does not answer`);
        if (!(error instanceof Fault) || error.status === 401 || error.status === 403) break;
      }
    }
    for (const button of this.actions) button.disabled = false;
    this.show();
    this.changed();
    const rest = faults.length > MOST_FAULTS ? [`and ${faults.length - MOST_FAULTS} more`] : [];
    const total = `${count} of ${jobs(ids.length)} ${done}`;
    this.tell([total, ...faults.slice(0, MOST_FAULTS), ...rest].join(". "), faults.length > 0);
  }

  tell(text, failed) {
    setText(this.outcome, text);
    this.outcome.classList.toggle("fault", failed);
    this.outcome.hidden = false;
  }
}

function button(label, kind, click) {
  return el("button", {type: "button", class: kind, click}, label);
}

function jobs(count) {
  return count === 1 ? "1 job" : `${count} jobs`;
}
