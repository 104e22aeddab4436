"""A push of weights to a rollout engine: its seconds against a lower bound, and its memory.

    .venv-vllm/bin/python -m benchmarks.rollouts.weight_push [--quick] [--pushes N] [--out FILE]

Random weights in float32 in the sizes of SmolLM2-135M, snapshots in memory (/dev/shm), one thread.
"write": the trainer's side, from the model to its files. "load": the engine's side, from the call
to verified weights. "least": reading the same files and copying every weight once, in this process,
in turn with the loads. "adapters": of a LoRA student. Memory is that of all processes without
mapped files, after each of N loads of two versions in turn; growth: of the least over the last
quarter above the least over the second quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load

from benchmarks.rollouts.engine import LARGE, SMALL
from student_trainer.checkpoints.export import write_weights


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--pushes", type=int, default=200)
    parser.add_argument("--engines", nargs="*", default=["hf", "vllm"], choices=("hf", "vllm"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/weight_push.json"))
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    torch.set_num_threads(1)
    size, pushes = SMALL if options.quick else LARGE, options.pushes
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread, "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        "pushes": pushes,
        "cases": [],
    }
    for engine in options.engines:
        for adapters in (False, True):
            row = measure_pushes(engine, size, pushes, adapters)
            result["cases"].append({"engine": engine, "adapters": adapters, **row})
            printed_case = {k: v for k, v in result["cases"][-1].items() if k != "resident"}
            print(json.dumps(printed_case), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def measure_pushes(name: str, size: dict[str, int], pushes: int, adapters: bool) -> dict[str, Any]:
    from tests.vllm.rollouts import RANK, AdaptedStudent, Student

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder)
        student = AdaptedStudent(path, **size) if adapters else Student(path, **size)
        with asyncio.Runner() as runner:
            engine = make_engine(name, student.path, RANK if adapters else 0)
            versions = []
            for _ in range(2):
                student.learn()
                versions.append(student.snapshot())
            times: dict[str, list[float]] = {"write": [], "load": [], "least": []}
            resident = []
            for push in range(pushes):
                version = versions[push % 2]
                if not adapters:
                    began = time.perf_counter()
                    written = path / "written"
                    written.mkdir(exist_ok=True)
                    weights = student.model.state_dict(keep_vars=True)
                    write_weights(written, student.model, weights, torch.float32)
                    times["write"].append(time.perf_counter() - began)
                began = time.perf_counter()
                runner.run(engine.load(version))
                times["load"].append(time.perf_counter() - began)
                began = time.perf_counter()
                size_read = read_and_copy(version.directory)
                times["least"].append(time.perf_counter() - began)
                resident.append(resident_bytes())
            runner.run(engine.close())
    return summarize(size_read, times, resident)


def summarize(size: int, times: dict[str, list[float]], resident: list[int]) -> dict[str, Any]:
    ratios = [
        seconds / least for seconds, least in zip(times["load"], times["least"], strict=True)
    ][1:]
    quarter = max(1, len(resident) // 4)
    return {
        "bytes": size,
        **{name: statistics.median(values[1:]) for name, values in times.items() if values},
        "load_over_least": statistics.median(ratios),
        "growth_mb": (min(resident[-quarter:]) - min(resident[quarter : 2 * quarter])) / 1e6,
        "resident": resident,
    }


def make_engine(name: str, model: Path, lora_rank: int) -> Any:
    if name == "hf":
        from student_trainer.rollout_service.engines.hf import HfRolloutEngine

        return HfRolloutEngine(str(model), dtype="float32", lora_rank=lora_rank, device="cpu")
    from student_trainer.rollout_service.engines.vllm import VllmRolloutEngine

    return VllmRolloutEngine(str(model), lora_rank=lora_rank, max_batch_tokens=512)


def read_and_copy(directory: Path) -> int:
    """Read a snapshot's weights into memory, and copy each once; return their bytes."""
    bytes_read = 0
    for file in directory.glob("*model*.safetensors"):
        for weight in load(file.read_bytes()).values():
            bytes_read += weight.clone().nbytes
    return bytes_read


def resident_bytes() -> int:
    """Return the bytes of this process and its children, without mapped files."""
    process = psutil.Process()
    infos = [
        family_process.memory_info()
        for family_process in (process, *process.children(recursive=True))
    ]
    return sum(info.rss - info.shared for info in infos)


if __name__ == "__main__":
    main()
