// The log of an attempt, which is followed while the section is open and the tab is visible.

import {el} from "./dom.js";
import {Find} from "./find.js";
import {follow} from "./server.js";

// Older text is removed from the page; `distill logs` shows the whole log.
const MOST_CHARACTERS = 400000;

/** The section with a log and the choice of the attempt. */
export class LogView {
  constructor(path) {
    this.path = path;
    this.attempt = 0;
    this.end = () => {};
    this.node = document.createTextNode("");
    this.text = el("pre", {class: "log", role: "region", tabindex: 0, "aria-label": "Log"}, this.node);
    this.find = new Find(this.node, this.text);
    this.attempts = el("select", {"aria-label": "Attempt", hidden: true,
      change: () => this.start(Number(this.attempts.value))});
    this.element = el("details", {toggle: () => this.toggle()},
      el("summary", {}, "Log"), el("div", {class: "log-bar"}, this.attempts, this.find.element), this.text);
  }

  /** Switches to the job's newest attempt. */
  follow(attempt) {
    if (attempt === this.newest) return;
    this.newest = attempt;
    const numbers = Array.from({length: attempt}, (_, index) => attempt - index);
    this.attempts.replaceChildren(
      ...numbers.map((number) => el("option", {value: number}, `attempt ${number}`)));
    this.attempts.hidden = attempt < 2;
    if (this.element.open) this.start(attempt);
  }

  toggle() {
    if (this.element.open) this.start(Number(this.attempts.value));
    else this.end();
  }

  start(attempt) {
    this.end();
    this.attempts.value = String(attempt);
    this.node.data = "";
    this.end = follow(`${this.path}/log?attempt=${attempt}`, {
      text: (piece) => this.add(piece),
      fault: (error) => this.add(`(${error.sentence})\n`),
    });
  }

  add(piece) {
    const {node, text} = this;
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 20;
    node.appendData(piece);
    if (node.length > MOST_CHARACTERS) node.data = node.data.slice(-MOST_CHARACTERS / 2);
    if (atEnd) text.scrollTop = text.scrollHeight;
    this.find.refresh();
  }

  close() {
    this.end();
  }
}
