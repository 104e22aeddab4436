// Commands for a terminal, each with a button that copies it.

import {el, setText} from "./dom.js";

const MS_TOLD = 2000;

const OF_ACTIVE = ["watch JOB", "logs JOB --follow", "cancel JOB"];
/** The commands that a job in a state allows; JOB stands for its id. */
export const COMMANDS = {
  SUCCEEDED: ["pull JOB", "show JOB", "logs JOB"],
  FAILED: ["resume JOB", "logs JOB", "show JOB"],
  CANCELLED: ["resume JOB", "logs JOB", "show JOB"],
};

/** The section with the commands of a job; `server` is the address of the gRPC server. */
export class CommandsView {
  constructor(id, server) {
    this.textOf = (words) => `distill ${words.replace("JOB", id)} --server ${server}`;
    this.list = el("ul", {class: "commands"});
    this.element = el("details", {class: "commands-view"}, el("summary", {}, "Commands"), this.list);
  }

  /** Shows the commands that the state allows. */
  offer(state) {
    const commands = COMMANDS[state] ?? OF_ACTIVE;
    if (commands === this.commands) return;
    this.commands = commands;
    this.list.replaceChildren(...commands.map((words) => command(this.textOf(words))));
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
