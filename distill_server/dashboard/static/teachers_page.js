// The page of the teachers of running jobs: load and cache, updated every three seconds.

import {el} from "./dom.js";
import {number, percent} from "./figures.js";
import {Fault, get, repeat} from "./server.js";

const SECONDS = 3;

/** Shows the teachers in `root`; returns the function that closes the page. */
export function openTeachers(root) {
  const cards = el("div", {class: "cards"});
  const before = new Map();
  root.append(el("h1", {}, "Teachers"),
    el("p", {class: "hint"}, "The teachers of running jobs and their current load."), cards);
  return repeat(SECONDS, async () => {
    try {
      const {teachers} = await get("api/teachers");
      cards.replaceChildren(...(teachers.length
        ? teachers.map((teacher) => card(teacher, rate(teacher, before)))
        : [el("p", {class: "notice"}, "No running job has a teacher.")]));
    } catch (error) {
      if (error instanceof Fault) {
        cards.replaceChildren(el("p", {class: "notice", role: "alert"}, error.sentence));
      }
    }
  });
}

/** Returns the scored tokens per second since the last update; undefined on the first one. */
function rate(teacher, before) {
  if (!teacher.load) return undefined;
  const earlier = before.get(teacher.address);
  const now = {at: teacher.at, tokens: teacher.load.scored_tokens};
  if (earlier?.at === now.at) return earlier.rate;
  const seconds = now.at - (earlier?.at ?? now.at);
  now.rate = seconds > 0 ? Math.max(0, now.tokens - earlier.tokens) / seconds : undefined;
  before.set(teacher.address, now);
  return now.rate;
}

function card(teacher, tokensPerSecond) {
  const {address, jobs, info, load, fault} = teacher;
  const links = jobs.map((id) => el("a", {href: `#/jobs/${encodeURIComponent(id)}`}, id));
  const head = el("div", {class: "card-head"},
    el("h2", {}, address),
    el("span", {class: `badge ${fault ? "failed" : "running"}`}, fault ? "no answer" : "answers"));
  const served = el("p", {class: "served"}, `serves ${jobs.length} `, jobs.length > 1 ? "jobs " : "job ",
    links.slice(0, 5).flatMap((link, index) => (index ? [", ", link] : [link])),
    links.length > 5 ? ", ..." : null);
  if (fault) return el("article", {class: "card"}, head, el("p", {}, fault.message), served);
  return el("article", {class: "card"}, head,
    el("p", {class: "hint"}, `${info.model}, ${info.engine}, ${info.dtype}`,
      info.version ? `, version ${info.version}` : null),
    facts([
      ["tokens/s", number(tokensPerSecond)],
      ["tokens waiting", number(load.queued_tokens)],
      ["tokens scored", number(load.scored_tokens)],
      ["streams", number(load.active_streams)],
      ["batches", number(load.forwards)],
      ["cancelled", number(load.cancelled)],
    ]),
    ...Object.entries(load.cache_tiers).map(tier), served);
}

/** Creates a list of names and values from pairs `[name, value]`. */
export function facts(pairs) {
  return el("dl", {class: "facts"}, pairs.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function tier([name, [hits, misses]]) {
  const asked = hits + misses;
  const share = asked ? hits / asked : NaN;
  return el("div", {class: "tier"},
    el("span", {}, `cache: ${name}`),
    el("progress", {max: 1, value: asked ? share : 0, "aria-label": `hits of ${name}`}),
    el("span", {}, `${percent(share)} of ${number(asked)}`));
}
