// What a job learns from, token by token: warnings, counts, and the first records.

import {el, markLineBreaks} from "./dom.js";
import {get} from "./server.js";

const LEGEND = [
  ["context", "context: read, not learned"],
  ["learned", "learned"],
  ["end", "learned, and ends an answer"],
  ["sampled", "written by the student"],
];

/** The section at the top of a job's page. It is hidden until the job has a preview. */
export class PreviewView {
  constructor(path) {
    this.path = path;
    this.element = el("section", {class: "preview", hidden: true});
  }

  /** Loads the preview, which never changes once the job has written it. */
  async refresh() {
    if (!this.element.hidden) return;
    try {
      const {preview} = await get(`${this.path}/preview`);
      if (preview) this.show(preview);
    } catch {
      // The next refresh tries again; the page reports a server that does not answer.
    }
  }

  show({warnings, facts, records}) {
    this.element.replaceChildren(
      ...warnings.map((warning) => el("p", {class: "warning"}, warning)),
      el("details", {open: true},
        el("summary", {}, "What it learns from"),
        el("dl", {class: "facts"}, facts.flatMap(([name, text]) => [
          el("div", {}, el("dt", {}, name), el("dd", {}, text)),
        ])),
        el("p", {class: "tokens legend"},
          LEGEND.map(([kind, label]) => el("span", {class: `token ${kind}`}, label))),
        el("div", {class: "records", tabindex: 0}, records.map(card))));
    this.element.hidden = false;
  }
}

function card({where, problem, views, lost}) {
  return el("article", {},
    el("h3", {}, where), el("p", {class: "fault"}, problem),
    lost.map(([part, text]) =>
      el("p", {class: "lost"}, el("b", {}, `missing from the input, ${part}: `), el("del", {}, el("bdi", {}, text)))),
    views.flatMap((view) => [
      el("p", {class: "hint"}, counts(view)),
      el("p", {class: "tokens"}, view.runs.flatMap((run) => run.texts.map((text) => token(run.kind, text)))),
    ]));
}

function counts({reader, tokens, learned, runs}) {
  const sampled = runs.some(({kind}) => kind === "sampled");
  return `${reader}: ${tokens} tokens${sampled ? "" : `, ${learned} learned`}`;
}

/** A token, isolated from the writing direction of its neighbours; line breaks are marked. */
function token(kind, text) {
  return el("bdi", {class: `token ${kind}`}, markLineBreaks(text));
}
