// The cancel and resume buttons and their dialogs, for users whose token has role submit.

import {ask} from "./dialog.js";
import {el} from "./dom.js";
import {Fault, post} from "./server.js";

const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];

/** The buttons of one job. */
export class Actions {
  /** `learn` is called with the job's record after a cancel or resume. */
  constructor(learn) {
    this.learn = learn;
    this.fault = el("p", {class: "fault", role: "alert", hidden: true});
    this.buttons = el("div", {class: "buttons"});
    this.dialog = el("dialog", {});
    this.element = el("div", {class: "actions"}, this.buttons, this.fault, this.dialog);
  }

  /** Shows the button that the job's state allows. */
  offer(job) {
    this.job = job;
    this.fault.hidden = true;
    const ended = ENDED.includes(job.state);
    this.buttons.replaceChildren(ended
      ? el("button", {type: "button", click: () => this.askResume()}, "Resume ...")
      : el("button", {type: "button", class: "danger", click: () => this.askCancel()}, "Cancel ..."));
  }

  askCancel() {
    const running = this.job.state !== "QUEUED";
    ask(this.dialog, `Cancel ${this.job.id}?`, [
      el("p", {}, running
        ? "The job first saves a checkpoint, so that it can be resumed from its current step."
        : "The job has not started yet."),
    ], [
      ["Cancel the job", "strong danger", () => this.send("cancel", {now: false})],
      running ? ["Cancel without a checkpoint", "danger",
        () => this.send("cancel", {now: true})] : null,
      ["Close", "", () => {}],
    ]);
  }

  askResume() {
    const done = this.job.state === "SUCCEEDED";
    const field = (id, hint) => el("input", {id, type: "number", min: 1, placeholder: hint});
    const steps = field("resume-steps", done ? `more than ${this.job.max_steps}` : "as before");
    const from = field("resume-from", "newest");
    ask(this.dialog, `Resume ${this.job.id}?`, [
      el("label", {for: steps.id}, "Train to step"), steps,
      el("label", {for: from.id}, "Start from the checkpoint of step"), from,
    ], [
      ["Resume the job", "strong", () => this.send("resume",
        {max_steps: Number(steps.value) || 0, from_step: Number(from.value) || 0})],
      ["Close", "", () => {}],
    ]);
  }

  async send(wish, values) {
    this.fault.hidden = true;
    try {
      this.learn(await post(`api/jobs/${encodeURIComponent(this.job.id)}/${wish}`, values));
    } catch (error) {
      this.fault.textContent = error instanceof Fault ? error.sentence : "the server does not answer";
      this.fault.hidden = false;
    }
  }
}
