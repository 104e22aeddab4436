"""Trains the same student on the same sequences with several losses, and evaluates each result.

The evaluation is the exact KL(teacher||student) and the perplexity on held-out sequences, computed
from the full logits of both models.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.offline.material import OfflineMaterial, OfflineSizes
from benchmarks.shared.programs import JOBS, run_program, set_options
from clients.config.file import load_job
from clients.config.tables.common import StudentConfig
from clients.runs.directory import RunDirectory
from clients.store.dataset import LogitDataset
from student_trainer.losses import exact_kl
from student_trainer.model.loading import load_model


@dataclass(frozen=True)
class TrainingMethod:
    """One training method: a `tail` mode of a job on `store`, or a `reference` loss.

    With a reference loss, the store provides the sequences only.
    """

    name: str
    store: str
    tail: str = ""
    reference: str = ""


def training_methods(sizes: OfflineSizes) -> list[TrainingMethod]:
    k, m, samples = sizes.top_k, sizes.tail_samples, sizes.only_samples
    methods = [
        TrainingMethod("cross-entropy only", "top", reference="cross-entropy"),
        TrainingMethod(f"none (truncated KL), k = {k}", "top", "none"),
        TrainingMethod(f"bucket, k = {k}", "top", "bucket"),
        TrainingMethod(
            f"bucket+teacher_samples, k = {k}, M = {m}", "top", "bucket+teacher_samples"
        ),
        TrainingMethod(
            f"bucket+teacher_samples, k = 0, M = {samples}", "samples", "bucket+teacher_samples"
        ),
        TrainingMethod("exact KL, all logits", "top", reference="exact"),
    ]
    return [methods[3], methods[-1]] if sizes.brief else methods


class Examiner:
    """Evaluates students on the held-out sequences against the teacher's logits."""

    def __init__(self, teacher: Path, held_out: LogitDataset) -> None:
        self._texts = []
        for index in range(len(held_out)):
            entry = held_out.entry(index)
            ids = torch.from_numpy(np.frombuffer(entry.token_ids, "<i4").astype(np.int64))
            self._texts.append((ids, entry.start))
        self._texts.sort(key=lambda text: len(text[0]))
        self._teacher = load_model(StudentConfig(model=str(teacher))).eval()
        self._loading = threading.Lock()

    @property
    def tokens(self) -> int:
        return sum(len(ids) - start for ids, start in self._texts)

    @torch.inference_mode()
    def __call__(self, model: Path) -> dict[str, float]:
        """Return {kl, perplexity} of a student: KL in nats per token."""
        with self._loading:  # transformers patches a class of its own while it loads a model
            student = load_model(StudentConfig(model=str(model))).eval()
        kl = log_prob = 0.0
        for first in range(0, len(self._texts), 8):
            texts = self._texts[first : first + 8]
            # Padding at the end does not change the outputs of a causal model before it.
            ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in texts], batch_first=True)
            student_logits, teacher_logits = (
                _answer_logits(model, ids, texts) for model in (student, self._teacher)
            )
            tokens = torch.cat([ids[start:] for ids, start in texts])
            kl += float(
                exact_kl(student_logits, teacher_logits, direction="forward").double().sum()
            )
            token_logprobs = student_logits.log_softmax(1).gather(1, tokens[:, None])
            log_prob += float(token_logprobs.double().sum())
        return {"kl": kl / self.tokens, "perplexity": math.exp(-log_prob / self.tokens)}


def _answer_logits(model: Any, ids: Tensor, texts: Sequence[tuple[Tensor, int]]) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.cat(
        [
            sequence_logits[start - 1 : len(text) - 1]
            for sequence_logits, (text, start) in zip(logits, texts, strict=True)
        ]
    )


def train_all(
    work: Path,
    material: OfflineMaterial,
    stores: dict[str, Path],
    sizes: OfflineSizes,
    parallel: int,
) -> dict[str, Any]:
    """Train with every method and seed, and return the evaluations. No teacher service is used."""
    examine = Examiner(material.teacher, LogitDataset(stores["top, held out"]))
    before = {"0": examine(material.student)}
    runs = [(method, seed) for seed in range(sizes.seeds) for method in training_methods(sizes)]
    with ThreadPoolExecutor(parallel) as pool:
        curves = list(
            pool.map(
                lambda run_method: _train_and_evaluate(
                    work, material, stores, sizes, examine, *run_method
                ),
                runs,
            )
        )
    _require_same_batches(work, sizes)
    summaries = []
    for method in training_methods(sizes):
        method_curves = [
            before | curve
            for (run_method, _), curve in zip(runs, curves, strict=True)
            if run_method == method
        ]
        summaries.append(
            {"name": method.name, "reference": bool(method.reference), **_summarize(method_curves)}
        )
    return {
        "held_out": {
            "sequences": len(LogitDataset(stores["top, held out"])),
            "tokens": examine.tokens,
        },
        "teacher": examine(material.teacher),
        "before": before["0"],
        "ways": summaries,
    }


def _summarize(curves: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    steps = list(curves[0])
    last = steps[-1]
    return {
        **{
            name: {
                "seeds": [curve[last][name] for curve in curves],
                "mean": statistics.mean(curve[last][name] for curve in curves),
            }
            for name in ("kl", "perplexity")
        },
        "curve": {step: [curve[step]["kl"] for curve in curves] for step in steps},
    }


def _train_and_evaluate(
    work: Path,
    material: OfflineMaterial,
    stores: dict[str, Path],
    sizes: OfflineSizes,
    examine: Examiner,
    method: TrainingMethod,
    seed: int,
) -> dict[str, dict[str, float]]:
    """Return {step: {kl, perplexity}} of one run."""
    home = _run_directory(work, sizes, method, seed)
    settings = job_settings(material, stores, sizes, method, seed)
    job, log = JOBS / "gsm8k_offline.toml", home.with_suffix(".log")
    if method.reference:
        options = [f"{key}={value}" for key, value in settings.items()]
        run_directory = RunDirectory.create(home / "run", load_job(job, options).config)
        program = ["-m", "benchmarks.offline.reference", method.reference, str(material.teacher)]
        run_program([sys.executable, *program, str(run_directory.path), "--attempt", "1"], log)
    else:
        command = [sys.executable, "-m", "clients", "run", str(job), "--runs", str(home)]
        run_program([*command, *set_options(settings)], log)
    (path,) = home.iterdir()
    steps = sorted((path / "checkpoints").glob("step-*"))
    return {str(int(step.name.removeprefix("step-"))): examine(step / "model") for step in steps}


def job_settings(
    material: OfflineMaterial,
    stores: dict[str, Path],
    sizes: OfflineSizes,
    method: TrainingMethod,
    seed: int,
) -> dict[str, str]:
    """Return the settings of a training job that override the shipped job file."""
    return {
        "student.model": str(material.student),
        "student.gradient_checkpointing": "false",
        "data.path": str(stores[method.store]),
        "data.eval_path": str(stores[f"{method.store}, held out"]),
        # Ignored by a reference loss.
        "method.tail": method.tail or "bucket",
        "seed": str(seed),
        "max_steps": str(sizes.steps),
        "train.learning_rate": "3e-3",
        "train.warmup_steps": str(sizes.steps // 10),
        "train.prompts_per_step": str(sizes.per_step),
        "eval.every": str(sizes.steps),
        "eval.prompts": "8",
        "checkpoint.every": str(sizes.steps // sizes.points),
        "checkpoint.keep": str(sizes.points + 1),
        "track.tensorboard": "false",
    }


def _run_directory(work: Path, sizes: OfflineSizes, method: TrainingMethod, seed: int) -> Path:
    return work / "learned" / f"{training_methods(sizes).index(method)}-seed-{seed}"


def _require_same_batches(work: Path, sizes: OfflineSizes) -> None:
    """Check that, for each seed, all methods had the same initial student and batches."""
    for seed in range(sizes.seeds):
        first_losses_and_tokens = []
        for method in training_methods(sizes):
            (path,) = _run_directory(work, sizes, method, seed).iterdir()
            records = [
                json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()
            ]
            steps = [record for record in records if "loss" in record]
            first_losses_and_tokens.append(
                [steps[0]["cross_entropy"], *(record["tokens"] for record in steps)]
            )
        np.testing.assert_allclose(
            first_losses_and_tokens,
            [first_losses_and_tokens[0]] * len(first_losses_and_tokens),
            rtol=1e-4,
        )
