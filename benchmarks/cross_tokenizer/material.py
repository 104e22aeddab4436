"""The models and the texts of `benchmarks.cross_tokenizer`.

The teacher is SmolLM2-135M-Instruct, as in `benchmarks/shared/model_pairs.py`. The student is a
small model with a byte-level BPE of its own, trained here on questions and answers of GSM8K. The
teacher answers other questions of GSM8K; its answers, their log-probs and its likeliest
probabilities are stored, so that losses without sampling need no teacher.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.evaluation import compute_logits, hidden_states, make_sampler
from benchmarks.shared.model_pairs import LONGEST_PROMPT, make_pair
from clients.cross_tokenizer.alignment import Aligner
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.comparison import to_byte_tokenizer
from student_trainer.cross_tokenizer.store import TokenMap
from student_trainer.data.prompts import Prompt
from student_trainer.tools.pretrain import main as pretrain

POOL = 2000  # of the questions, those that are asked; the student begins on the others
BATCH = 16
HEAD = 64  # the default of a capture


@dataclass(frozen=True)
class CrossTokenizerSizes:
    """Sizes of the data, of the training and of the student.

    held_out, questions: numbers of questions for evaluation and training. tokens: maximum of an
    answer. batch: answers of a step. begun: pretraining steps of the student.
    """

    held_out: int = 24
    questions: int = 192
    tokens: int = 32
    steps: int = 24
    batch: int = 8
    vocabulary: int = 4096
    layers: int = 3
    width: int = 192
    begun: int = 300


QUICK = CrossTokenizerSizes(
    held_out=2, questions=4, tokens=8, steps=2, batch=2, vocabulary=400, layers=1, width=32, begun=2
)


@dataclass(frozen=True)
class StoredAnswer:
    """An answer of the teacher: its ids [n], log-probs [n], and whether it has ended.

    head_ids, head_logprobs [n, HEAD]: of its likeliest ids, as a capture has them. likeliest [n, V]
    float16: the V largest probabilities of each token, V being the number of the student's ids.
    """

    ids: Tensor
    logprobs: Tensor
    ended: bool
    head_ids: Tensor
    head_logprobs: Tensor
    likeliest: Tensor

    @property
    def rows(self) -> RowBlock:
        """The rows of a capture, without the tail, which no loss here reads."""
        none = np.zeros(len(self.ids), np.float32)
        head = self.head_ids.numpy(), self.head_logprobs.numpy()
        return RowBlock(*head, none, self.logprobs.numpy())


@dataclass(frozen=True)
class CrossTokenizerMaterial:
    """The models, the questions (the first ones are held out) and the teacher's answers to them."""

    teacher: Any
    teacher_words: Any
    student: Path
    student_words: Any
    questions: Sequence[str]
    stored: Sequence[StoredAnswer]
    sizes: CrossTokenizerSizes

    @cached_property
    def reads_student(self) -> Aligner:
        """Aligns what the student writes with the teacher's tokens."""
        student_bytes, teacher_bytes = self._bytes()
        return Aligner(student_bytes, teacher_bytes, self.teacher_words.eos_token_id)

    @cached_property
    def token_map(self) -> TokenMap:
        """The teacher's ids as tokens of the student."""
        return TokenMap.build(self.reads_teacher, np.array([self.teacher_words.eos_token_id]))

    @cached_property
    def reads_teacher(self) -> Aligner:
        """Aligns what the teacher has written with the student's tokens."""
        student_bytes, teacher_bytes = self._bytes()
        return Aligner(teacher_bytes, student_bytes, self.student_words.eos_token_id)

    def _bytes(self) -> tuple[Any, Any]:
        return (
            to_byte_tokenizer(self.student_words, "student", "student"),
            to_byte_tokenizer(self.teacher_words, "teacher", "teacher"),
        )

    def fresh_student(self) -> Any:
        """Return the student with which every training begins."""
        return AutoModelForCausalLM.from_pretrained(self.student, dtype=torch.float32)


def make_material(
    data: Path, work: Path, models: Path, sizes: CrossTokenizerSizes
) -> CrossTokenizerMaterial:
    """Make what is missing below `work`, and load everything. `data`: GSM8K's train.jsonl."""
    work.mkdir(parents=True, exist_ok=True)
    teacher = make_pair("real", models, data).teacher
    lines = data.read_text().splitlines(keepends=True)
    student = work / f"student-{sizes.width}-{sizes.begun}"
    if not student.exists():
        _pretrain_student(lines[POOL:], work, student, sizes)
    teacher_words = AutoTokenizer.from_pretrained(teacher)
    material = CrossTokenizerMaterial(
        AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval(),
        teacher_words,
        student,
        AutoTokenizer.from_pretrained(student),
        _select_questions(lines[:POOL], teacher_words, sizes.held_out + sizes.questions),
        [],
        sizes,
    )
    answers = work / f"answers-{len(material.questions)}-{sizes.tokens}.pt"
    if not answers.exists():
        partial = answers.with_suffix(".part")
        torch.save([vars(answer) for answer in _sample_answers(material)], partial)
        partial.rename(answers)
    stored = [StoredAnswer(**answer) for answer in torch.load(answers)]
    return CrossTokenizerMaterial(**vars(material) | {"stored": stored})


def make_prompts(words: Any, questions: Sequence[str]) -> list[Prompt]:
    """Return questions as prompts, encoded by the tokenizer `words`."""
    texts = [f"{question}\n" for question in questions]
    return [Prompt(_encode(words, text), "") for text in texts]


def _encode(words: Any, text: str) -> NDArray[np.int32]:
    return np.array(words(text, add_special_tokens=False)["input_ids"], np.int32)


def _pretrain_student(
    lines: Sequence[str], work: Path, out: Path, sizes: CrossTokenizerSizes
) -> None:
    texts, partial = work / "begin.jsonl", out.with_name(out.name + ".part")
    texts.write_text("".join(lines))
    columns = ["--columns", "question", "answer", "--separator", "\n"]
    shape = {
        "vocab-size": sizes.vocabulary,
        "layers": sizes.layers,
        "width": sizes.width,
        "steps": sizes.begun,
    }
    options = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    fixed = ["--batch", "8", "--max-tokens", "160", "--tokenizer", "bpe"]
    pretrain(["--data", str(texts), *columns, *options, *fixed, "--out", str(partial)])
    partial.rename(out)


def _select_questions(lines: Sequence[str], words: Any, count: int) -> list[str]:
    all_questions = (json.loads(line)["question"] for line in lines)
    short_questions = [
        question
        for question in all_questions
        if len(_encode(words, f"{question}\n")) <= LONGEST_PROMPT
    ]
    if len(short_questions) < count:
        raise SystemExit(f"the data have {len(short_questions)} short questions, not {count}")
    return short_questions[:count]


@torch.no_grad()
def _sample_answers(material: CrossTokenizerMaterial) -> Iterator[StoredAnswer]:
    prompts = make_prompts(material.teacher_words, material.questions)
    sampler = make_sampler(material.teacher, material.teacher_words, material.sizes.tokens)
    width = len(material.student_words)
    for first in range(0, len(prompts), BATCH):
        part = prompts[first : first + BATCH]
        (answers,) = sampler.generate(part, range(first, first + len(part)), seed=0)
        table = compute_logits(
            material.teacher, hidden_states(material.teacher, answers)
        ).log_softmax(1)
        top = table.topk(width)
        counts = [len(answer.completion) for answer in answers]
        rows_of_answers = zip(
            answers, top.values.split(counts), top.indices.split(counts), strict=True
        )
        for answer, logprobs, ids in rows_of_answers:
            yield StoredAnswer(
                ids=answer.completion.clone(),
                logprobs=answer.token_logprobs.clone(),
                ended=not answer.truncated,
                head_ids=ids[:, :HEAD].int(),
                head_logprobs=logprobs[:, :HEAD].half(),
                likeliest=logprobs.exp().half(),
            )
