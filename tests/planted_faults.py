"""Faults planted one at a time, to see that the tests find them.

    python -m tests.planted_faults [--fast] [--only NAME ...]

copies the files that git tracks to a temporary directory, changes one line there, and runs the
tests of `make test` in the folders where the fault belongs, or with `--fast` those of `make
test-fast` in all its folders, up to the first failure. A fault is found when a test fails. Prints a
row a fault; the exit code is 0 if all were found. It is no test: it takes half an hour.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """`before` is replaced by `after` in `file`, where it stands once."""

    name: str
    file: str
    before: str
    after: str
    tests: Sequence[str]


LOSSES = ("tests/student_trainer/losses",)
DATA = ("tests/student_trainer/data",)
CHECKPOINTS = ("tests/student_trainer/checkpoints",)
SERVER = ("tests/distill_server/runners/test_machine.py", "tests/distill_server")
FAULTS = (
    Fault(
        "loss: the tail of the bucket is left out",
        "student_trainer/losses/topk.py",
        "head = head + _kl_terms(p.tail_logmass, q.tail_logmass, direction)",
        "head = head + 0 * p.tail_logmass.exp()",
        LOSSES,
    ),
    Fault(
        "loss: draws are not divided by their number",
        "student_trainer/losses/topk.py",
        "log_v = log_p - draw_logprobs - math.log(log_p.shape[1])",
        "log_v = log_p - draw_logprobs - 0 * math.log(log_p.shape[1])",
        LOSSES,
    ),
    Fault(
        "loss: the control variate of forward KL has the wrong sign",
        "student_trainer/losses/topk.py",
        "return -w * gap - control *",
        "return -w * gap + control *",
        LOSSES,
    ),
    Fault(
        "loss: the advantage is not centred",
        "student_trainer/losses/advantages.py",
        "advantages = torch.where(has_reward, rewards - mean, zeros)",
        "advantages = torch.where(has_reward, rewards - 0 * mean, zeros)",
        LOSSES,
    ),
    Fault(
        "loss: GAE sees the value of the next sequence",
        "student_trainer/losses/advantages.py",
        "torch.where(sequence[:-offset] == sequence[offset:], values[offset:], 0)",
        "values[offset:]",
        LOSSES,
    ),
    Fault(
        "importance: the ratio is upside down",
        "student_trainer/losses/policy.py",
        "return log_p - other_logprobs.detach().clamp(min=LOWEST_LOGPROB)",
        "return other_logprobs.detach().clamp(min=LOWEST_LOGPROB) - log_p",
        (*LOSSES, "tests/student_trainer/objectives"),
    ),
    Fault(
        "importance: the clip bounds nothing from above",
        "student_trainer/losses/off_policy.py",
        "return weights if clip is None else weights.clamp(*clip)",
        "return weights if clip is None else weights.clamp(min=clip[0])",
        (*LOSSES, "tests/student_trainer/objectives"),
    ),
    Fault(
        "importance: the second clip of PPO is open",
        "student_trainer/losses/policy.py",
        "above = (advantages > 0) & (ratio > 1 + clip_high)",
        "above = (advantages > 0) & (ratio > 2 + clip_high)",
        (*LOSSES, "tests/student_trainer/objectives"),
    ),
    Fault(
        "mask: rows belong to the token before",
        "student_trainer/data/batch.py",
        "return outputs[self.line, self.position - 1]",
        "return outputs[self.line, self.position]",
        (*DATA, "tests/student_trainer/methods"),
    ),
    Fault(
        "mask: sequences of a line see each other's positions",
        "student_trainer/data/batch.py",
        "positions[line, first:] = torch.arange(width - first)",
        "pass",
        (*DATA, "tests/student_trainer/methods"),
    ),
    Fault(
        "mask: what an environment wrote is learned",
        "student_trainer/data/sequence.py",
        "return positions if self.own is None else positions[self.own]",
        "return positions",
        (*DATA, "tests/student_trainer/rollouts", "tests/student_trainer/methods"),
    ),
    Fault(
        "wire: two of the eighteen bits of an id are lost",
        "protos/rows/codec.py",
        "flat |= low",
        "flat = low.astype(np.int32)",
        ("tests/protos",),
    ),
    Fault(
        "wire: the checksum is not compared",
        "protos/rows/codec.py",
        "if _checksum(view[: _PREFIX.size], payload) != view[_PREFIX.size : HEADER_BYTES]:",
        "if False:",
        ("tests/protos",),
    ),
    Fault(
        "cache: the temperature is not in the key",
        "clients/teacher/query.py",
        "float(np.float32(query.temperature)).hex(),",
        "",
        ("tests/clients/teacher", "tests/teacher_service/cache"),
    ),
    Fault(
        "cache: a block of another shape is a hit",
        "teacher_service/cache/row_cache.py",
        r"re: +raise Corrupt\(f\"\(rows, k, tail samples.*",
        "        pass",
        ("tests/teacher_service/cache",),
    ),
    Fault(
        "cache: memory is never given back",
        "teacher_service/cache/tier.py",
        "while self._size > self._max_bytes:",
        "while False:",
        ("tests/teacher_service/cache",),
    ),
    Fault(
        "scheduler: one more job starts than there are slots",
        "distill_server/runners/machine.py",
        "if sum(share.slots for share in shares) >= self.slots:",
        "if sum(share.slots for share in shares) > self.slots:",
        SERVER,
    ),
    Fault(
        "scheduler: retries never end",
        "distill_server/scheduler.py",
        "elif retries > self._policy.retries:",
        "elif False:",
        SERVER,
    ),
    Fault(
        "checkpoint: a damaged one is taken for the newest",
        "student_trainer/checkpoints/checkpoint.py",
        r"re:    for path in reversed\(_list_checkpoints\(root\)\):\n        if intact\(path\):",
        "    for path in reversed(_list_checkpoints(root)):\n        if True:",
        CHECKPOINTS,
    ),
    Fault(
        "checkpoint: the best one is deleted with the old ones",
        "student_trainer/checkpoints/checkpoint.py",
        "if _step_of(path) == best:",
        "if False:",
        (*CHECKPOINTS, "tests/end_to_end/test_best_checkpoint.py"),
    ),
)


def copy_checkout(place: Path) -> None:
    """Copy what git tracks, as it is in the working tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)


def plant(text: str, fault: Fault) -> str:
    """Return the text with the fault. Raises ValueError if its place is not there exactly once."""
    is_pattern = fault.before.startswith("re:")
    pattern = fault.before[3:] if is_pattern else re.escape(fault.before)
    changed, count = re.subn(pattern, lambda _: fault.after, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{fault.name}: its place is {count} times in {fault.file}")
    return changed


def first_failure(place: Path, arguments: Sequence[str]) -> str:
    """Run pytest in the copy and return the first test that fails; empty if none does."""
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-rf", *arguments]
    command += ["-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if ended.returncode == 0:
        return ""
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    return failures[0] if failures else ended.stdout[-300:] + ended.stderr[-300:]


def fast_folders() -> list[str]:
    """Return the folders of `make test-fast`."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    folders = re.findall(r"^FAST := (.*)$", makefile, re.MULTILINE)[0]
    names = re.sub(r"\$\(addprefix |[()]|tests/,|student_trainer/,", " ", folders).split()
    return [
        next(p for p in (f"tests/{name}", f"tests/student_trainer/{name}") if (ROOT / p).exists())
        for name in names
    ]


def first_fast_failure(place: Path, fault: Fault) -> str:
    """Run `make test-fast`, those of its folders first where the fault belongs."""
    ignored = ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
    options = ["--no-processes", "-n2", *(f"-Wignore::{name}" for name in ignored)]
    folders = fast_folders()
    near = [path for path in fault.tests if any(path.startswith(folder) for folder in folders)]
    near += [folder for folder in folders if any(folder.startswith(path) for path in fault.tests)]
    failure = first_failure(place, [*options, *near]) if near else ""
    return failure or first_failure(place, [*options, *folders])


def main() -> int:
    """Plant each fault, run the tests, and print what found it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="with the tests of make test-fast")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of the faults")
    options = parser.parse_args()
    chosen = [f for f in FAULTS if not options.only or any(o in f.name for o in options.only)]
    count = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        copy_checkout(place)
        for fault in chosen:
            file = place / fault.file
            sound = file.read_text()
            file.write_text(plant(sound, fault))
            began = time.monotonic()
            failure = (
                first_fast_failure(place, fault)
                if options.fast
                else first_failure(place, fault.tests)
            )
            file.write_text(sound)
            count += bool(failure)
            seconds = time.monotonic() - began
            print(f"{fault.name} | {failure or 'NOT FOUND'} | {seconds:.0f} s", flush=True)
    print(f"{count} of {len(chosen)} found")
    return int(count < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
