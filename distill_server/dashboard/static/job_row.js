// The columns of the list of jobs, and a row.

import {badge, bar, el} from "./dom.js";
import {ago, bytes, duration, moment, number, whyQueued} from "./figures.js";
import {sparkline} from "./sparkline.js";

// Name, the key of the server's order ("-": the largest value first when it is clicked), and an explanation.
export const COLUMNS = [
  ["Job", "name"], ["State", "state"], ["Progress", "-progress"],
  ["Result", "", "newest value: KL to the teacher, reward, cross-entropy, accuracy, or size of the rows"],
  ["Held out", "", "newest evaluation"], ["Time", "-time", "time since the start, and the remaining time"],
  ["Models and data", ""], ["Submitted", "-submitted"],
];

/** Replaces all cells of a row but the first. */
export function fillRow(row, job) {
  const texts = stateTexts(job);
  const {result, held_out: heldOut} = job;
  const format = result?.metric === "bytes" ? bytes : number;
  const steps = job.max_steps ? `${job.step} / ${job.max_steps}` : String(job.step);
  const best = heldOut && `best ${number(heldOut.best.value)} at step ${heldOut.best.step}`;
  const ended = job.ended_at || Date.now() / 1000;
  const time = job.started_at ? duration(ended - job.started_at) : "-";
  const cells = [
    [[badge(job.state), ...texts.map((text) => el("small", {}, text))], texts.join("; ")],
    [[bar(job.step, job.max_steps || 1, `progress of ${job.id}`), el("small", {}, steps)]],
    result ? [[sparkline(result.curve), format(result.value), el("small", {}, result.label)],
      `${result.label} ${format(result.value)}`] : [["-"]],
    heldOut ? [[number(heldOut.value), el("small", {}, heldOut.label)], best]
      : [["-"]],
    job.seconds_left === null ? [[time]] : [[`${duration(job.seconds_left)} left`], `${time} since the start`],
    [[job.summary || "-"], job.summary],
    [[ago(job.created_at)], moment(job.created_at)],
  ];
  row.className = job.state.toLowerCase();
  row.querySelector(".pinned").hidden = !job.pinned;
  while (row.children.length > 1) row.lastChild.remove();
  row.append(...cells.map(([cell, title], index) => el("td", {
    "data-label": COLUMNS[index + 1][0], class: cell[0] === "-" ? "none" : null, title: title || null,
  }, cell)));
}

function stateTexts(job) {
  const {phase} = job;
  if (job.state !== "QUEUED") return [job.reason || (phase === "training" ? "" : phase)].filter(Boolean);
  return [whyQueued(job), job.reason && `after: ${job.reason}`].filter(Boolean);
}
