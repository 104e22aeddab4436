// Held-out tokens, coloured by the log-probs of student and teacher.

import {el, markLineBreaks} from "./dom.js";
import {number} from "./figures.js";

// `limits` are the smallest values of each colour but the last: probabilities, and differences in nats.
const PROBABILITY = {
  limits: [0.9, 0.5, 0.1, 0.01],
  kind: "likely",
  labels: ["90% or more", "50% or more", "10% or more", "1% or more", "less than 1%"],
};
const CHOICES = {
  student: {title: "student's probability", value: ({student}) => Math.exp(student), ...PROBABILITY},
  teacher: {title: "teacher's probability", value: ({teacher}) => Math.exp(teacher), ...PROBABILITY},
  difference: {
    title: "student against teacher",
    value: ({student, teacher}) => student - teacher,
    limits: [2, 0.5, -0.5, -2],
    kind: "gap",
    labels: ["student higher by 2 nats", "by 0.5 nats", "about equal", "teacher higher by 0.5 nats", "by 2 nats"],
  },
};

/** The choice of the colours, and the cards of sequences. */
export class TokensView {
  constructor() {
    /** The tokens of all cards: `{element, logprobs}`. */
    this.shown = [];
    this.choice = el("select", {"aria-label": "Colour of the tokens", change: () => this.paint()},
      Object.entries(CHOICES).map(([name, {title}]) => el("option", {value: name}, title)));
    this.choice.value = "difference";
    this.legend = el("p", {class: "tokens legend"});
    this.controls = el("div", {class: "chart-view"}, el("label", {}, "colour ", this.choice), this.legend);
  }

  /** Makes the cards of records `{prompt, tokens, student, teacher}`, which replace the earlier cards;
   *  `teacher` may be missing. */
  cards(records) {
    this.shown = [];
    const cards = records.map((record) => this.card(record));
    const hasTeacher = records.every(({teacher}) => teacher);
    // Without log-probs of a teacher, only the student's colours are there.
    if (!hasTeacher) this.choice.value = "student";
    for (const name of ["teacher", "difference"]) {
      this.choice.querySelector(`[value=${name}]`).disabled = !hasTeacher;
    }
    this.paint();
    return cards;
  }

  card(record) {
    // JSON has no infinity: null is the log-prob of a token that a model excludes.
    const logprob = (values, index) => values && (values[index] ?? -Infinity);
    const tokens = record.tokens.map((text, index) => {
      const logprobs = {student: logprob(record.student, index), teacher: logprob(record.teacher, index)};
      const element = el("bdi", {class: "token", title: describe(logprobs)}, markLineBreaks(text));
      this.shown.push({element, logprobs});
      return element;
    });
    return el("article", {class: "card"},
      el("p", {class: "tokens context", dir: "auto"}, record.prompt),
      el("p", {class: "tokens", tabindex: 0}, tokens));
  }

  paint() {
    const {value, limits, kind, labels} = CHOICES[this.choice.value];
    this.legend.replaceChildren(...labels.map((label, place) => el("span", {class: `token ${kind}-${place}`}, label)));
    for (const {element, logprobs} of this.shown) {
      const place = limits.findIndex((limit) => value(logprobs) >= limit);
      element.className = `token ${kind}-${place < 0 ? limits.length : place}`;
    }
  }
}

function describe(logprobs) {
  return Object.entries(logprobs).filter(([, value]) => value !== undefined)
    .map(([name, value]) => `${name}: ${number(Math.exp(value), 3)} (log-prob ${number(value, 3)})`).join(", ");
}
