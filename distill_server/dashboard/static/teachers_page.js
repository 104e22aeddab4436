// The page of the teachers: their load, caches and waiting jobs, updated every three seconds.

import {badge, el, jobLink} from "./dom.js";
import {ago, duration, gpuNames, number, percent} from "./figures.js";
import {Fault, get, repeat} from "./server.js";
import {sparkline} from "./sparkline.js";

const SECONDS = 3;
const MOST_JOBS = 5;
const MOST_RATES = 100;
// A job that waits for longer than this share of its steps has a teacher that is too slow.
const LONG_WAIT = 0.3;

/** Shows the teachers in `root`; returns the function that closes the page. */
export function openTeachers(root) {
  document.title = "teachers - distill";
  const models = el("div");
  const speeds = new Map();
  root.append(el("h1", {}, "Teachers"),
    el("p", {class: "hint"}, "The teachers of running and waiting jobs, and those that this server runs."), models);
  return repeat(SECONDS, async () => {
    try {
      const {teachers} = await get("api/teachers");
      for (const teacher of teachers) measure(teacher, speeds);
      models.replaceChildren(...(teachers.length ? byModel(teachers).map((replicas) => group(replicas, speeds))
        : [el("p", {class: "notice"}, "No running job has a teacher.")]));
    } catch (error) {
      if (error instanceof Fault) models.replaceChildren(el("p", {class: "notice", role: "alert"}, error.sentence));
    }
  });
}

/** Adds the scored tokens per second since the last update to `rates` of a teacher's address. */
function measure({address, at, load}, speeds) {
  if (!load) return;
  const earlier = speeds.get(address);
  if (earlier?.at === at) return;
  const rates = earlier?.rates ?? [];
  if (earlier) rates.push(Math.max(0, load.scored_tokens - earlier.tokens) / (at - earlier.at));
  speeds.set(address, {at, tokens: load.scored_tokens, rates: rates.slice(-MOST_RATES)});
}

/** Returns the teachers in groups of the same model. */
function byModel(teachers) {
  const groups = new Map();
  for (const teacher of teachers) {
    const key = teacher.info?.fingerprint ?? teacher.process?.model ?? teacher.address;
    groups.set(key, [...groups.get(key) ?? [], teacher]);
  }
  return [...groups.values()];
}

function group(replicas, speeds) {
  const cards = el("div", {class: "cards"},
    replicas.map((teacher) => card(teacher, speeds.get(teacher.address)?.rates ?? [])));
  if (replicas.length === 1) return cards;
  const answering = replicas.filter(({load}) => load);
  const sum = (count) => answering.reduce((total, teacher) => total + count(teacher), 0);
  const speed = sum(({address}) => speeds.get(address)?.rates.at(-1) ?? NaN);
  const waiting = sum(({load}) => load.queued_tokens);
  return el("section", {},
    el("h2", {}, `${replicas[0].info?.model ?? replicas[0].process?.model}: ${replicas.length} replicas`),
    el("p", {class: "hint"}, `together ${number(speed)} tokens/s, ${number(waiting)} tokens waiting`),
    cards);
}

function card(teacher, rates) {
  const {address, info, load, fault, process} = teacher;
  const state = fault ? el("span", {class: "badge failed"}, "no answer")
    : process ? badge(process.state) : el("span", {class: "badge running"}, "answers");
  const version = info?.version ? `version ${info.version}` : "";
  const model = info ? [info.model, info.engine, info.dtype, version] : process ? [process.model, process.engine] : [];
  return el("article", {class: "card"},
    el("div", {class: "card-head"}, el("h3", {}, address || "not listening yet"), state),
    model.length ? el("p", {class: "hint"}, model.filter(Boolean).join(", ")) : null,
    process ? el("p", {class: "hint"}, history(process)) : null,
    process?.reason ? el("p", {class: "reason failed"}, process.reason) : null,
    fault ? el("p", {}, fault.message) : null,
    load ? [speed(load, rates), ...Object.entries(load.cache_tiers).map(tier)] : null,
    users(teacher));
}

function history({stage, since, attempt, gpus}) {
  const place = gpus?.length ? gpuNames(gpus) : "";
  return [stage, place, `start ${attempt}, ${ago(since)}`].filter(Boolean).join("; ");
}

function speed(load, rates) {
  const rate = rates.at(-1);
  return facts([
    ["tokens/s", [number(rate), rates.length > 1 ? [" ", sparkline(rates)] : null]],
    ["tokens waiting", number(load.queued_tokens)],
    ["queue time", rate ? duration(load.queued_tokens / rate) : "-"],
    ["tokens scored", number(load.scored_tokens)],
    ["streams", number(load.active_streams)],
    ["batches", number(load.forwards)],
    ["cancelled", number(load.cancelled)],
  ]);
}

/** Names the jobs that use the teacher, how long they wait for it, and the jobs in the queue. */
function users({jobs, waiting}) {
  const ids = Object.keys(jobs);
  const waits = (id) => (jobs[id] === null ? null : el(jobs[id] >= LONG_WAIT ? "b" : "small", {class: "wait"},
    ` waits ${percent(jobs[id])} of its time`));
  return [
    ids.length ? el("p", {class: "served"}, "serves ", listed(ids, (id) => [jobLink(id, id), waits(id)])) : null,
    waiting.length ? el("p", {class: "served"}, "awaited by ", listed(waiting, (id) => [jobLink(id, id)])) : null,
  ];
}

function listed(ids, parts) {
  const rest = ids.length > MOST_JOBS ? [`, and ${ids.length - MOST_JOBS} more`] : [];
  return [...ids.slice(0, MOST_JOBS).flatMap((id, index) => [index ? ", " : null, ...parts(id)]), ...rest];
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
