// A small curve without axes, for a row of a table.

import {svg} from "./dom.js";

const [WIDTH, HEIGHT] = [56, 18];

/** Draws values from left to right; two or more are needed. */
export function sparkline(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const y = (value) => (high > low ? (HEIGHT - 2) * (1 - (value - low) / (high - low)) + 1 : HEIGHT / 2);
  const x = (index) => (WIDTH - 2) * index / Math.max(1, values.length - 1) + 1;
  const points = values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  return svg("svg", {class: "sparkline", width: WIDTH, height: HEIGHT, "aria-hidden": "true"},
    values.length > 1 ? svg("polyline", {points}) : null);
}
