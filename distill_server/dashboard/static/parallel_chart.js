// Parallel coordinates of a sweep: an axis for each label that differs, and one for the result; a line a job.

import {scrollRegion, svg} from "./dom.js";
import {number} from "./figures.js";

const [HEIGHT, TOP, BOTTOM, SIDE] = [210, 30, 14, 56];
const LEAST_ROWS = 3;
const LEAST_WIDTH_OF_AXIS = 110;
const MOST_TICKS = 7;
// The values of a logarithmic axis differ by this factor or more.
const WIDE_RANGE = 9;

/** Draws the jobs that have a result, `width` pixels wide or wider; null for fewer than three jobs. The best job is
 *  drawn last, in a colour of its own. */
export function parallelChart({metric, labels, rows}, width) {
  const measured = rows.filter(({best}) => best);
  if (measured.length < LEAST_ROWS || !labels.length) return null;
  const axes = [
    ...labels.map((name) => makeAxis(name, measured.map((job) => job.labels[name] ?? "-"))),
    makeAxis(metric, measured.map(({best}) => best.value)),
  ];
  const whole = Math.max(width, axes.length * LEAST_WIDTH_OF_AXIS);
  const x = (index) => SIDE + (whole - 2 * SIDE) * index / (axes.length - 1);
  const lines = measured.map((job, row) => {
    const points = axes.map(({values, y}, index) => `${x(index).toFixed(1)},${y(values[row]).toFixed(1)}`).join(" ");
    return svg("a", {href: `#/jobs/${encodeURIComponent(job.id)}`, tabindex: -1, class: job.is_best ? "best" : null},
      svg("title", {}, `${job.name}: ${number(job.best.value)}`), svg("polyline", {points}));
  });
  const best = measured.find((job) => job.is_best);
  const winner = best ? `; the best is ${best.name}` : "";
  const label = `${measured.length} jobs by ${labels.join(", ")} and ${metric}${winner}`;
  return scrollRegion("Parallel coordinates", "parallel",
    svg("svg", {width: whole, height: HEIGHT, role: "group", "aria-label": label},
      axes.map((axis, index) => drawn(axis, x(index))),
      [...lines].sort((one, other) => one.matches(".best") - other.matches(".best"))));
}

function numberOf(value) {
  return value === "" ? NaN : Number(value);
}

/** Compares two values of an axis: numbers by size, before texts. */
function inOrder(one, other) {
  const [first, second] = [numberOf(one), numberOf(other)];
  return Number.isNaN(first) - Number.isNaN(second) || first - second || (one < other ? -1 : 1);
}

/** An axis with numbers if all values are numbers, else with one tick for each text. */
function makeAxis(name, values) {
  const numbers = values.map(numberOf);
  const isNumeric = numbers.every(Number.isFinite);
  const distinct = [...new Set(isNumeric ? numbers : values)].sort(inOrder);
  const [low, high] = [distinct[0], distinct.at(-1)];
  const scale = !isNumeric ? (value) => distinct.indexOf(value)
    : low > 0 && high / low >= WIDE_RANGE ? Math.log : (value) => value;
  const [first, last] = [scale(low), scale(high)];
  const share = (value) => (last > first ? (scale(value) - first) / (last - first) : 0.5);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(value);
  const ticks = distinct.length <= MOST_TICKS ? distinct : isNumeric ? [low, high] : [];
  const texts = new Map(values.map((value, index) => [isNumeric ? numbers[index] : value, value]));
  const format = (tick) => (typeof texts.get(tick) === "number" ? number(tick) : texts.get(tick));
  return {name, values: isNumeric ? numbers : values, y, ticks, format};
}

function drawn({name, y, ticks, format}, x) {
  return svg("g", {class: "axis"},
    svg("line", {x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}),
    svg("text", {x, y: 14, "text-anchor": "middle", class: "name"}, name.replace(/^.*\./, "")),
    apart(ticks, y).map((tick) => svg("text", {x: x - 6, y: y(tick) + 4, "text-anchor": "end"}, format(tick))));
}

/** Returns the ticks whose labels do not overlap an earlier one. */
function apart(ticks, y) {
  const kept = [];
  for (const tick of ticks) if (kept.every((other) => Math.abs(y(other) - y(tick)) >= 13)) kept.push(tick);
  return kept;
}
