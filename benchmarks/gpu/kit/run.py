#!/usr/bin/env python3
"""Tests and measures this machine's GPU, in parts with a time limit each. Installs nothing.

    ./run-gpu [PART ...] [--out DIRECTORY] [--cpu]

Parts: tests (those marked gpu), checks (exact checks at real sizes, and killed runs), ceilings
(copies, products, kernels), figures (loss, heads, updates). Without a PART: tests, checks and
ceilings, which take at most 500 seconds together. Each part prints one line, and writes PART.log
and PART.json. At its limit a part is interrupted, and what it has measured is kept.

--cpu rehearses without a GPU: small sizes, ten times the limits, and numbers without meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE, PACKAGES = HERE / "source", HERE / "packages"
LIMITS = {"tests": 150, "checks": 230, "ceilings": 120, "figures": 900}
REHEARSAL = 10  # times the limits
SHOWN = 5  # failures of a part that are printed
PYTHON, PROCESSOR = (3, 12), "x86_64"  # of the kit's packages
GRACE = 15  # seconds between the interrupt and the end of a part

FACTS = """
import importlib.metadata, json, platform, shutil, torch
import accelerate, datasets, grpc_health.v1.health, pydantic, transformers
import student_trainer.assembly, teacher_service.program
names = ("torch", "triton", "transformers", "accelerate", "peft", "numpy", "protobuf", "pydantic")
versions = {}
for name in names:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
facts = {"python": platform.python_version(), "gpus": torch.cuda.device_count(), **versions}
facts |= {"compiler": shutil.which("cc") or shutil.which("gcc")}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    facts |= {"gpu": gpu.name, "gib": round(gpu.total_memory / 2**30, 1)}
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Result:
    """The end of a part. ended: "passed", "failed" or "out of time"."""

    part: str
    ended: str
    seconds: float
    limit: int
    summary: str
    failures: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"{self.part}: {self.ended}: {self.summary}; {self.seconds:.0f} of {self.limit} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(LIMITS))
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    options = parser.parse_args()
    parts = options.parts or ["tests", "checks", "ceilings"]
    if unknown := [part for part in parts if part not in LIMITS]:
        parser.error(f"unknown part {unknown[0]!r}; the parts are {', '.join(LIMITS)}")
    if (sys.version_info[:2], platform.machine()) != (PYTHON, PROCESSOR):
        machine = f"Python {platform.python_version()} on {platform.machine()}"
        wanted = f"Python {PYTHON[0]}.{PYTHON[1]} on {PROCESSOR}"
        parser.error(f"the kit's packages are for {wanted}, and this is {machine}")
    out = options.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for part in parts:  # results of an earlier run are no results of this one
            (out / f"{part}.json").unlink(missing_ok=True)
        (out / "machine.json").unlink(missing_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    try:
        return run_parts(parts, out, cpu=options.cpu)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run_parts(parts: list[str], out: Path, *, cpu: bool) -> int:
    facts = read_facts(out)
    if facts is None:
        return 2
    if not facts["gpus"] and not cpu:
        print("torch finds no GPU; --cpu rehearses without one", file=sys.stderr)
        return 2
    ended = []
    for part in parts:
        result = run_part(part, out, cpu=cpu)
        (out / f"{part}.json").write_text(json.dumps(vars(result), indent=1) + "\n")
        print(result.line, flush=True)
        for failure in result.failures[:SHOWN]:
            print(f"  {failure}", flush=True)
        if (others := len(result.failures) - SHOWN) > 0:
            print(f"  and {others} others in {out / part}.json", flush=True)
        ended.append(result.ended)
    return 0 if set(ended) == {"passed"} else 1


def environment() -> dict[str, str]:
    """Return the environment of the parts: the kit's source and packages, and no network."""
    path = os.pathsep.join([str(SOURCE), str(PACKAGES)])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def read_facts(out: Path) -> dict | None:
    """Print and write the versions of this machine; None if the product cannot be imported."""
    command = [sys.executable, "-c", FACTS]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1]
        print(f"this machine's Python cannot import the product: {reason}", file=sys.stderr)
        return None
    facts = json.loads(process.stdout.splitlines()[-1])
    (out / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    return facts


def run_part(part: str, out: Path, *, cpu: bool) -> Result:
    limit = LIMITS[part] * (REHEARSAL if cpu else 1)
    report = out / f"{part}.xml"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    codes: list[int | None] = []
    with (out / f"{part}.log").open("wb") as log:
        for command in commands_of(part, out, report, cpu=cpu):
            if "--out" in command:
                Path(command[-1]).unlink(missing_ok=True)
            left = limit - (time.monotonic() - began)
            codes.append(run_command(command, log, left) if left > 0 else None)
    seconds = time.monotonic() - began
    ended = "out of time" if None in codes else "failed" if any(codes) else "passed"
    try:
        summary, failures = read_report(report)
        if ended == "passed" and summary.startswith("0 passed") and not cpu:
            ended = "failed"  # all tests were skipped, so nothing is known about the GPU
    except (FileNotFoundError, ElementTree.ParseError):  # a killed pytest writes no whole report
        summary, failures = f"{codes.count(0)} of {len(codes)} programs", ()
    return Result(part, ended, round(seconds, 1), limit, summary, failures)


def commands_of(part: str, out: Path, report: Path, *, cpu: bool) -> list[list[str]]:
    """Return the commands of a part, which run one after the other."""
    workers = str(min(4, os.cpu_count() or 1))
    pytest = ["pytest", "-q", "-m", "gpu", "-n", workers, "--tb=short", "-p", "no:cacheprovider"]
    # Packages are compiled at their first import here, and some have invalid escape sequences.
    pytest += ["-W", "ignore::SyntaxWarning", f"--junitxml={report}"]
    quick = ["--device", "cpu", "--quick"] if cpu else []
    if part == "tests":
        return [["-m", *pytest, *list_marked_files()]]
    if part == "checks":
        return [["-m", *pytest, "tests/gpu"]]
    modules = {
        "ceilings": ["benchmarks.gpu.ceilings", "benchmarks.gpu.kernels"],
        "figures": ["benchmarks.gpu", "benchmarks.gpu.training"],
    }[part]
    return [
        ["-m", module, *quick, "--out", str(out / f"{module.removeprefix('benchmarks.')}.json")]
        for module in modules
    ]


def list_marked_files() -> list[str]:
    """Return the test files with tests marked gpu, except those of other parts."""
    files = sorted((SOURCE / "tests").rglob("test_*.py"))
    marked = [path for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]
    names = [str(path.relative_to(SOURCE)) for path in marked]
    return [name for name in names if not name.startswith(("tests/gpu/", "tests/vllm/"))]


def run_command(arguments: list[str], log: object, limit: float) -> int | None:
    """Run Python in a process group; return its exit code, or None at the limit."""
    command = [sys.executable, *arguments]
    options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
    # A shell starts background programs with SIGINT ignored, and a child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=SOURCE, env=environment(), **options)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:  # pytest writes its report at an interrupt
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        with suppress(ProcessLookupError):  # it and its children
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def read_report(report: Path) -> tuple[str, tuple[str, ...]]:
    """Return counts, and the failures with their first line, of a JUnit report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [child for child in case if child.tag in ("failure", "error")]
        counts["failed" if faults else "skipped" if list(case.iter("skipped")) else "passed"] += 1
        if faults:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            reason = (faults[0].get("message") or "").strip().splitlines() or [""]
            failures.append(f"{name}: {reason[0][:200]}")
    return ", ".join(f"{count} {name}" for name, count in counts.items()), tuple(failures)


if __name__ == "__main__":
    sys.exit(main())
