// Formats numbers and times for display, in the same formats as the command line.

const CROSS_ENTROPY = "cross-entropy";
const KINDS_OF_KL = [
  ["kl/teacher", ""],
  ["kl/teacher_bound", "lower bound"],
  ["kl/anchor", "to the anchor"],
  ["cross_entropy", CROSS_ENTROPY],
];

/** Formats a number with `digits` significant digits, one less in `12.3k`, two less in `1.2e12`: `0.7411`; "-"
 *  if not finite. */
export function number(value, digits = 4) {
  if (value === undefined || value === null || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(Math.max(0, digits - 3));
  if (size >= 1e9) return value.toExponential(Math.max(0, digits - 3)).replace("e+", "e");
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(digits - 1)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(digits - 1)}k`;
  if (Number.isInteger(value)) return String(value);
  return size >= 1000 ? value.toFixed(Math.max(0, digits - 4)) : String(+value.toPrecision(digits));
}

/** Formats the ticks of an axis with as few digits as tell them apart. */
export function tickLabels(ticks) {
  for (let digits = 4; digits < 12; digits += 1) {
    const labels = ticks.map((tick) => number(tick, digits));
    if (new Set(labels).size === labels.length) return labels;
  }
  return ticks.map(String);
}

/** Formats a share from 0 to 1 as `42%`; "-" if not finite. */
export function percent(share) {
  return Number.isFinite(share) ? `${Math.round(share * 100)}%` : "-";
}

/** Formats seconds as `42s`, `3m20s`, `2h05m` or `3d04h`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "-";
  const whole = Math.max(0, Math.round(seconds));
  const two = (count) => String(count).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor(whole / 60) % 60)}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor(whole / 3600) % 24)}h`;
}

/** Formats seconds as `duration` does, without a last part that is zero: `5m`; `1.5s`. */
export function shortDuration(seconds) {
  if (seconds < 60) return `${+seconds.toPrecision(3)}s`;
  return duration(seconds).replace(/([mhd])00[smh]$/, "$1");
}

/** Formats the names of GPUs as `GPU 0` or `GPUs 0, 1`; "-" if there is none. */
export function gpuNames(names) {
  return names?.length ? `${names.length === 1 ? "GPU" : "GPUs"} ${names.join(", ")}` : "-";
}

/** Formats a number of bytes as `512 B`, `1.2 MiB` or `340 GiB`. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < units.length - 1) {
    count /= 1024;
    power += 1;
  }
  return `${count < 1000 ? +count.toPrecision(3) : Math.round(count)} ${units[power]}`;
}

/** Formats a Unix time as `3m ago`; never negative, because the server's clock may be ahead. */
export function ago(time) {
  if (!time) return "-";
  const seconds = Math.max(0, Date.now() / 1000 - time);
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]]
    .find(([length]) => seconds >= length) ?? [1, "s"];
  return `${Math.floor(seconds / size)}${unit} ago`;
}

/** Formats a Unix time as date and time in the browser's locale and time zone. */
export function moment(time) {
  return time ? new Date(time * 1000).toLocaleString() : "-";
}

/** Returns a QUEUED job's place in the queue and why it waits; "" for a job in another state. */
export function whyQueued({state, place, why, retry_at: retryAt}) {
  if (state !== "QUEUED" || !place) return "";
  const rest = retryAt ? `, retries in ${duration(retryAt - Date.now() / 1000)}` : "";
  return `place ${place}: ${why.replace(/^the job /, "")}${rest}`;
}

/** Returns the KL to the teacher, or else its lower bound, or else the KL to the anchor. */
export function klOf(metrics) {
  const [value, kind] = klWithKind(metrics);
  return kind === CROSS_ENTROPY ? undefined : value;
}

/** Returns `[value, kind]`: the KL, or else the cross-entropy; kind: "" for the KL to the teacher. */
export function klWithKind(metrics) {
  const [name, kind] = KINDS_OF_KL.find(([name]) => name in metrics) ?? ["", ""];
  return [metrics[name], kind];
}

/** Returns the held-out KL, or else its lower bound, or else the held-out cross-entropy. */
export function heldOutOf(metrics) {
  return metrics["eval/kl"] ?? metrics["eval/kl_bound"] ?? metrics["eval/cross_entropy"];
}

/** Returns the share of a step's time for which the trainer waits for the teacher. */
export function waitOf(metrics) {
  return metrics["time/teacher_wait"] / metrics["time/step"];
}
