"""A student trained to query a retriever, and a retriever, for tests of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from student_trainer.data.prompts import Prompt
from student_trainer.tools.pretrain import Text, _build_parser, train
from tests.student_trainer import tiny

TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]


def make_words() -> Any:
    tokenizer = tiny.tokenizer(tiny.ALPHABET + "\nDoc()Title: ")
    tokenizer.add_tokens(TAGS)
    return tokenizer


WORDS = make_words()
TRAINING = [
    "--data",
    "-",
    "--out",
    "-",
    "--steps",
    "120",
    "--batch",
    "12",
    "--learning-rate",
    "5e-3",
]
IDS = {tag: WORDS.convert_tokens_to_ids(tag) for tag in TAGS}
PROMPTS = [
    Prompt(np.array(WORDS(text)["input_ids"], dtype=np.int32), "7") for text in ("1+", "21+")
]


def asking_student(width: int = 32) -> Any:
    """Return a small model, briefly trained on a few conversations, so that its samples vary."""
    torch.manual_seed(5)
    model = tiny.make_model(len(WORDS), WORDS, 1, width)
    information = "\n\n<information>Doc 1(Title: 1) 12=\nDoc 2(Title: 1) 12=</information>\n\n"
    search = f"<search>1</search>{information}"
    answer = "<answer>12</answer>"
    talks = [f"1+{turns}{answer}" for turns in ("", search, search + search)]
    texts = [Text([*WORDS(talk)["input_ids"], WORDS.eos_token_id], 2) for talk in talks]
    train(model, texts, _build_parser().parse_args(TRAINING))
    return model.eval()


class Facts:
    """A retriever whose passages show the query's length; None for queries with `fails` in them."""

    def __init__(self, fails: str | None = None) -> None:
        self.fails = fails
        self.queries: list[str] = []

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        self.queries += queries
        return [
            None if self.fails is not None and self.fails in query else [f"{len(query)}\n12="] * 2
            for query in queries
        ]
