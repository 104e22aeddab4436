// The page of one job: progress, live curves, samples, log and configuration.

import {Actions} from "./actions.js";
import {AttemptsView} from "./attempts_view.js";
import {CheckpointsView} from "./checkpoints_view.js";
import {CommandsView} from "./commands_view.js";
import {Curves} from "./curves.js";
import {badge, bar, el, setText} from "./dom.js";
import {ago, duration, heldOutOf, klOf, number, percent, whyQueued} from "./figures.js";
import {EvaluationView} from "./evaluation_view.js";
import {History} from "./history.js";
import {LogView} from "./log_view.js";
import {PreviewView} from "./preview_view.js";
import {SamplesView} from "./samples_view.js";
import {Fault, follow, get, repeat} from "./server.js";
import {StagesView} from "./stages_view.js";
import {SummaryView} from "./summary_view.js";
import {facts} from "./teachers_page.js";
import {UsageView} from "./usage_view.js";

const MS_BETWEEN_DRAWINGS = 200;
// A job's place in the queue, its checkpoints and the length of its attempts change without events.
const SECONDS_BETWEEN_LOOKS = 5;

/** Shows a job in `root`; returns the function that closes the page. */
export function openJob(root, id, access) {
  const page = new JobPage(root, id, access);
  page.open();
  return () => page.close();
}

class JobPage {
  constructor(root, id, access) {
    this.root = root;
    this.asked = id;
    this.server = access.server;
    this.curves = new Curves();
    this.stages = new StagesView();
    this.actions = access.may_act ? new Actions((job) => this.learn(job)) : null;
    this.closers = [];
  }

  async open() {
    try {
      this.job = await get(`api/jobs/${encodeURIComponent(this.asked)}`);
    } catch (error) {
      this.fail(error);
      return;
    }
    if (this.closed) return;
    const path = `api/jobs/${encodeURIComponent(this.job.id)}`;
    this.history = new History(this.job.started_at);
    this.log = new LogView(path);
    this.preview = new PreviewView(path);
    this.samples = new SamplesView(path, this.job, this.history);
    this.evaluation = new EvaluationView(path);
    this.attempts = new AttemptsView(path);
    this.checkpoints = new CheckpointsView(path, this.job);
    this.usage = new UsageView(path);
    this.summary = new SummaryView(this.job);
    this.commands = new CommandsView(this.job.id, this.server);
    this.build();
    this.show();
    this.closers.push(follow(`${path}/events`, {
      extremes: (extremes) => Object.assign(this.history, {extremes}),
      steps: (events) => this.add(events),
      fault: (error) => this.fail(error),
    }));
    const redraw = new ResizeObserver(() => this.draw());
    redraw.observe(this.curves.main);
    const clock = setInterval(() => this.show(), 1000);
    this.closers.push(() => redraw.disconnect(), () => clearInterval(clock), () => this.usage.close(),
      repeat(SECONDS_BETWEEN_LOOKS, () => this.look()));
  }

  close() {
    this.closed = true;
    for (const end of this.closers) end();
    this.log?.close();
  }

  build() {
    const {job} = this;
    this.state = el("span", {role: "status"});
    this.reason = el("p", {class: "reason"});
    this.progress = el("div", {class: "progress"});
    this.facts = el("div");
    if (job.step) setText(this.curves.nothing, "Loading the steps ...");
    const config = el("pre", {class: "config", tabindex: 0}, JSON.stringify(job.config, null, 2));
    this.root.append(
      el("p", {class: "crumbs"}, el("a", {href: "#/"}, "Jobs"), " / ", el("code", {}, job.id)),
      el("div", {class: "title"}, el("h1", {}, job.name), this.state, this.actions?.element ?? null),
      this.summary.element, this.reason, this.progress, this.preview.element, this.evaluation.element, this.facts,
      el("div", {class: "cards"}, this.attempts.element, this.usage.element),
      el("h2", {}, "Curves"), this.curves.view.element, this.curves.nothing, this.curves.main,
      this.curves.others, this.curves.table, this.stages.element, ...this.samples.elements, this.checkpoints.element,
      this.log.element, this.commands.element,
      el("details", {}, el("summary", {}, "Configuration"), config));
  }

  add(events) {
    this.history.addColumns(events);
    const newest = this.history.last;
    if (Object.keys(events.metrics).some((name) => name.startsWith("eval/"))) this.samples.refresh();
    const moved = newest.state !== this.job.state || newest.attempt !== this.job.attempt;
    Object.assign(this.job, {
      state: newest.state,
      reason: newest.reason,
      phase: newest.phase,
      attempt: newest.attempt,
      step: newest.step,
      max_steps: newest.max_steps || this.job.max_steps,
    });
    this.show();
    if (moved) {
      if (this.job.kind === "eval") this.evaluation.refresh();
      this.refresh();
      this.attempts.refresh();
    }
    // Many events may arrive at once, so draw only after a short delay.
    this.drawing ??= setTimeout(() => {
      this.drawing = null;
      this.draw();
    }, MS_BETWEEN_DRAWINGS);
  }

  /** Reads the job again: its start and end times are not in its events. */
  async refresh() {
    try {
      this.learn(await get(`api/jobs/${encodeURIComponent(this.job.id)}`));
    } catch (error) {
      if (error instanceof Fault) this.fail(error);
    }
  }

  /** Updates what changes without events; of a job that has ended nothing does. */
  async look() {
    if (this.job.state === "QUEUED" || this.summary.isLive) await this.refresh();
    if (this.looked && this.job.ended_at) return;
    this.looked = true;
    if (this.job.kind === "eval") this.evaluation.refresh();
    await Promise.all([this.attempts.refresh(), this.checkpoints.refresh(), this.preview.refresh()]);
    this.draw();
  }

  learn(job) {
    Object.assign(this.job, job);
    this.samples.refresh();
    this.summary.show(this.job);
    this.show();
  }

  draw() {
    if (this.closed) return;
    const {history} = this;
    const marks = [...history.marks, ...history.evaluations, ...this.checkpoints.marks];
    this.curves.view.mark(history.placed(marks));
    this.curves.draw([{label: this.job.name, method: this.job.kind, history}]);
    this.stages.draw(this.history);
  }

  show() {
    const {job} = this;
    const phase = whyQueued(job) || job.phase;
    const label = `${job.state} ${phase}`;
    if (this.shown !== label) {
      this.shown = label;
      this.state.replaceChildren(badge(job.state), el("span", {class: "phase"}, phase));
      this.actions?.offer(job);
    }
    this.reason.className = `reason ${job.state.toLowerCase()}`;
    this.progress.className = `progress ${job.state.toLowerCase()}`;
    document.title = `${job.name} - distill`;
    setText(this.reason, job.reason);
    this.reason.hidden = !job.reason;
    this.showProgress();
    this.facts.replaceChildren(facts(this.figures()));
    this.log.follow(job.attempt);
    this.attempts.follow(job);
    this.commands.offer(job.state);
    if (job.state === "FAILED") this.showFailure();
    this.usage.follow(job.state);
  }

  /** Moves the log, opened at its end, and the commands for another attempt below the reason. */
  showFailure() {
    if (this.failed === this.job.attempt) return;
    this.failed = this.job.attempt;
    this.progress.after(this.log.element, this.commands.element);
    this.log.element.open = this.commands.element.open = true;
  }

  showProgress() {
    const {job} = this;
    const left = this.history.secondsLeft;
    const steps = job.max_steps ? `step ${job.step} of ${job.max_steps}` : `step ${job.step}`;
    const eta = left === null ? "" : `, ${duration(left)} left`;
    this.progress.replaceChildren(
      bar(job.step, job.max_steps, "progress"), el("span", {}, steps + eta));
  }

  figures() {
    const {job} = this;
    const metrics = {...job.metrics, ...this.history.metrics};
    const ended = job.ended_at || Date.now() / 1000;
    const pairs = [
      ["loss", number(metrics.loss)],
      ["KL", number(klOf(metrics))],
      ["reward", number(metrics["reward/mean"])],
      ["held-out loss", number(heldOutOf(metrics))],
      ["accuracy", percent(metrics["eval/accuracy"])],
      ["cut answers", metrics["length/truncated"] ? percent(metrics["length/truncated"]) : "-"],
      ["tokens/s", number(metrics.tokens_per_sec)],
      ["teacher wait", percent(this.history.teacherWait)],
      ["attempt", String(job.attempt)],
      ["submitted", ago(job.created_at)],
      ["ran for", job.started_at ? duration(ended - job.started_at) : "-"],
      ["ended", ago(job.ended_at)],
    ];
    return pairs.filter(([, value]) => value !== "-");
  }

  fail(error) {
    const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
    this.notice?.remove();
    this.notice = el("p", {class: "notice", role: "alert"}, sentence);
    this.root.prepend(this.notice);
  }
}
