// Axes: the range of an axis, and the value nearest to a point on it.

// A log axis with less than these powers of ten would have one tick or none.
const LEAST_POWERS = 1;

/** Returns the range of an axis for these values, with a margin: `{low, high, log}`. `zero`: the
 *  range includes 0. `percent`: values from 0 to 1 stay on such an axis. A log axis ignores values
 *  at or below 0; it is linear if its range is less than a power of ten. */
export function domain(values, {log = false, zero = false, percent = false} = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (log && value <= 0) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (log) return Math.log10(high / low) >= LEAST_POWERS ? widened(low, high) : domain(values);
  if (low > high || (low === 0 && high === 0)) return {low: 0, high: 1, log: false};
  if (zero) low = Math.min(0, low);
  // A smaller difference is that of a computer's rounding.
  const differs = high - low > 1e-6 * Math.abs(high);
  const room = (differs && (high - low) * 0.06) || Math.abs(high) * 0.1 || 1;
  const least = (zero || percent) && low >= 0 ? 0 : -Infinity;
  const most = percent && high <= 1 ? 1 : Infinity;
  return {low: Math.max(least, low - room), high: Math.min(most, high + room), log: false};
}

function widened(low, high) {
  const room = (high / low) ** 0.06;
  return {low: low / room, high: high * room, log: true};
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
