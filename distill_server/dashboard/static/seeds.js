// Groups of jobs that differ only by their seeds, and the mean of a result over the seeds.

// Quantiles of Student's t distribution at 97.5%, for 1 to 30 degrees of freedom.
const QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
  2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042];

/** Returns the configuration's values by their dotted keys, such as `train.learning_rate`. A list is
 *  one value; a key without a value is left out. */
export function flattened(config, prefix = "") {
  return Object.entries(config).flatMap(([name, value]) => {
    if (value === null) return [];
    const isTable = typeof value === "object" && !Array.isArray(value);
    return isTable ? flattened(value, `${prefix}${name}.`) : [[prefix + name, JSON.stringify(value)]];
  });
}

/** Returns the names of the keys that the configurations, maps of `flattened`, do not all have with the
 *  same value. */
export function differingKeys(configs) {
  return [...new Set(configs.flatMap((config) => [...config.keys()]))].sort()
    .filter((name) => new Set(configs.map((config) => config.get(name))).size > 1);
}

/** Returns groups `{keys, members}` of runs, which have `config`, a map of `flattened`: the members
 *  differ only by seeds, names and labels; `keys` tell the groups apart, as `[name, value]`. */
export function groupBySeed(runs) {
  const isOfSeeds = (name) => /^name$|^labels\.|(^|\.)seed$/.test(name);
  const names = differingKeys(runs.map(({config}) => config)).filter((name) => !isOfSeeds(name));
  const groups = new Map();
  for (const run of runs) {
    const keys = names.map((name) => [name, run.config.get(name) ?? "-"]);
    const id = JSON.stringify(keys);
    if (!groups.has(id)) groups.set(id, {keys, members: []});
    groups.get(id).members.push(run);
  }
  return [...groups.values()];
}

/** Returns the mean of values and half the width of its 95% confidence interval, `{mean, half}`; null
 *  for fewer than two values. The values are taken as independent and normally distributed. */
export function interval(values) {
  const count = values.length;
  if (count < 2) return null;
  const mean = values.reduce((sum, value) => sum + value, 0) / count;
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (count - 1);
  // Beyond the table: the first terms of the expansion of the quantile in 1 / degrees of freedom.
  const quantile = QUANTILES[count - 2] ?? 1.95996 + 2.37228 / (count - 1) + 2.8225 / (count - 1) ** 2;
  return {mean, half: quantile * Math.sqrt(variance / count)};
}
