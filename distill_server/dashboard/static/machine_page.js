// The page of the server's machine: who holds slots, GPUs and CPU threads, and who waits for whom.

import {badge, el, jobLink, scrollRegion} from "./dom.js";
import {ago, bytes, gpuNames, percent, whyQueued} from "./figures.js";
import {Fault, get, repeat} from "./server.js";

const SECONDS = 3;
// The ages of all rows are drawn again after this time.
const MS_BETWEEN_AGES = 60000;

/** Shows the machine in `root`; returns the function that closes the page. */
export function openMachine(root) {
  document.title = "machine - distill";
  const body = el("div");
  root.append(el("h1", {}, "Machine"), body);
  return repeat(SECONDS, async () => {
    try {
      show(body, await get("api/machine"));
    } catch (error) {
      if (error instanceof Fault) body.replaceChildren(el("p", {class: "notice", role: "alert"}, error.sentence));
    }
  });
}

function show(body, {capacity, holders, queue, gpus}) {
  const minute = Math.floor(Date.now() / MS_BETWEEN_AGES);
  const drawn = JSON.stringify([capacity, holders, queue, gpus, ago(holders[0]?.since), minute]);
  if (body.dataset.drawn === drawn) return; // keeps the focus and the selection
  body.dataset.drawn = drawn;
  const names = new Map([...holders, ...queue].filter(({id}) => id).map(({id}) => [id, jobLink(id, id)]));
  body.replaceChildren(
    meters(capacity),
    el("h2", {}, "In use"),
    holders.length ? table("In use", ["Job or teacher", "GPUs", "CPU threads", "State", "Owner", "Started"],
      holders.map((holder) => [
        holder.id ? jobLink(holder.id, holder.name) : `teacher ${holder.name}`,
        gpuNames(holder.gpus), holder.cpus || "-", badge(holder.state), holder.owner || "-",
        ago(holder.since)]))
      : el("p", {class: "notice"}, "No job and no teacher of this server runs."),
    ...gpus.length ? [el("h2", {}, "GPUs"), table("GPUs", ["GPU", "Busy", "Memory", "Held by"],
      gpus.map((gpu) => [`${gpu.index}: ${gpu.name}`, percent(gpu.busy ?? NaN),
        gpu.memory_total === null ? "-" : `${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}`,
        holderOf(gpu, holders)]))] : [],
    el("h2", {}, "Queue"),
    queue.length ? table("Queue", ["Place", "Job", "Waits for", "Owner", "Queued"], queue.map((job) => [
      job.place, jobLink(job.id, job.name), linked(reason(job), names), job.owner || "-", ago(job.queued_at)]))
      : el("p", {class: "notice"}, "No job waits."));
}

function reason(job) {
  return whyQueued({...job, state: "QUEUED"}).replace(/^place \d+: /, "");
}

function meters({slots, gpus, cpus, queued}) {
  const parts = [["slots", slots], ["GPUs", gpus], ["CPU threads", cpus]].filter(([, counts]) => counts);
  return el("div", {class: "card meters"},
    parts.map(([name, [used, all]]) => el("div", {},
      el("span", {}, `${used} of ${all} ${name}`),
      el("progress", {max: all || 1, value: Math.min(used, all), "aria-label": `${name} in use`}))),
    el("div", {}, el("span", {}, `${queued} in the queue`)));
}

function holderOf({index, uuid}, holders) {
  const holder = holders.find(({gpus}) => gpus?.some((name) => name === String(index) || uuid.startsWith(name)));
  if (!holder) return "-";
  return holder.id ? jobLink(holder.id, holder.name) : `teacher ${holder.name}`;
}

/** Returns the words of a text, with links in place of the ids of jobs. */
function linked(text, names) {
  return text.split(/( |, |: )/).map((word) => names.get(word)?.cloneNode(true) ?? word);
}

function table(name, columns, rows) {
  return scrollRegion(name, "results whole",
    el("table", {class: "plain"},
      el("thead", {}, el("tr", {}, columns.map((column) => el("th", {scope: "col"}, column)))),
      el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)))))));
}
