"""The material of the offline benchmark: two models trained on the text, and captured rows."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.programs import JOBS, run_program, set_options
from clients.store.dataset import LogitDataset
from clients.store.manifest import read_manifest
from student_trainer.tools.pretrain import main as pretrain

COLUMNS = ("question", "answer")
SEPARATOR = "\n"


@dataclass(frozen=True)
class OfflineSizes:
    """The sizes of the models, the captures and the training.

    `shard_bytes` is small, so that a capture has many files to be killed at.
    """

    records: int
    held_out: int
    vocabulary: int
    max_tokens: int
    teacher: tuple[int, int, int]  # layers, width, steps
    student: tuple[int, int, int]
    steps: int
    points: int  # of a curve
    per_step: int
    seeds: int
    shard_bytes: int
    timed_records: int
    timed_steps: int
    repetitions: int
    brief: bool = False  # only the default and the ceiling
    top_k: int = 8
    tail_samples: int = 4
    only_samples: int = 12


@dataclass(frozen=True)
class OfflineMaterial:
    """Paths of the data and the models. `held_out` is used for evaluation only."""

    train: Path
    held_out: Path
    teacher: Path
    student: Path


def make_material(data: Path, work: Path, sizes: OfflineSizes) -> OfflineMaterial:
    """Make the data and the models in `work`, once per data file and sizes."""
    lines = data.read_text().splitlines(keepends=True)[: sizes.records + sizes.held_out]
    if len(lines) < sizes.records + sizes.held_out:
        raise SystemExit(f"{data} has {len(lines)} lines, {sizes.records + sizes.held_out} needed")
    fingerprint = [sizes.vocabulary, sizes.max_tokens, sizes.teacher, sizes.student, lines]
    digest = hashlib.sha256(json.dumps(fingerprint).encode()).hexdigest()
    home = (work / f"models-{digest[:12]}").absolute()
    home.mkdir(parents=True, exist_ok=True)
    material = OfflineMaterial(
        *(home / name for name in ("train.jsonl", "held.jsonl", "teacher", "student"))
    )
    material.train.write_text("".join(lines[: sizes.records]))
    material.held_out.write_text("".join(lines[sizes.records :]))
    _pretrain(material.train, material.teacher, "bpe", sizes.teacher, sizes)
    _pretrain(material.train, material.student, str(material.teacher), sizes.student, sizes)
    return material


def _pretrain(
    data: Path, out: Path, tokenizer: str, shape: tuple[int, int, int], sizes: OfflineSizes
) -> None:
    if out.exists():
        return
    layers, width, steps = map(str, shape)
    partial = out.with_suffix(".part")
    arguments = ["--data", str(data), "--columns", *COLUMNS, "--separator", SEPARATOR]
    arguments += ["--tokenizer", tokenizer, "--vocab-size", str(sizes.vocabulary)]
    arguments += ["--layers", layers, "--width", width, "--steps", steps, "--batch", "16"]
    pretrain([*arguments, "--max-tokens", str(sizes.max_tokens), "--out", str(partial)])
    partial.rename(out)


def capture_settings(
    material: OfflineMaterial, data: Path, sizes: OfflineSizes, top_k: int, tail_samples: int
) -> dict[str, str]:
    """Return the settings of a capture of `data` that override the shipped job file."""
    return {
        "teacher.model": str(material.teacher),
        "teacher.top_k": str(top_k),
        "teacher.max_batch_tokens": "4096",
        "data.path": str(data),
        "data.template": json.dumps("{prompt}" + SEPARATOR),
        "method.max_tokens": str(sizes.max_tokens),
        "method.tail_samples": str(tail_samples),
        "method.shard_bytes": str(sizes.shard_bytes),
    }


def capture(settings: Mapping[str, str], store: Path) -> Path:
    """Run `distill capture` to its end and return the path of the complete store."""
    runs = store.with_name(f"{store.name}-runs")
    command = [sys.executable, "-m", "clients", "capture", str(JOBS / "gsm8k_capture.toml")]
    command += ["--store", str(store), "--runs", str(runs), *set_options(settings)]
    run_program(command, store.with_name(f"{store.name}.log"))
    return store


def describe_store(store: Path) -> dict[str, float]:
    """Return the size of a store, with bytes per row of the codec and of the whole files."""
    data = LogitDataset(store)
    entries = [data.entry(index) for index in range(len(data))]
    rows = sum(len(entry.token_ids) // 4 - entry.start for entry in entries)
    return {
        "sequences": len(data),
        "rows": rows,
        "tokens": sum(len(entry.token_ids) // 4 for entry in entries),
        "codec_bytes": sum(len(entry.rows) for entry in entries) / rows,
        "file_bytes": sum(facts.bytes for facts in data.facts) / rows,
    }


def count_files(store: Path) -> int:
    manifest = read_manifest(store)
    return len(manifest.shards) if manifest else 0
