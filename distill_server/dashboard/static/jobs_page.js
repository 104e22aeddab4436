// The list of jobs, newest first, with pages, a filter by state and a search; updated live.

import {badge, bar, el, setText} from "./dom.js";
import {MOST_COMPARED} from "./compare_page.js";
import {ago, duration, klWithKind, moment, number, percent, waitOf, whyQueued} from "./figures.js";
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
    // The ids to compare; they stay selected on other pages of the list.
    this.chosen = new Set();
    this.rows = new Map();
    this.compare = el("button", {type: "button", hidden: true, click: () => this.openCompare()});
    this.capacity = el("p", {class: "capacity hint", role: "status"});
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
      type: "search", placeholder: "id, name, owner", "aria-label": "Search jobs", maxlength: 100,
      spellcheck: "false", autocomplete: "off", input: () => this.searchSoon(),
    });
    root.append(
      el("div", {class: "title"}, el("h1", {}, "Jobs"), this.compare, this.search),
      this.capacity, this.filters, this.note, this.table,
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
    const {jobs, counts, page, capacity} = answer;
    this.answer = answer;
    setText(this.capacity, capacityText(capacity));
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
    const before = [...this.rows.keys()].join();
    const kept = this.rows;
    this.rows = new Map(jobs.map((job) => [job.id, kept.get(job.id) ?? this.newRow(job)]));
    for (const job of jobs) fillRow(this.rows.get(job.id), job);
    if ([...this.rows.keys()].join() === before) return;
    // A row that is moved loses the focus.
    const focused = document.activeElement;
    this.body.replaceChildren(...this.rows.values());
    if (this.body.contains(focused)) focused.focus();
  }

  /** Creates a row with its first cell, which is never replaced: a click takes a moment. */
  newRow(job) {
    const box = el("input", {type: "checkbox", "aria-label": `Compare ${job.name}`, value: job.id,
      change: () => this.select(job.id, box.checked)});
    box.checked = this.chosen.has(job.id);
    const link = el("a", {href: `#/jobs/${encodeURIComponent(job.id)}`}, job.name);
    return el("tr", {"data-job": job.id},
      el("td", {"data-label": COLUMNS[0]},
        el("div", {class: "pick"}, box, el("div", {}, link,
          el("small", {}, job.owner ? `${job.id}, ${job.owner}` : job.id)))));
  }

  /** Selects a job for the comparison, of at most four. */
  select(id, chosen) {
    if (chosen) this.chosen.add(id);
    else this.chosen.delete(id);
    const count = this.chosen.size;
    this.compare.hidden = !count;
    this.compare.disabled = count < 2 || count > MOST_COMPARED;
    setText(this.compare, count < 2 ? "Select another job to compare"
      : this.compare.disabled ? `Compare at most ${MOST_COMPARED} jobs` : `Compare ${count} jobs`);
  }

  openCompare() {
    location.hash = `#/compare/${[...this.chosen].map(encodeURIComponent).join()}`;
  }

  emptyNote() {
    if (this.search.value.trim()) return "No job has all of these words in its id, name, owner, labels or state.";
    return this.state ? `No job is ${this.state.toLowerCase()}.`
      : "No jobs yet. To submit one: distill submit job.toml";
  }

  tell(sentence) {
    setText(this.note, sentence);
    this.note.hidden = !sentence;
    this.table.hidden = Boolean(sentence);
  }
}

/** Replaces all cells of a row but the first. */
function fillRow(row, job) {
  const {metrics} = job;
  const running = job.state === "RUNNING";
  const [kl, kind] = klWithKind(metrics);
  const steps = job.max_steps ? `${job.step} / ${job.max_steps}` : String(job.step);
  const cells = [
    [badge(job.state), ...stateTexts(job).map((text) => el("small", {}, text))],
    [bar(job.step, job.max_steps || 1, `progress of ${job.id}`), el("small", {}, steps)],
    [number(metrics.loss)],
    [number(kl), kind && el("small", {}, kind)].filter(Boolean),
    [number(metrics.tokens_per_sec)],
    [percent(waitOf(metrics))],
    [running ? duration(job.seconds_left) : "-"],
    [el("span", {title: moment(job.created_at)}, ago(job.created_at))],
  ];
  row.className = job.state.toLowerCase();
  while (row.children.length > 1) row.lastChild.remove();
  row.append(...cells.map((cell, index) =>
    el("td", {"data-label": COLUMNS[index + 1], class: cell[0] === "-" ? "none" : null}, cell)));
}

function stateTexts(job) {
  if (job.state !== "QUEUED") return [job.reason || job.phase];
  return [whyQueued(job), job.reason && `after: ${job.reason}`].filter(Boolean);
}

function capacityText({slots, cpus, gpus, queued}) {
  const parts = [["slots", slots], ["GPUs", gpus], ["CPU threads", cpus]].filter(([, counts]) => counts)
    .map(([name, [used, all]]) => `${used} of ${all} ${name}`);
  return `In use: ${parts.join(", ")}. In the queue: ${queued} ${queued === 1 ? "job" : "jobs"}.`;
}

function sum(counts) {
  return counts.reduce((total, count) => total + count, 0);
}
