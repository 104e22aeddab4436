"""A small model learns to search: its answers are in a directory and nowhere else.

    python -m benchmarks.search [--work runs/search] [--quick]

A model that knows only the format of a conversation learns from an exact-match reward through
`distill run`. It is then evaluated on people that it never saw: with the directory, with a
directory in which every room has changed, and with one that finds nothing. Writes
benchmarks/results/search.json and, if matplotlib is installed, docs/search.png. Takes a few
minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.search.material import SearchMaterial, SearchSizes, make_material
from benchmarks.search.picture import draw
from benchmarks.shared.programs import run_program, set_options
from clients.config.file import load_job
from clients.config.rl import RLJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from student_trainer.data.prompts import load_prompts
from student_trainer.environments.retriever import Retriever, make_retriever
from student_trainer.model.loading import load_model, load_tokenizer
from student_trainer.rewards.sample import same_words
from student_trainer.rollouts.sampler import Sampler
from student_trainer.rollouts.search import SearchConversations, SearchRollouts

JOB = Path(__file__).with_name("job.toml")
FULL = SearchSizes(people=100, held_out=44, talks=4000, warm_steps=800, layers=1, width=128)
QUICK = SearchSizes(people=40, held_out=10, talks=20, warm_steps=3, layers=1, width=32)
QUICK_JOB = {"max_steps": "2", "train.prompts_per_step": "4", "eval.prompts": "4"}


class NothingFound:
    """A retriever that finds nothing."""

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        return [[] for _ in queries]


@dataclass(frozen=True)
class SearchScores:
    """The share of right answers on the held-out questions, and the mean number of queries."""

    exact_match: float
    queries: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/search"), help="made anew")
    parser.add_argument("--quick", action="store_true", help="tiny, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/search.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    shutil.rmtree(options.work, ignore_errors=True)
    result = run_benchmark(options.work.absolute(), quick=options.quick)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.docs.mkdir(parents=True, exist_ok=True)
    print(draw(result, options.docs / "search.png"))
    for case, scores in result["examined"].items():
        print(f"{case:40} exact match {scores['exact_match']:.3f}, queries {scores['queries']:.2f}")
    print(f"{result['seconds']['warm start']:.0f} s + {result['seconds']['training']:.0f} s")


def run_benchmark(work: Path, *, quick: bool) -> dict[str, Any]:
    sizes = QUICK if quick else FULL
    began = time.monotonic()
    material = make_material(work / "material", sizes)
    warm = time.monotonic()
    settings = {
        "student.model": str(material.model),
        "data.path": str(material.train),
        "data.eval_path": str(material.held_out),
        "environment.retriever": str(material.corpus),
        **(QUICK_JOB if quick else {}),
    }
    command = [sys.executable, "-m", "clients", "run", str(JOB), "--runs", str(work / "runs")]
    run_program([*command, *set_options(settings)], work / "run.log")
    trained = time.monotonic()
    (run_directory,) = (work / "runs").iterdir()
    job = load_job(JOB, set_options(settings)[1::2]).config
    assert isinstance(job, RLJob)
    lines = [
        json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "sizes": asdict(sizes),
        "job": job.model_dump(mode="json", include={"method", "environment", "train", "max_steps"}),
        "examined": examine_all(job, material, run_directory / "export"),
        "curve": {str(r["step"]): r["eval/reward"] for r in lines if "eval/reward" in r},
        "rewards": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "seconds": {"warm start": warm - began, "training": trained - warm},
    }


def examine_all(job: RLJob, material: SearchMaterial, trained_model: Path) -> dict[str, Any]:
    """Evaluate before and after training on the held-out people, with three directories."""
    assert job.environment is not None
    directory = make_retriever(job.environment)
    moved_directory = make_retriever(
        job.environment.model_copy(update={"retriever": str(material.moved_corpus)})
    )
    cases: list[tuple[str, Path, Path, Retriever]] = [
        ("before", material.model, material.held_out, directory),
        ("after", trained_model, material.held_out, directory),
        ("after, everybody has moved", trained_model, material.moved, moved_directory),
        ("after, the search finds nothing", trained_model, material.held_out, NothingFound()),
    ]
    return {name: asdict(examine(job, *case)) for name, *case in cases}


def examine(job: RLJob, model: Path, questions: Path, retriever: Retriever) -> SearchScores:
    """Evaluate a model with greedy decoding."""
    assert job.environment is not None
    student = StudentConfig(model=str(model))
    tokenizer = load_tokenizer(student)
    data = DataConfig(path=str(questions), eval_path=str(questions))
    max_tokens = job.method.max_prompt_tokens
    _, prompts = load_prompts(data, tokenizer, held_out=10**6, max_tokens=max_tokens, seed=0)
    conversations = SearchConversations(
        tokenizer,
        retriever,
        job.environment,
        max_new_tokens=job.method.max_new_tokens,
        batch_tokens=4 * job.train.tokens_per_micro_batch,
    )
    rollouts = SearchRollouts(
        conversations,
        Sampler(load_model(student).eval(), tokenizer, top_k=0, temperature=1.0),
        tokenizer,
        stream_tokens=job.method.max_new_tokens,
    )
    batches = rollouts.generate(prompts, [0] * len(prompts), seed=0, greedy=True)
    answers = [rollout for batch in batches for rollout in batch]
    is_right = [same_words(answer.answer_text(tokenizer), answer.answer) for answer in answers]
    return SearchScores(
        sum(is_right) / len(is_right), sum(answer.queries for answer in answers) / len(answers)
    )


if __name__ == "__main__":
    main()
