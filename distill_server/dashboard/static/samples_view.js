// The transcripts of a step with all fields that the trainer wrote.

import {el} from "./dom.js";
import {Fault, get} from "./server.js";

/** The section with transcripts and the choice of the step. */
export class SamplesView {
  constructor(path) {
    this.path = path;
    this.chosen = 0;
    this.steps = el("select", {"aria-label": "Step", change: () => this.show(Number(this.steps.value))});
    this.list = el("div", {class: "samples"});
    this.element = el("details", {toggle: () => this.refresh()},
      el("summary", {}, "Samples"), this.steps, this.list);
  }

  /** Loads the newest transcripts if the section is open. Keeps an older step that was chosen. */
  async refresh() {
    if (!this.element.open) return;
    try {
      const {steps} = await get(`${this.path}/samples`);
      const newest = Number(this.steps.options[0]?.value ?? 0);
      this.steps.hidden = !steps.length;
      if (!steps.length) this.list.replaceChildren(el("p", {class: "hint"}, "No samples yet."));
      if (!steps.length || steps[0] === newest) return;
      const stay = this.chosen && this.chosen !== newest;
      this.steps.replaceChildren(...steps.map((step) => el("option", {value: step}, `step ${step}`)));
      this.steps.value = String(stay ? this.chosen : steps[0]);
      if (!stay) await this.show(steps[0]);
    } catch (error) {
      this.fail(error);
    }
  }

  async show(step) {
    this.chosen = step;
    try {
      const {samples} = await get(`${this.path}/samples/${step}`);
      if (step === this.chosen) this.list.replaceChildren(...samples.map(card));
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
    this.list.replaceChildren(el("p", {class: "notice", role: "alert"}, sentence));
  }
}

// A longer text is scrolled, also with the keyboard.
const LONG = 400;

/** A transcript; each text is isolated from the writing direction of its neighbours. */
function card(sample) {
  return el("article", {class: "card"}, el("dl", {}, Object.entries(sample).flatMap(([name, value]) => {
    const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
    return [el("dt", {}, el("bdi", {}, name)), el("dd", {dir: "auto", tabindex: text.length > LONG ? 0 : null}, text)];
  })));
}
