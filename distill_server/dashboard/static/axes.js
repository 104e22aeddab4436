// Where the ticks of an axis go, and where a value is on it.

/** About `count` round numbers from `low` to `high`. */
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

/** Powers of ten; with 2 and 5 between them where few are in sight. */
export function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const digits = decades > 3 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const digit of digits) {
      const tick = +(digit * 10 ** power).toPrecision(1);
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  const every = Math.ceil(ticks.length / 6);
  return ticks.length < 2 ? linearTicks(low, high, 3) : ticks.filter((_, i) => i % every === 0);
}

/** Room around the values: `{low, high, log}`. */
export function domain(values, {log = false, zero = false} = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (log && value <= 0) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) [low, high] = [log ? 0.1 : 0, 1];
  if (log) return low === high ? {low: low / 2, high: high * 2, log} : widened(low, high);
  if (zero) low = Math.min(0, low);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return {low: zero && low === 0 ? 0 : low - room, high: high + room, log};
}

function widened(low, high) {
  const room = (high / low) ** 0.06;
  return {low: low / room, high: high * room, log: true};
}

/** Share of the way from the domain's low end to its high end. */
export function share(value, {low, high, log}) {
  return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}
