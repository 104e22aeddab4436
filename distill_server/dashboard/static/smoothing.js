// Smoothing of a curve: the moving average of the reports, and the debiased exponential average.

// As in clients/cli/plots/panels.py: a curve of at least FROM points, over this share of them.
const FROM = 60;
const SHARE = 1 / 40;

/** The choices by name; each makes a smoothed list of equal length from a list of values. */
export const SMOOTHINGS = new Map([
  ["none", (values) => values],
  ["moving average", movingAverage],
  ["exponential 0.9", (values) => exponential(values, 0.9)],
  ["exponential 0.99", (values) => exponential(values, 0.99)],
]);

/** Returns the moving average, centred on each point and over fewer points at the ends. Fewer than
 *  60 values are returned as they are. */
export function movingAverage(values) {
  if (values.length < FROM) return values;
  const reach = Math.max(1, Math.round(values.length * SHARE / 2));
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, place) => {
    const [first, end] = [Math.max(0, place - reach), Math.min(values.length, place + reach + 1)];
    return (sums[end] - sums[first]) / (end - first);
  });
}

/** Returns the exponential average with this weight of the past, divided by the sum of its weights,
 *  so that the first values are not drawn towards 0. */
export function exponential(values, weight) {
  let sum = 0;
  let weights = 0;
  return values.map((value) => {
    sum = weight * sum + value;
    weights = weight * weights + 1;
    return sum / weights;
  });
}
