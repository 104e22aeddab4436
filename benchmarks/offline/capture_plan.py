"""Planning a capture: memory against the number of records, and tokenizing by several processes.

    python -m benchmarks.offline.capture_plan --data train.jsonl --tokenizer DIR [--records 1000000]

The questions and answers of GSM8K, repeated, with the tokenizer of a model. A process of its
own makes each plan; "peak" is its largest resident memory. The processes that tokenize are not
counted. They take seconds to start: the speed of several is that of the largest plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clients.config.capture import CaptureData


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/capture_plan.json"))
    parser.add_argument("--plan", nargs=2, help=argparse.SUPPRESS)  # FILE PROCESSES
    options = parser.parse_args()
    if options.plan:
        file, processes = options.plan
        print(json.dumps(measure_plan(Path(file), options.tokenizer, int(processes))))
        return
    cores = len(os.sched_getaffinity(0))
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for count, processes in (
            (options.records // 100, 1),
            (options.records // 10, 1),
            (options.records // 10, cores),
            (options.records, cores),
        ):
            file = write_records(options.data, Path(folder) / "data.jsonl", count)
            command = [sys.executable, "-m", "benchmarks.offline.capture_plan", "--data", str(file)]
            command += ["--tokenizer", str(options.tokenizer), "--plan", str(file), str(processes)]
            process = subprocess.run(command, capture_output=True, text=True, check=True)
            run = {"records": count, "processes": processes, **json.loads(process.stdout)}
            runs.append(run)
            print(
                f"{count:>9,} records, {processes} processes: {run['seconds']:.1f} s, "
                f"{run['tokens'] / run['seconds']:,.0f} tokens/s, peak {run['peak_mib']:.0f} MiB"
            )
    faster = compute_speedup(runs)
    print(f"{cores} processes are {faster:.2f} times as fast as one: {faster / cores:.2f} a core")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    result = {"machine": machine, "runs": runs, "times_faster": faster, "cores": cores}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def compute_speedup(runs: list[dict[str, Any]]) -> float:
    """Return the tokens per second of the largest plan over those of one process."""
    single_rate, parallel_rate = (run["tokens"] / run["seconds"] for run in (runs[1], runs[-1]))
    return float(parallel_rate / single_rate)


def write_records(data: Path, file: Path, count: int) -> Path:
    """Write `count` records: those of `data`, repeated."""
    lines = data.read_text().splitlines(keepends=True)
    with file.open("w") as out:
        for number in range(count):
            out.write(lines[number % len(lines)])
    return file


def measure_plan(file: Path, tokenizer: Path, processes: int) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from teacher_service.capture.plan import make_plan
    from teacher_service.capture.sequences import SequenceReader

    words = AutoTokenizer.from_pretrained(tokenizer)
    data = CaptureData(
        path=str(file), prompt_column="question", answer_column="answer", chat_template=False
    )
    reader = SequenceReader(data, words, 4096, processes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        capture_plan = make_plan(reader, Path(folder) / "plan", row_bytes=280, file_bytes=64 << 20)
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tokens = len(capture_plan.token_ids)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "peak_mib": after / 1024,
        "before_mib": before / 1024,
    }


if __name__ == "__main__":
    main()
