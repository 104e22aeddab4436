"""A store in the hands of other trainers: torch, `datasets`, and transformers' own Trainer."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.store.dataset import LogitDataset
from tests.documents import blocks
from tests.teacher_service.capture.material import capture_here, job, pairs, write_lines


def same(first_item: dict[str, Any], second_item: dict[str, Any]) -> bool:
    return first_item.keys() == second_item.keys() and all(
        np.array_equal(np.asarray(first_item[name]), np.asarray(second_item[name]))
        for name in first_item
    )


def test_by_index(captured_store: Path) -> None:
    stored = LogitDataset(captured_store)
    in_order = list(stored)
    assert all(same(stored[index], in_order[index]) for index in (99, 0, 57, 3))
    assert same(stored[-1], in_order[99])
    for outside in (100, -101):
        with pytest.raises(IndexError):
            stored[outside]


def test_workers_of_torch(captured_store: Path) -> None:
    """Each maps the files itself."""
    from torch.utils.data import DataLoader

    stored = LogitDataset(captured_store)
    loader = DataLoader(
        stored, batch_size=None, num_workers=1, multiprocessing_context="spawn", shuffle=False
    )
    assert all(same(a, b) for a, b in zip(loader, stored, strict=True))


def test_datasets_of_hugging_face(captured_store: Path) -> None:
    stored = LogitDataset(captured_store)
    rows = stored.to_hf_dataset().shuffle(seed=0).select(range(20))
    assert len(rows) == 20
    indices = [index for index in range(100) if any(same(stored[index], row) for row in rows)]
    assert len(indices) == 20
    assert indices != list(range(20))


# Trainer asks for pinned memory wherever it runs.
@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set:UserWarning")
def test_the_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/python.md, as it stands there."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.student_trainer import tiny

    torch.set_num_threads(1)
    words = tiny.tokenizer()
    teacher = tiny.save(tiny.model(seed=1, spread=1.0), words, tmp_path / "teacher")
    tiny.save(tiny.model(seed=2, spread=0.2), words, tmp_path / "student")
    records = [{"prompt": f"{len(a)}+{len(b)}=", "answer": str(sum(b))} for a, b in pairs(64)]
    data = write_lines(tmp_path / "data.jsonl", records)
    changes = {"teacher__model": str(teacher), "teacher__engine": "hf", "teacher__top_k": 8}
    _, store = capture_here(tmp_path / "run", job(data, teacher, **changes))
    store.rename(tmp_path / "store")
    (block,) = blocks("docs/python.md", "own-trainer")
    example = block.body
    # A model of 32 dimensions learns faster.
    assert example.count("learning_rate=1e-5") == example.count("num_train_epochs=3") == 1
    example = example.replace("rate=1e-5", "rate=1e-2").replace("epochs=3", "epochs=6")
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    namespace = runpy.run_path("example.py")
    namespace["model"].save_pretrained("learned")
    items = [
        (torch.tensor(stored["input_ids"]), stored["start"])
        for stored in LogitDataset(tmp_path / "store")
    ]

    def kl(name: str) -> float:
        """To the teacher, exact, over the scored tokens."""
        q, p = (
            AutoModelForCausalLM.from_pretrained(tmp_path / model_name)
            for model_name in ("teacher", name)
        )
        sums = [
            torch.nn.functional.kl_div(
                *(model(ids[None]).logits[0, start - 1 : -1].log_softmax(1) for model in (p, q)),
                log_target=True,
                reduction="batchmean",
            )
            for ids, start in items
        ]
        return float(torch.stack(sums).mean())

    with torch.no_grad():
        before, after = kl("student"), kl("learned")
    assert after < 0.2 * before
