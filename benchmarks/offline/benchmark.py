"""Offline distillation: the quality of each tail mode, and the cost of a store.

    python -m benchmarks.offline --data train.jsonl [--work runs/offline] [--kills 20] [--quick]

`--data` has the columns question and answer, as GSM8K does. The benchmark makes a teacher and a
student from the first records, captures the teacher's rows for them, trains the student from the
store without a teacher, and evaluates on held-out records. Writes docs/offline.md, the same numbers
as benchmarks/results/offline.json and, if matplotlib is installed, docs/offline.png. Of the
timings, only ratios are comparable between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.offline.kills import compare_killed_capture
from benchmarks.offline.material import (
    OfflineMaterial,
    OfflineSizes,
    capture,
    capture_settings,
    describe_store,
    make_material,
)
from benchmarks.offline.page import check_targets, format_page
from benchmarks.offline.picture import draw
from benchmarks.offline.speed import compare_capture_rates, compare_step_times
from benchmarks.offline.training import train_all, training_methods
from benchmarks.shared.pages import write_page

FULL = OfflineSizes(
    records=3072,
    held_out=128,
    vocabulary=4096,
    max_tokens=256,
    teacher=(3, 128, 600),
    student=(2, 64, 60),
    steps=120,
    points=4,
    per_step=16,
    seeds=3,
    shard_bytes=256 << 10,
    timed_records=256,
    timed_steps=16,
    repetitions=5,
)
QUICK = OfflineSizes(
    records=64,
    held_out=8,
    vocabulary=320,
    max_tokens=64,
    teacher=(1, 32, 4),
    student=(1, 32, 2),
    steps=4,
    points=2,
    per_step=4,
    seeds=1,
    shard_bytes=4 << 10,
    timed_records=32,
    timed_steps=3,
    repetitions=1,
    brief=True,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--work", type=Path, default=Path("runs/offline"), help="keeps the models")
    parser.add_argument("--kills", type=int, help="by default 20")
    parser.add_argument("--quick", action="store_true", help="tiny, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/offline.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    sizes = QUICK if options.quick else FULL
    kills = options.kills if options.kills is not None else 1 if options.quick else 20
    material = make_material(options.data, options.work, sizes)
    work = (options.work / f"run-{os.getpid()}").absolute()
    work.mkdir()
    try:
        result = run_benchmark(work, material, sizes, kills)
    except BaseException:
        print(f"what was made until then, with its logs: {work}")
        raise
    shutil.rmtree(work)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.docs.mkdir(parents=True, exist_ok=True)
    print(draw(result, options.docs / "offline.png"))
    print(write_page(options.docs / "offline.md", format_page(result)))
    for target in result["targets"]:
        verdict = "met " if target["met"] else "MISS"
        print(f"{verdict} {target['target']}: {target['found']}")


def run_benchmark(
    work: Path, material: OfflineMaterial, sizes: OfflineSizes, kills: int
) -> dict[str, Any]:
    began = time.monotonic()
    stores = make_stores(work, material, sizes)
    with ThreadPoolExecutor(1) as capture_thread:
        settings = capture_settings(
            material, material.train, sizes, sizes.top_k, sizes.tail_samples
        )
        kills_future = capture_thread.submit(
            compare_killed_capture, work / "kills", settings, stores["top"], kills
        )
        learned = train_all(work, material, stores, sizes, parallel=os.cpu_count() or 1)
        kill_result = kills_future.result()
    # Run these alone, because they measure time.
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "sizes": asdict(sizes),
        "learned": learned,
        "kills": kill_result,
        "stores": {name: describe_store(path) for name, path in stores.items()},
        "step": compare_step_times(work, material, stores, sizes),
        "capture": compare_capture_rates(work / "rates", material, sizes),
    }
    result["minutes"] = (time.monotonic() - began) / 60
    result["targets"] = check_targets(result)
    return result


def make_stores(work: Path, material: OfflineMaterial, sizes: OfflineSizes) -> dict[str, Path]:
    """Capture the training and the held-out records in each layout that a loss needs."""
    layouts = {"top": (sizes.top_k, sizes.tail_samples), "samples": (0, sizes.only_samples)}
    stores = {}
    for name in dict.fromkeys(method.store for method in training_methods(sizes)):
        for suffix, data in (("", material.train), (", held out", material.held_out)):
            settings = capture_settings(material, data, sizes, *layouts[name])
            store = work / "stores" / (name + suffix).replace(", ", "-").replace(" ", "-")
            stores[name + suffix] = capture(settings, store)
    return stores


if __name__ == "__main__":
    main()
