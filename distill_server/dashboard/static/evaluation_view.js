// The results of an evaluation job: a table of pass@k, with a row for each model.

import {el, scrollRegion} from "./dom.js";
import {number, percent} from "./figures.js";
import {get} from "./server.js";

/** The section with the table; it is hidden until the job has results. */
export class EvaluationView {
  constructor(path) {
    this.path = path;
    this.element = el("section", {class: "card", hidden: true});
  }

  /** Reads the results, which the job writes once. */
  async refresh() {
    if (!this.element.hidden) return;
    const {models} = await get(`${this.path}/evaluation`).catch(() => ({models: null}));
    if (models?.length) this.show(models);
  }

  show(models) {
    const names = Object.keys(models[0]);
    const shares = [...names.filter((name) => /^pass@/.test(name)), ...names.filter((name) => /^maj@(?!1$)/.test(name)),
      ...(models.length > 1 ? ["gain"] : [])];
    const columns = ["Model", ...shares, "tokens", "cut answers", "errors"];
    const {prompts, samples} = models[0];
    this.element.replaceChildren(el("h2", {}, "Results"),
      el("p", {class: "hint"}, `${prompts} prompts, ${samples} answers each; 95% intervals over the prompts`),
      scrollRegion("Results", "", el("table", {class: "plain"},
        el("thead", {}, el("tr", {}, columns.map((name) => el("th", {scope: "col"}, name)))),
        el("tbody", {}, models.map((model) => el("tr", {}, el("th", {scope: "row"}, model.model),
          shares.map((name) => el("td", {}, estimate(model[name], (value) => percentOf(value, name)))),
          el("td", {}, estimate(model.tokens, (value) => number(value, 3))),
          el("td", {}, percent(model.truncated)), el("td", {}, String(model.errors))))))));
    this.element.hidden = false;
  }
}

function percentOf(value, name) {
  return `${name === "gain" && value > 0 ? "+" : ""}${(100 * value).toFixed(1)}%`;
}

function estimate(value, format) {
  if (!value) return "-";
  return [el("b", {}, format(value.mean)), ` ${format(value.low)} to ${format(value.high)}`];
}
