// The attempts of a job on a time line: when each was queued and ran, and how it ended.

import {badge, el, svg} from "./dom.js";
import {duration, moment} from "./figures.js";
import {get} from "./server.js";

// The length of the time line, in its own unit.
const LENGTH = 1000;

/** The section with the time line. */
export class AttemptsView {
  constructor(path) {
    this.path = path;
    this.list = el("ol", {class: "attempts"});
    this.element = el("section", {class: "card"}, el("h2", {}, "Attempts"), this.list);
  }

  /** Shows the newest step of a job; the page already shows the reason of its end. */
  follow({step, reason}) {
    if (this.step === step && this.reason === reason) return;
    Object.assign(this, {step, reason});
    this.show();
  }

  /** Reads the attempts again. */
  async refresh() {
    const {attempts} = await get(`${this.path}/attempts`).catch(() => ({attempts: null}));
    if (attempts) this.attempts = attempts;
    this.show();
  }

  /** Draws the time line up to now. */
  show() {
    if (!this.attempts?.length) return;
    const now = Date.now() / 1000;
    const low = this.attempts[0].queued_at;
    const high = Math.max(low + 1, ...this.attempts.map(({ended_at: ended}) => ended || now));
    const place = (time) => (LENGTH * (time - low)) / (high - low);
    // The newest attempt is what users look for.
    const rows = this.attempts.map((attempt, index) => {
      const newest = index === this.attempts.length - 1;
      const reason = newest && attempt.reason === this.reason ? "" : attempt.reason;
      return row({...attempt, reason, step: newest ? this.step : attempt.step}, place, now);
    });
    this.list.replaceChildren(...rows.reverse());
  }
}

function row(attempt, place, now) {
  const {queued_at: queued, started_at: started, ended_at: ended, end, reason, step} = attempt;
  const over = ended || now;
  const waited = duration((started || over) - queued);
  const ran = started ? `waited ${waited}, ran ${duration(over - started)} to step ${step}`
    : `waited ${waited}${end ? ", did not start" : ""}`;
  return el("li", {},
    el("p", {}, el("b", {}, `attempt ${attempt.attempt}`), " ",
      badge(end || (started ? "RUNNING" : "QUEUED")), " ",
      el("span", {class: "hint", title: `queued ${moment(queued)}`}, ran)),
    svg("svg", {class: `span ${end.toLowerCase()}`, viewBox: `0 0 ${LENGTH} 10`, height: 10,
      preserveAspectRatio: "none", "aria-hidden": "true"},
    part("waited", place(queued), place(started || over)),
    started ? part("ran", place(started), place(over)) : null),
    reason ? el("p", {class: "hint"}, reason) : null);
}

function part(kind, from, to) {
  // Even a second of a long job is to be seen.
  return svg("rect", {class: kind, x: Math.min(from, LENGTH - 3), y: 0, width: Math.max(3, to - from), height: 10});
}
