// Commands for a terminal, each with a button that copies it.

import {el, setText} from "./dom.js";

const MS_TOLD = 2000;

/** The section with the commands of a job; `server` is the address of the gRPC server. */
export class CommandsView {
  constructor(id, server) {
    const named = (words) => `distill ${words} --server ${server}`;
    this.list = el("ul", {class: "commands"}, [
      `watch ${id}`, `logs ${id} --follow`, `pull ${id}`, `resume ${id}`, `cancel ${id}`,
    ].map((words) => command(named(words))));
    this.element = el("details", {class: "commands-view"}, el("summary", {}, "Commands"), this.list);
  }
}

function command(text) {
  const code = el("code", {}, text);
  const label = `Copy ${text}`;
  const button = el("button", {type: "button", "aria-label": label, click: () => copy(code, button)}, "Copy");
  return el("li", {}, code, button);
}

/** Copies the text; where a browser forbids that (plain http), selects it instead. */
async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    setText(button, "Copied");
  } catch {
    getSelection().selectAllChildren(code);
    setText(button, "Selected");
  }
  setTimeout(() => setText(button, "Copy"), MS_TOLD);
}
