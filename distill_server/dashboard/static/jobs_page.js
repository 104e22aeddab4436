// The list of jobs, newest first, with pages, a filter by state and a search; updated live.

import {badge, bar, el, setText} from "./dom.js";
import {ago, duration, klOf, moment, number, percent, waitOf} from "./figures.js";
import {follow} from "./server.js";

// The delay after the last keystroke before a search starts.
const MS_BEFORE_SEARCH = 250;
// Redraw regularly, because texts such as "3m ago" change without any event.
const MS_BETWEEN_DRAWINGS = 10000;
const STATES = ["RUNNING", "QUEUED", "PREPARING", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"];
const COLUMNS = ["Job", "State", "Progress", "Loss", "KL", "Tokens/s", "Wait", "ETA", "Submitted"];

/** Shows the list of jobs in `root`; returns the function that closes the page. */
export function openJobs(root) {
  const page = new JobsPage(root);
  page.look();
  const clock = setInterval(() => page.answer && page.draw(page.answer), MS_BETWEEN_DRAWINGS);
  return () => {
    clearInterval(clock);
    page.close();
  };
}

class JobsPage {
  constructor(root) {
    this.state = "";
    this.close = () => {};
    // The `before` ids of this page and all newer pages, for the button "Newer".
    this.cursors = [""];
    this.filters = el("div", {class: "filters", role: "group", "aria-label": "Jobs by state"});
    this.body = el("tbody");
    this.table = el("table", {class: "jobs"},
      el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", {scope: "col"}, name)))),
      this.body);
    this.note = el("p", {class: "notice", hidden: true});
    this.newer = el("button", {type: "button", click: () => this.turn(-1)}, "Newer");
    this.older = el("button", {type: "button", click: () => this.turn(1)}, "Older");
    this.place = el("span", {role: "status"});
    this.search = el("input", {
      type: "search", placeholder: "id, name, state", "aria-label": "Search jobs", maxlength: 100,
      spellcheck: "false", autocomplete: "off", input: () => this.searchSoon(),
    });
    root.append(
      el("div", {class: "title"}, el("h1", {}, "Jobs"), this.search),
      this.filters, this.note, this.table,
      el("div", {class: "pager"}, this.newer, this.place, this.older));
  }

  look() {
    this.close();
    const asked = new URLSearchParams({
      state: this.state, before: this.cursors.at(-1), search: this.search.value,
    });
    this.close = follow(`api/events?${asked}`, {
      page: (answer) => this.draw(answer),
      fault: (error) => this.tell(error.sentence),
    });
  }

  searchSoon() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => {
      this.cursors = [""];
      this.look();
    }, MS_BEFORE_SEARCH);
  }

  turn(by) {
    if (by > 0 && this.last) this.cursors.push(this.last);
    else if (by < 0 && this.cursors.length > 1) this.cursors.pop();
    this.look();
  }

  choose(state) {
    this.state = state;
    this.cursors = [""];
    this.look();
  }

  draw(answer) {
    const {jobs, counts, page} = answer;
    this.answer = answer;
    this.drawFilters(counts);
    this.drawRows(jobs);
    this.last = jobs.at(-1)?.id;
    const total = this.state ? counts[this.state] : sum(Object.values(counts));
    const first = (this.cursors.length - 1) * page;
    this.newer.disabled = this.cursors.length === 1;
    this.older.disabled = jobs.length < page;
    setText(this.place, jobs.length ? `${first + 1}-${first + jobs.length} of ${total}` : "");
    this.tell(jobs.length ? "" : this.emptyNote());
  }

  drawFilters(counts) {
    const focused = document.activeElement?.dataset?.state;
    const shown = STATES.filter((state) => counts[state] || state === this.state);
    const make = (state, label, count) =>
      el("button", {
        type: "button",
        "data-state": state,
        "aria-pressed": String(state === this.state),
        click: () => this.choose(state),
      }, `${label} `, el("b", {}, String(count)));
    this.filters.replaceChildren(
      make("", "all", sum(Object.values(counts))),
      ...shown.map((state) => make(state, state.toLowerCase(), counts[state])));
    if (focused === undefined) return;
    this.filters.querySelector(`[data-state="${focused}"]`)?.focus();
  }

  drawRows(jobs) {
    const focused = document.activeElement?.closest?.("tr")?.dataset.job;
    this.body.replaceChildren(...jobs.map(row));
    if (focused) this.body.querySelector(`[data-job="${CSS.escape(focused)}"] a`)?.focus();
  }

  emptyNote() {
    if (this.search.value.trim()) return "No job has all of these words in its id, name or state.";
    return this.state ? `No job is ${this.state.toLowerCase()}.`
      : "No jobs yet. To submit one: distill submit job.toml";
  }

  tell(sentence) {
    setText(this.note, sentence);
    this.note.hidden = !sentence;
    this.table.hidden = Boolean(sentence);
  }
}

function row(job) {
  const {metrics} = job;
  const running = job.state === "RUNNING";
  const steps = job.max_steps ? `${job.step} / ${job.max_steps}` : String(job.step);
  const cells = [
    [el("a", {href: `#/jobs/${encodeURIComponent(job.id)}`}, job.name), el("small", {}, job.id)],
    [badge(job.state), el("small", {}, job.reason || job.phase)],
    [bar(job.step, job.max_steps || 1, `progress of ${job.id}`), el("small", {}, steps)],
    [number(metrics.loss)],
    [number(klOf(metrics))],
    [number(metrics.tokens_per_sec)],
    [percent(waitOf(metrics))],
    [running ? duration(job.seconds_left) : "-"],
    [el("span", {title: moment(job.created_at)}, ago(job.created_at))],
  ];
  return el("tr", {"data-job": job.id, class: job.state.toLowerCase()}, cells.map((cell, index) =>
    el("td", {"data-label": COLUMNS[index], class: cell[0] === "-" ? "none" : null}, cell)));
}

function sum(counts) {
  return counts.reduce((total, count) => total + count, 0);
}
