// The marks of a chart: where attempts began, faults, checkpoints and evaluations of a job.

import {colourOf} from "./dom.js";

// Marks of one kind that are closer than these pixels are drawn once.
const LEAST_PIXELS = 4;
const COLOURS = {attempt: "--warn", fault: "--bad", checkpoint: "--good", evaluation: "--soft"};

/** Draws the marks of a ChartView in a chart of uPlot: attempts as lines, faults at the top, the others
 *  at the bottom. */
export function drawMarks(plot, {marks, axis}) {
  const {ctx, bbox: {left, top, width, height}} = plot;
  const pixel = uPlot.pxRatio;
  const last = {};
  ctx.save();
  for (const {kind, [axis]: x} of marks) {
    const at = plot.valToPos(x, "x", true);
    if (!(at >= left && at <= left + width) || at - last[kind] < LEAST_PIXELS * pixel) continue;
    last[kind] = at;
    ctx.strokeStyle = ctx.fillStyle = colourOf(COLOURS[kind]);
    ctx.lineWidth = pixel;
    ctx.setLineDash(kind === "attempt" ? [4 * pixel, 3 * pixel] : []);
    ctx.beginPath();
    SHAPES[kind](ctx, at, {top, bottom: top + height, size: 4 * pixel});
  }
  ctx.restore();
}

const SHAPES = {
  attempt(ctx, x, {top, bottom}) {
    ctx.moveTo(x, top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
  },
  fault(ctx, x, {top, size}) {
    ctx.moveTo(x - size, top);
    ctx.lineTo(x + size, top + 2 * size);
    ctx.moveTo(x + size, top);
    ctx.lineTo(x - size, top + 2 * size);
    ctx.stroke();
  },
  checkpoint(ctx, x, {bottom, size}) {
    ctx.moveTo(x - size, bottom);
    ctx.lineTo(x + size, bottom);
    ctx.lineTo(x, bottom - 1.5 * size);
    ctx.fill();
  },
  evaluation(ctx, x, {bottom, size}) {
    ctx.moveTo(x, bottom);
    ctx.lineTo(x, bottom - size);
    ctx.stroke();
  },
};

/** Returns the texts of the marks at a value of the axis. */
export function marksAt({marks, axis}, x) {
  return [...new Set(marks.filter((mark) => mark[axis] === x).map(({text}) => text))];
}
