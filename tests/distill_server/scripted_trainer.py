"""A trainer without a model: it follows the run directory's contract and fails on request.

The job's name has its instructions, as `key=value` words:
    pause=SECONDS      per step (default 0.01)
    crash_at=STEP      exit without a verdict: by `crash_code`, or by SIGKILL (default)
    crashes=N          only in the first N attempts
    fail_at=STEP       end with the verdict "failed"
    hang_at=STEP       make no step any more, and look at no control.json
    wait_at=STEP       make no step any more until it is asked to stop
    hangs=N            only in the first N attempts; of hang_at and of wait_at
    every=STEPS        between checkpoints (default 5)
    best=STEP          evaluate at each checkpoint but the last: eval/kl is how far it is from STEP
    deaf=1             ignore SIGTERM
    orphan=1           leave a process in a session of its own
    tells_gpus=1       print which GPUs it may use
    tokens=N           of a step, told among its metrics
    lag=N              an engine samples N steps ahead: metrics of importance weights
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text)
    partial.replace(path)


class Trainer:
    def __init__(self, run: Path, attempt: int, from_step: int | None) -> None:
        self.run = run
        self.attempt = attempt
        self.config = json.loads((run / "job.json").read_text())
        self.script = dict(w.split("=", 1) for w in self.config["name"].split() if "=" in w)
        self.max_steps = self.config["max_steps"]
        self.stop = False
        checkpoint_steps = [int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")]
        self.step = from_step if from_step is not None else max(checkpoint_steps, default=0)

    def number(self, name: str, default: float) -> float:
        return float(self.script.get(name, default))

    def say(self, verdict: str, phase: str = "", reason: str = "") -> None:
        status: dict[str, Any] = {"attempt": self.attempt, "verdict": verdict, "phase": phase}
        status |= {"step": self.step, "max_steps": self.max_steps, "reason": reason}
        replace(self.run / "status.json", json.dumps(status))

    def checkpoint(self) -> None:
        path = self.run / "checkpoints" / f"step-{self.step:06d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights.bin").write_bytes(bytes([self.step % 256]) * 1000)

    def forget_redone_steps(self) -> None:
        metrics = self.run / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text().splitlines(keepends=True)
            kept_lines = [line for line in lines if json.loads(line)["step"] <= self.step]
            replace(metrics, "".join(kept_lines))

    def requested_stop(self) -> str:
        control = self.run / "control.json"
        stop_request = json.loads(control.read_text())["stop"] if control.exists() else ""
        return stop_request or ("checkpoint" if self.stop else "")

    def misbehave(self) -> None:
        if self.attempt <= self.number("crashes", 1000) and self.step == self.number(
            "crash_at", -1
        ):
            print("about to crash", flush=True)
            if "crash_code" in self.script:
                os._exit(int(self.script["crash_code"]))
            os.kill(os.getpid(), signal.SIGKILL)
        if self.attempt <= self.number("hangs", 1000) and self.step == self.number("hang_at", -1):
            while not self.stop:
                time.sleep(0.02)

    def wait_for_stop(self) -> None:
        if self.attempt <= self.number("hangs", 1000) and self.step == self.number("wait_at", -1):
            while not self.requested_stop():
                time.sleep(0.02)

    def main(self) -> int:
        signal.signal(signal.SIGTERM, self.on_sigterm)
        with (self.run / ".trainer.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("another trainer is alive", flush=True)
                return 6
            return self.train()

    def train(self) -> int:
        if "tells_gpus" in self.script:
            print("GPUs:", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
        self.forget_redone_steps()
        self.say("running", "training")
        print(f"attempt {self.attempt} starts after step {self.step}", flush=True)
        if "orphan" in self.script:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with (self.run / "metrics.jsonl").open("a", buffering=1) as metrics:
            while self.step < self.max_steps:
                if stop := self.requested_stop():
                    if stop == "checkpoint":
                        self.checkpoint()
                    self.say("cancelled")
                    return 0
                self.step += 1
                time.sleep(self.number("pause", 0.01))
                self.misbehave()
                if self.step == self.number("fail_at", -1):
                    self.say("failed", reason="the loss is not finite")
                    return 1
                line = {"attempt": self.attempt, "step": self.step, "loss": 1 / self.step}
                if "best" in self.script and not self.step % 5 and self.step < self.max_steps:
                    line["eval/kl"] = abs(self.step - self.number("best", 0))
                if "timed" in self.script:
                    line["time/step"] = self.number("pause", 0)
                if "tokens" in self.script:
                    line["tokens"] = int(self.script["tokens"])
                if "lag" in self.script:
                    lag = min(self.step - 1, int(self.script["lag"]))
                    line |= {"rollout/lag": lag, "ratio/kl": 0.01 * lag, "ratio/bounded": 0.0}
                    line |= {"ratio/mean": 1.0, "ratio/ess": 1 - 0.05 * lag}
                metrics.write(json.dumps(line) + "\n")
                print(f"step {self.step}", flush=True)
                self.say("running", "training")
                if self.step % self.number("every", 5) == 0:
                    self.checkpoint()
                self.wait_for_stop()
        self.export()
        self.say("succeeded")
        return 0

    def on_sigterm(self, *_: object) -> None:
        self.stop = "deaf" not in self.script

    def export(self) -> None:
        (self.run / "export" / "nested").mkdir(parents=True, exist_ok=True)
        (self.run / "export" / "config.json").write_text("{}")
        (self.run / "export" / "empty.txt").write_text("")
        (self.run / "export" / "nested" / "model.bin").write_bytes(os.urandom(1 << 20) * 2 + b"end")


if __name__ == "__main__":
    _, path, attempt, from_step = sys.argv
    sys.exit(Trainer(Path(path), int(attempt), int(from_step) if from_step else None).main())
