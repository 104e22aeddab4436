// Axes: the values of ticks, the range of an axis, and the position of a value on it.

const MOST_TICKS = 6;
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/** Returns about `count` round numbers from `low` to `high`. */
export function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high * (1 + 1e-12); index += 1) {
    ticks.push(+(index * step).toPrecision(12));
  }
  return ticks;
}

/** Returns about `count` round numbers of seconds, minutes, hours or days. */
export function timeTicks(low, high, count) {
  const rough = (high - low) / count;
  if (rough <= 1) return linearTicks(low, high, count);
  const step = SECONDS.find((size) => size >= rough) ?? Math.ceil(rough / 86400) * 86400;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

/** Returns the powers of ten from `low` to `high`, at most six. If there are few, also their
 *  multiples by 3, or by 2 and 5. */
export function logTicks(low, high) {
  for (const digits of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = powers(low, high, digits);
    if (ticks.length < 2) return linearTicks(low, high, 3);
    if (ticks.length <= MOST_TICKS) return ticks;
  }
  const ticks = powers(low, high, [1]);
  const every = Math.ceil(ticks.length / MOST_TICKS);
  return ticks.filter((_, index) => index % every === 0);
}

function powers(low, high, digits) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const digit of digits) {
      const tick = +(digit * 10 ** power).toPrecision(1);
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

/** Returns the range of an axis for these values, with a margin: `{low, high, log}`. `zero`: the
 *  range includes 0. `percent`: values from 0 to 1 stay on such an axis. A log axis ignores values
 *  at or below 0. */
export function domain(values, {log = false, zero = false, percent = false} = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (log && value <= 0) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) [low, high] = [log ? 0.1 : 0, 1];
  if (log) return low === high ? {low: low / 2, high: high * 2, log} : widened(low, high);
  if (low === 0 && high === 0) return {low, high: 1, log};
  if (zero) low = Math.min(0, low);
  // A smaller difference is that of a computer's rounding.
  const differs = high - low > 1e-6 * Math.abs(high);
  const room = (differs && (high - low) * 0.06) || Math.abs(high) * 0.1 || 1;
  const least = (zero || percent) && low >= 0 ? 0 : -Infinity;
  const most = percent && high <= 1 ? 1 : Infinity;
  return {low: Math.max(least, low - room), high: Math.min(most, high + room), log};
}

function widened(low, high) {
  const room = (high / low) ** 0.06;
  return {low: low / room, high: high * room, log: true};
}

/** Returns the position of a value on an axis: 0 at its low end, 1 at its high end. */
export function share(value, {low, high, log}) {
  return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}

/** Returns the index of the nearest value, by binary search in the ascending list. */
export function nearest(xs, wanted) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - xs[low] < xs[high] - wanted ? low : high;
}
