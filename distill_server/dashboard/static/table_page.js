// The results of several jobs, such as those of a sweep: the labels that differ against the evaluations.

import {MOST_COMPARED} from "./compare_page.js";
import {badge, el, scrollRegion} from "./dom.js";
import {number} from "./figures.js";
import {parallelChart} from "./parallel_chart.js";
import {Fault, get, repeat} from "./server.js";

const SECONDS = 5;

/** Shows in `root` the jobs that the parameters `search` and `state` of the address select. */
export function openTable(root) {
  const asked = new URLSearchParams(location.hash.split("?")[1] ?? "");
  const search = asked.get("search") ?? "";
  const title = search.startsWith("sweep=") ? `Sweep ${search.slice("sweep=".length)}` : search || "All jobs";
  document.title = `${title} - distill`;
  const body = el("div");
  root.append(
    el("p", {class: "crumbs"}, el("a", {href: `#/?${asked}`}, "Jobs"), " / results"),
    el("h1", {}, title), body);
  return repeat(SECONDS, async () => {
    try {
      show(body, await get(`api/table?${asked}`));
    } catch (error) {
      if (error instanceof Fault) body.replaceChildren(el("p", {class: "notice", role: "alert"}, error.sentence));
    }
  });
}

function show(body, results) {
  const {metric, labels, rows} = results;
  const fresh = JSON.stringify(rows);
  if (body.dataset.shown === fresh) return;
  body.dataset.shown = fresh;
  const columns = ["Job", metric ? `best ${metric}` : "no evaluation yet", ...labels, "last", "State", "Steps"];
  const isUnique = new Set(rows.map(({name}) => name)).size === rows.length;
  const ids = rows.slice(0, MOST_COMPARED).map(({id}) => encodeURIComponent(id)).join();
  const winner = rows.find((job) => job.is_best);
  body.replaceChildren(
    el("p", {class: "hint"}, `${rows.length} jobs, the best first`, metric ? ` by ${metric}` : null,
      winner ? [": ", el("b", {}, winner.name)] : null, ". ",
      rows.length > 1 ? el("a", {href: `#/compare/${ids}`}, "Compare the curves") : null),
    ...[parallelChart(results, body.clientWidth)].filter(Boolean),
    scrollRegion("Results", "results",
      el("table", {class: "plain"},
        el("thead", {}, el("tr", {}, columns.map((name) => el("th", {scope: "col"}, name)))),
        el("tbody", {}, rows.map((job) => row(job, labels, isUnique))))));
}

function row(job, labels, isUnique) {
  const {id, name, state, step, max_steps: steps, last, best, is_best: isBest} = job;
  return el("tr", {class: isBest ? "best" : null},
    el("th", {scope: "row"}, el("a", {href: `#/jobs/${encodeURIComponent(id)}`, title: isUnique ? id : name},
      isUnique ? name : id)),
    el("td", {}, isBest ? el("b", {}, "best: ") : null, measured(best)),
    labels.map((label) => el("td", {}, job.labels[label] ?? "-")),
    el("td", {}, measured(last)), el("td", {}, badge(state)), el("td", {}, `${step} / ${steps || "?"}`));
}

function measured(value) {
  if (!value) return "-";
  const error = value.stderr === null ? "" : ` \u00b1 ${number(value.stderr, 1)}`;
  return `${number(value.value)}${error} at step ${value.step}`;
}
