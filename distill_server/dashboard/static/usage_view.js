// CPU, memory and GPUs of a running job's processes, updated every three seconds.

import {el} from "./dom.js";
import {bytes, percent} from "./figures.js";
import {Fault, get, repeat} from "./server.js";
import {facts} from "./teachers_page.js";

const SECONDS = 3;
const ACTIVE = ["PREPARING", "RUNNING", "CANCELLING"];

/** The section with what the trainer uses; hidden while the job does not run. */
export class UsageView {
  constructor(path) {
    this.path = path;
    this.active = false;
    this.body = el("div");
    this.element = el("section", {class: "card", hidden: true}, el("h2", {}, "Trainer"), this.body);
    this.close = repeat(SECONDS, () => this.look());
  }

  /** Shows the section if a job in this state has processes. */
  follow(state) {
    const active = ACTIVE.includes(state);
    if (active === this.active) return;
    this.active = active;
    this.before = null;
    this.element.hidden = true;
    this.look();
  }

  async look() {
    if (!this.active) return;
    try {
      const {usage} = await get(`${this.path}/usage`);
      this.element.hidden = !this.active || !usage;
      if (usage) this.show(usage);
    } catch (error) {
      if (error instanceof Fault) this.body.replaceChildren(el("p", {class: "hint"}, error.sentence));
    }
  }

  show(usage) {
    const seconds = usage.at - (this.before?.at ?? usage.at);
    // Processes that have ended take their time with them.
    const used = Math.max(0, usage.cpu_seconds - (this.before?.cpu_seconds ?? 0));
    if (seconds > 0) this.threads = used / seconds;
    else if (!this.before) this.threads = undefined;
    this.before = usage;
    const busy = this.threads === undefined ? "measuring ..." : this.threads.toFixed(1);
    this.body.replaceChildren(facts([
      ["CPU threads busy", `${busy} of ${usage.cpus}`],
      ["memory", `${bytes(usage.memory_bytes)} of ${bytes(usage.machine_memory)}`],
      ["processes", String(usage.processes)],
      ...usage.gpus.flatMap(gpu),
    ]));
  }
}

function gpu({index, name, busy, memory_used: used, memory_total: all}) {
  const size = used === null || all === null ? "-" : `${bytes(used)} of ${bytes(all)}`;
  return [[`GPU ${index}, ${name}`, busy === null ? "-" : `${percent(busy)} busy`], [`GPU ${index}, memory`, size]];
}
