"""A job whose random student searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from clients.config.rl import RLJob
from tests.student_trainer.tiny import Material, model, rl_job, save, tokenizer


def searching_job(material: Material, folder: Path, **changes: Any) -> RLJob:
    """Return a job of a few steps, whose student and corpus are written into `folder`.

    Prompts end with `=`; tags and two digits get its embedding, and so are likely.
    """
    characters = "0123456789+=\nDoc(Title): "
    tags = ["<search>", "</search>", "<answer>", "</answer>"]
    words = tokenizer(characters)
    words.add_tokens(tags)
    student = model(seed=2, spread=0.2, characters=characters)
    student.resize_token_embeddings(len(words), mean_resizing=False)
    with torch.no_grad():
        rows = student.get_input_embeddings().weight
        rows[words.convert_tokens_to_ids([*tags, "1", "2"])] = rows[words.vocab["="]].clone()
    corpus = folder / "corpus.jsonl"
    facts = [{"contents": f"{n}\n{n}+{n}={2 * n}"} for n in range(10, 100)]
    corpus.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    values: dict[str, Any] = {
        "student": {"model": str(save(student, words, folder / "student"))},
        "environment": {"retriever": str(corpus), "max_turns": 2, "max_passage_tokens": 30},
        "method__max_new_tokens": 64,
        "method__temperature": 2.0,
        "max_steps": 2,
        "eval__prompts": 4,
        "checkpoint__every": 1,
    }
    return rl_job(material, **(values | changes))
