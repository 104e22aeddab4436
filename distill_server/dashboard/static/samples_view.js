// The records of a step: transcripts with all fields that the trainer wrote, and log-probs of tokens.

import {el} from "./dom.js";
import {Fault, get} from "./server.js";
import {TokensView} from "./tokens_view.js";

/** A section with the records of a step and the choice of the step. */
class StepsView {
  /** `path` is the address of the steps, `cardsOf` makes elements of records, `lackOf` says why there are none. */
  constructor(title, path, cardsOf, lackOf) {
    this.path = path;
    this.cardsOf = cardsOf;
    this.lackOf = lackOf;
    this.chosen = 0;
    this.steps = el("select", {"aria-label": `Step of ${title}`, change: () => this.show(Number(this.steps.value))});
    this.list = el("div", {class: "samples"});
    this.element = el("details", {toggle: () => this.refresh()},
      el("summary", {}, title), this.steps, this.list);
  }

  /** Loads the newest records if the section is open. Keeps an older step that was chosen. */
  async refresh() {
    if (!this.element.open) return;
    try {
      const {steps} = await get(this.path);
      const newest = Number(this.steps.options[0]?.value ?? -1);
      this.steps.hidden = !steps.length;
      if (!steps.length) this.list.replaceChildren(el("p", {class: "hint"}, this.lackOf()));
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
      const {samples} = await get(`${this.path}/${step}`);
      if (step === this.chosen) this.list.replaceChildren(...this.cardsOf(samples));
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
    this.list.replaceChildren(el("p", {class: "notice", role: "alert"}, sentence));
  }
}

/** The sections of a job: its transcripts, and the log-probs of held-out tokens. */
export class SamplesView {
  constructor(path, job, history) {
    const tokens = new TokensView();
    const lackOf = (records) => () => lack(records, job, history);
    const transcripts = (samples) => samples.map(transcript);
    this.sections = [new StepsView("Samples", `${path}/samples`, transcripts, lackOf("transcripts")),
      new StepsView("Tokens", `${path}/tokens`, (records) => tokens.cards(records), lackOf("tokens"))];
    this.sections[1].element.children[0].after(tokens.controls);
    this.elements = this.sections.map(({element}) => element);
  }

  refresh() {
    return Promise.all(this.sections.map((section) => section.refresh()));
  }
}

/** Says why a job has no records. */
function lack(records, {ended_at: ended}, history) {
  if (!ended) return "Nothing yet.";
  const reason = history.evaluations.length ? "its evaluations wrote none" : "it had no evaluation";
  return `This job has no ${records}: ${reason}.`;
}

// A longer text is scrolled, also with the keyboard.
const LONG = 400;

/** A transcript; each text is isolated from the writing direction of its neighbours. */
function transcript(sample) {
  return el("article", {class: "card"}, el("dl", {}, Object.entries(sample).flatMap(([name, value]) => {
    const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
    return [el("dt", {}, el("bdi", {}, name)), el("dd", {dir: "auto", tabindex: text.length > LONG ? 0 : null}, text)];
  })));
}
