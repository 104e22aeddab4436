"""The offline benchmark runs, and its metrics equal their definitions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.offline import benchmark as offline
from benchmarks.offline.kills import hash_files
from benchmarks.offline.page import check_targets
from benchmarks.offline.training import Examiner
from clients.store.dataset import LogitDataset
from tests.student_trainer import small_store, tiny

pytestmark = pytest.mark.slow

WORDS = ("apples", "pears", "boys", "girls", "had", "gave", "took", "more", "less", "than", "each")


def write_exercises(path: Path, count: int) -> Path:
    rng = random.Random(0)
    records = [
        {
            "question": " ".join(rng.choices(WORDS, k=6)),
            "answer": " ".join(rng.choices(WORDS, k=8)) + f" #### {rng.randrange(99)}",
        }
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.usefixtures("forked_python")
def test_the_quick_benchmark(tmp_path: Path) -> None:
    data = write_exercises(tmp_path / "train.jsonl", 72)
    out, docs, work = (tmp_path / name for name in ("out.json", "docs", "work"))
    arguments = ["--data", str(data), "--out", str(out), "--docs", str(docs), "--work", str(work)]
    threads = torch.get_num_threads()
    try:
        offline.main(["--quick", *arguments])
    finally:
        torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    assert result["kills"]["kills"] == 1
    assert result["kills"]["equal"] is True
    assert 0 < result["kills"]["at"][0] < result["kills"]["files"]
    for method in result["learned"]["ways"]:
        assert list(method["curve"]) == ["0", "2", "4"]
        assert method["curve"]["4"] == method["kl"]["seeds"]
    before = result["learned"]["before"]["kl"]
    assert all(method["curve"]["0"] == [before] for method in result["learned"]["ways"])
    # 8 ids of 18 bits and 4 drawn ones, each with what goes with it, and the two of every row.
    size = 8 * 4.25 + 8 + 4 * 2.25 + 4
    assert result["stores"]["top"]["codec_bytes"] == pytest.approx(size, rel=0.1)
    assert "| bucket+teacher_samples, k = 8, M = 4 |" in (docs / "offline.md").read_text()
    assert not list(work.glob("run-*")), "what is large goes when all is done"


def test_measures_are_those_of_the_definition(tmp_path: Path) -> None:
    """One sequence at a time, in float64, by the formula."""
    tiny.save_material(tmp_path)
    material = tiny.Material.at(tmp_path)
    texts = small_store.sums(11)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path).eval()
        for path in (material.teacher, material.student)
    )
    store = write_store(tmp_path / "store", teacher, texts)
    kl = log_prob = 0.0
    for text in texts:
        q, p = (small_store.logprobs_of(model, text) for model in (teacher, student))
        kl += float((q.exp() * (q - p)).sum())
        log_prob += float(p.gather(1, torch.tensor(text[0][text[1] :])[:, None]).sum())
    examine = Examiner(material.teacher, LogitDataset(store))
    assert examine.tokens == sum(len(ids) - start for ids, start in texts)
    evaluation = examine(material.student)
    assert evaluation["kl"] == pytest.approx(kl / examine.tokens, rel=1e-5)
    assert evaluation["perplexity"] == pytest.approx(math.exp(-log_prob / examine.tokens), rel=1e-5)
    assert examine(material.teacher)["kl"] == pytest.approx(0, abs=1e-6)


def write_store(path: Path, teacher: Any, texts: list[small_store.Text]) -> Path:
    small_store.write_store(path, teacher, texts, top_k=2, samples=1)
    return path


def test_digests_see_every_byte_but_the_lock(tmp_path: Path) -> None:
    for name in ("00000000.arrow", "manifest.json", "lock"):
        (tmp_path / name).write_bytes(b"some")
    before = hash_files(tmp_path)
    assert list(before) == ["00000000.arrow", "manifest.json"]
    (tmp_path / "manifest.json").write_bytes(b"same")
    assert hash_files(tmp_path) != before


def test_what_is_missed_is_said() -> None:
    result: dict[str, Any] = {
        "kills": {"kills": 20, "equal": False},
        "step": {"ratio": 1.04},
        "capture": {"ratio": 0.94},
        "sizes": {"only_samples": 12},
        "stores": {"samples": {"codec_bytes": 40.1}},
    }
    assert [target["met"] for target in check_targets(result)] == [False] * 4
    result["kills"]["equal"] = True
    result["step"]["ratio"], result["capture"]["ratio"] = 1.03, 0.95
    result["stores"]["samples"]["codec_bytes"] = 40.0
    assert [target["met"] for target in check_targets(result)] == [True] * 4
