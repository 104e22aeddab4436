// The list of jobs with pages, an order, filters and a search, which are in the page's address; updated live.

import {el, setText} from "./dom.js";
import {COLUMNS, fillRow} from "./job_row.js";
import {Selection} from "./selection.js";
import {follow} from "./server.js";

// The delay after the last keystroke before a search starts.
const MS_BEFORE_SEARCH = 250;
// Redraw regularly, because texts such as "3m ago" change without any event.
const MS_BETWEEN_DRAWINGS = 10000;
const STATES = ["RUNNING", "QUEUED", "PREPARING", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"];
const MOST_FACETS = 10;
// The characters of a long name that are always shown.
const TAIL = 16;

/** Shows the list of jobs in `root`; returns the function that closes the page. */
export function openJobs(root, access) {
  const page = new JobsPage(root, access);
  page.look();
  const clock = setInterval(() => page.answer && page.draw(page.answer), MS_BETWEEN_DRAWINGS);
  return () => {
    clearInterval(clock);
    page.close();
  };
}

class JobsPage {
  constructor(root, access) {
    const asked = new URLSearchParams(location.hash.split("?")[1] ?? "");
    this.state = asked.get("state") ?? "";
    this.sort = asked.get("sort") ?? "-submitted";
    this.offset = Number(asked.get("offset")) || 0;
    this.close = () => {};
    // The jobs stay selected on other pages of the list.
    const chosen = (asked.get("chosen") ?? "").split(",").filter(Boolean);
    this.selection = new Selection(chosen, access.may_act, () => this.showSelected());
    this.rows = new Map();
    this.results = el("a", {class: "results-link"}, "Table of results");
    this.capacity = el("span", {role: "status"});
    this.all = el("input", {type: "checkbox", "aria-label": "Select all jobs of this page",
      change: () => this.selection.set([...this.rows.keys()], this.all.checked)});
    this.filters = el("div", {class: "filters", role: "group", "aria-label": "Jobs by state"});
    this.facets = el("div", {class: "filters facets", role: "group", "aria-label": "Jobs by owner and label"});
    this.body = el("tbody");
    this.head = el("tr");
    this.table = el("table", {class: "jobs"}, el("thead", {}, this.head), this.body);
    this.note = el("p", {class: "notice", hidden: true});
    this.newer = el("button", {type: "button", click: () => this.turn(-1)}, "Previous");
    this.older = el("button", {type: "button", click: () => this.turn(1)}, "Next");
    this.place = el("span", {role: "status"});
    this.search = el("input", {
      type: "search", placeholder: "id, name, owner, label=value", "aria-label": "Search jobs", maxlength: 100,
      spellcheck: "false", autocomplete: "off", input: () => this.searchSoon(),
    });
    this.search.value = asked.get("search") ?? "";
    root.append(
      el("div", {class: "title"}, el("h1", {}, "Jobs"), this.results, this.search),
      el("p", {class: "hint capacity"}, this.capacity, " ", el("a", {href: "#/machine"}, "Who uses it?")),
      this.filters, this.facets, this.selection.element, this.note, this.table,
      el("div", {class: "pager"}, this.newer, this.place, this.older));
    this.drawHead();
  }

  /** Returns what the address and the request have in common: the filters and the order. */
  asked() {
    return {state: this.state, search: this.search.value.trim(), offset: this.offset || "",
      sort: this.sort === "-submitted" ? "" : this.sort};
  }

  /** Changes the address without a new page, so that it can be shared, and Back returns to it. */
  writeAddress() {
    const values = {...this.asked(), chosen: [...this.selection.ids].join()};
    const filled = Object.entries(values).filter(([, value]) => value);
    history.replaceState(null, "", filled.length ? `#/?${new URLSearchParams(filled)}` : "#/");
  }

  look() {
    this.close();
    this.writeAddress();
    this.results.href = `#/table?${new URLSearchParams({search: this.search.value.trim(), state: this.state})}`;
    document.title = `${this.state.toLowerCase()} jobs - distill`.trim();
    this.close = follow(`api/events?${new URLSearchParams(this.asked())}`, {
      page: (answer) => this.draw(answer),
      fault: (error) => this.tell(error.sentence),
    });
  }

  searchSoon() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.narrow({}), MS_BEFORE_SEARCH);
  }

  turn(by) {
    this.offset = Math.max(0, this.offset + by * this.answer.page);
    this.look();
  }

  /** Shows the first page of the jobs with another filter or in another order. */
  narrow(change) {
    Object.assign(this, {...change, offset: 0});
    this.drawHead();
    this.look();
  }

  drawHead() {
    const focused = document.activeElement?.dataset?.sort;
    this.head.replaceChildren(...COLUMNS.map(([name, key, title]) => {
      const current = key && this.sort.replace("-", "") === key.replace("-", "");
      const turned = this.sort.startsWith("-") ? this.sort.slice(1) : `-${this.sort}`;
      const order = this.sort.startsWith("-") ? "descending" : "ascending";
      return el("th", {scope: "col", title, "aria-sort": current ? order : null},
        el("div", {class: "pick"}, key === "name" ? this.all : null,
          key ? el("button", {type: "button", class: "quiet", "data-sort": key,
            click: () => this.narrow({sort: current ? turned : key})}, name) : name));
    }));
    if (focused) this.head.querySelector(`[data-sort="${focused}"]`)?.focus();
  }

  draw(answer) {
    const {jobs, counts, page, capacity} = answer;
    this.answer = answer;
    setText(this.capacity, capacityText(capacity));
    this.drawFilters(counts);
    this.drawRows(jobs);
    this.drawFacets(jobs);
    const total = this.state ? counts[this.state] : sum(Object.values(counts));
    this.newer.disabled = !this.offset;
    this.older.disabled = this.offset + jobs.length >= total;
    setText(this.place, jobs.length ? `${this.offset + 1}-${this.offset + jobs.length} of ${total}` : "");
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
        click: () => this.narrow({state}),
      }, `${label} `, el("b", {}, String(count)));
    this.filters.replaceChildren(
      make("", "all", sum(Object.values(counts))),
      ...shown.map((state) => make(state, state.toLowerCase(), counts[state])));
    if (focused === undefined) return;
    this.filters.querySelector(`[data-state="${focused}"]`)?.focus();
  }

  /** Offers the owners and labels of the shown jobs, most frequent first, as words of the search. */
  drawFacets(jobs) {
    const counts = new Map();
    for (const {owner, labels} of jobs) {
      const pairs = Object.entries(labels).map(([name, text]) => `${name}=${text}`);
      for (const word of [owner, ...pairs].filter((text) => text && !text.includes(" "))) {
        counts.set(word, (counts.get(word) ?? 0) + 1);
      }
    }
    const words = this.search.value.split(" ").filter(Boolean);
    const offered = [...counts].sort(([, one], [, other]) => other - one).slice(0, MOST_FACETS);
    const shown = JSON.stringify([words, offered]);
    if (shown === this.offered) return;
    this.offered = shown;
    this.facets.replaceChildren(...offered.map(([word, count]) => {
      const pressed = words.includes(word);
      return el("button", {type: "button", "aria-pressed": String(pressed), click: () => {
        this.search.value = (pressed ? words.filter((other) => other !== word) : [...words, word]).join(" ");
        this.narrow({});
      }}, `${word} `, el("b", {}, String(count)));
    }));
  }

  drawRows(jobs) {
    const before = [...this.rows.keys()].join();
    const kept = this.rows;
    this.rows = new Map(jobs.map((job) => [job.id, kept.get(job.id) ?? this.newRow(job)]));
    for (const job of jobs) fillRow(this.rows.get(job.id), job);
    this.showSelected();
    if ([...this.rows.keys()].join() === before) return;
    // A row that is moved loses the focus.
    const focused = document.activeElement;
    this.body.replaceChildren(...this.rows.values());
    if (this.body.contains(focused)) focused.focus();
  }

  /** Creates a row with its first cell, which is never replaced: a click takes a moment. */
  newRow(job) {
    const box = el("input", {type: "checkbox", "aria-label": `Select ${job.name}`, value: job.id,
      change: () => this.selection.set([job.id], box.checked)});
    const labels = Object.entries(job.labels).map(([name, text]) => `${name}=${text}`);
    const title = [job.name, job.id, job.owner, ...labels].filter(Boolean).join("\n");
    // The end of a long name tells the jobs of a sweep apart, so the middle is cut.
    const end = job.name.length > TAIL ? job.name.slice(-TAIL) : "";
    const link = el("a", {href: `#/jobs/${encodeURIComponent(job.id)}`, title},
      el("span", {}, job.name.slice(0, job.name.length - end.length)), el("span", {}, end));
    return el("tr", {"data-job": job.id}, el("td", {}, el("div", {class: "pick"}, box, link,
      el("small", {class: "pinned", title: "is not removed", hidden: true}, "pinned"))));
  }

  /** Checks the boxes of the selected jobs, and writes the address. */
  showSelected() {
    const {ids} = this.selection;
    for (const [id, row] of this.rows) row.querySelector("input").checked = ids.has(id);
    this.all.checked = this.rows.size > 0 && [...this.rows.keys()].every((id) => ids.has(id));
    this.writeAddress();
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

function capacityText({slots, cpus, gpus, queued}) {
  const parts = [["slots", slots], ["GPUs", gpus], ["CPU threads", cpus]].filter(([, counts]) => counts)
    .map(([name, [used, all]]) => `${used} of ${all} ${name}`);
  return `In use: ${parts.join(", ")}. In the queue: ${queued} ${queued === 1 ? "job" : "jobs"}.`;
}

function sum(counts) {
  return counts.reduce((total, count) => total + count, 0);
}
