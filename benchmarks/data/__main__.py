"""Seconds and memory until the first batch, against the number of records, and after a resume.

    python -m benchmarks.data [--records 10000 100000 1000000] [--ranks 1 2] [--parts ...]

Each rank is a process of its own that reads the records of a job as its trainer does, and encodes
the prompts of one step; models are not loaded. Ranks start at the same time. A first attempt has an
empty cache, a second one the cache of the first. `own`: growth of the memory that no file backs, of
the rank with the largest growth; `all`: growth of the proportional set sizes (PSS) of all ranks,
which counts a page of the mapped file once. Libraries are loaded before. `cpu_seconds`: of the
slowest rank, which other programs on the machine change less than `seconds`.

- start: (on_policy, sft, rl) x ranks x (first, second attempt)
- others: `datasets` (load_dataset, and the first 32 records) and TRL (SFTTrainer's first batch,
  which tokenizes all records first)
- resume: the batch of steps 10, 1,000 and 100,000 of a data set of which some records are left out,
  and whether it equals that of a process which reads all steps in order
- broken: the errors of tests/student_trainer/data/test_broken_records.py, in the middle of the
  largest file

Resumes if interrupted. Writes benchmarks/results/data.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.data.rank import METHODS, OTHERS
from benchmarks.shared.results import RESULTS, add_run, describe_machine, load_results

PARTS = ("start", "others", "resume", "broken")
RESUMED_STEPS = (10, 1_000, 100_000)
# Of the data set of the resumed jobs; a step has 8 records.
RESUMED_RECORDS = 100_000
MAX_TRL_RECORDS = 100_000  # it tokenizes all of them
LINE = (
    '{{"prompt": "Question {0}: how many apples are {1} apples and {2} more apples, if {3} of them'
    ' are eaten?{4}", "answer": "{5}"}}\n'
)


def write_records(path: Path, count: int, long_share: int = 0) -> Path:
    """Write records of about 130 bytes. Each of `long_share` records is too long for the jobs."""
    if not path.exists():
        partial = path.with_suffix(".part")
        with partial.open("w") as file:
            for number in range(count):
                first, second, eaten = number % 971, number % 313, number % 17
                words = " and" * 300 if long_share and number % long_share == 0 else ""
                answer = first + second - eaten
                file.write(LINE.format(number, first, second, eaten, words, answer))
        partial.rename(path)
    return path


def run_ranks(count: int, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return what `count` ranks measure at the same time, with the cache directory `cache`."""
    command = [sys.executable, "-m", "benchmarks.data.rank", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HOME": str(cache / "hf")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        for _ in range(count)
    ]
    for rank in ranks:  # it has loaded its libraries
        assert rank.stdout is not None
        rank.stdout.readline()
    replies = []
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(b"go\n")
        rank.stdin.flush()
    for rank in ranks:
        reply, _ = rank.communicate()
        if rank.returncode:
            raise subprocess.CalledProcessError(rank.returncode, command)
        replies.append(json.loads(reply))
    return replies


def summarize(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all ranks of an attempt."""
    assert len({reply["digest"] for reply in replies}) == 1, "all ranks have the same batch"
    return {
        "seconds": round(max(reply["seconds"] for reply in replies), 2),
        "cpu_seconds": round(max(reply["cpu_seconds"] for reply in replies), 2),
        "own_mib": round(max(reply["own_mib"] for reply in replies), 1),
        "all_mib": round(sum(reply["pss_mib"] for reply in replies), 1),
        "digest": replies[0]["digest"],
    }


def measure_start(folder: Path, records: int, method: str, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the run of a first attempt, and of a second one."""
    file = write_records(folder / f"{records}.jsonl", records)
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    for attempt in ("first", "second"):
        replies = run_ranks(ranks, cache, method, str(file), "1")
        yield {"records": records, "reader": method, "ranks": ranks, "attempt": attempt} | (
            summarize(replies)
        )


def measure_resume(folder: Path) -> dict[str, Any]:
    """Return the seconds until the batch of each step, and whether the batches are right.

    The first attempt reads the steps in order, and fills the cache.
    """
    file = write_records(folder / "resumed.jsonl", RESUMED_RECORDS, long_share=50)
    cache = folder / "resume-cache"
    shutil.rmtree(cache, ignore_errors=True)
    steps = [str(step) for step in RESUMED_STEPS]
    (undisturbed,) = run_ranks(1, cache, "sft", str(file), "in-order", *steps)
    seconds, is_equal = {}, True
    for step in RESUMED_STEPS:
        (resumed,) = run_ranks(1, cache, "sft", str(file), str(step))
        seconds[step] = round(resumed["seconds"], 2)
        is_equal &= resumed["digest"] == undisturbed["digests"][str(step)]
    return {"reader": "sft", "resumed": seconds, "equal": is_equal, "records": RESUMED_RECORDS}


def measure_errors(folder: Path, records: int) -> dict[str, Any]:
    """Return how many broken records give the same error in a file of `records` as in one of 3."""
    from tests.student_trainer.data.test_broken_records import BROKEN, error_of

    os.environ["XDG_CACHE_HOME"] = str(folder / "error-cache")
    differences = []
    for name, (columns, broken) in BROKEN.items():
        line = broken if isinstance(broken, bytes) else json.dumps(broken).encode()
        small, large = (error_of(folder / "broken.jsonl", columns, line, n) for n in (3, records))
        differences += [] if small == large else [name]
    return {"broken": len(BROKEN), "different": differences, "records": records}


def missing_runs(
    folder: Path, options: argparse.Namespace, runs: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the runs that `runs` lacks."""
    present = {
        (run["records"], run["reader"], run["ranks"])
        for run in runs
        if run.get("attempt") == "second"
    }
    for records in options.records if "start" in options.parts else ():
        for method in METHODS:
            for ranks in options.ranks:
                if (records, method, ranks) not in present:
                    yield from measure_start(folder, records, method, ranks)
    for records in options.records if "others" in options.parts else ():
        for library in OTHERS:
            is_too_long = library == "TRL" and records > MAX_TRL_RECORDS
            if (records, library, 1) not in present and not is_too_long:
                yield from measure_start(folder, records, library, 1)
    if "resume" in options.parts and not any("resumed" in run for run in runs):
        yield measure_resume(folder)
    if "broken" in options.parts and not any("broken" in run for run in runs):
        yield measure_errors(folder, max(options.records) + 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=RESULTS / "data.json")
    options = parser.parse_args(arguments)
    result = load_results(options.out, {"machine": describe_machine()})
    with tempfile.TemporaryDirectory() as folder:
        for run in missing_runs(Path(folder), options, list(result["runs"])):
            run["load"] = round(os.getloadavg()[0], 1)  # of other programs too
            print(json.dumps(run), flush=True)
            add_run(options.out, result, run)


if __name__ == "__main__":
    main()
