"""Checks whether a teacher and a student are compatible, from their directories.

Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from clients.cross_tokenizer.alignment import Aligner, Shares, measure_shares
from clients.cross_tokenizer.byte_tokenizer import tokenizer_in
from clients.cross_tokenizer.special_tokens import (
    SpecialTokenMap,
    SpecialTokens,
    map_special_tokens,
)
from clients.data.conversation import text_of_content
from clients.data.models.shape import logits_in
from clients.data.records import DataSet
from clients.data.tokens.tokenizer import first_difference, tokens_in
from clients.preflight.vocabulary import common_ids
from protos.errors import DistillError, InvalidInput
from protos.extras import require_extra

ALL = "all"  # the kind under which the shares of all texts are reported

# Characters by which `kind_of` tells the kind of a text.
_OTHER_LETTERS = re.compile(r"[^\W\d_\u0000-\u024f]")
_FIGURES = re.compile(r"[0-9+*/=^$\\%]")
_BRACKETS = re.compile(r"[{}()\[\];<>_#]")


@dataclass(frozen=True)
class PairReport:
    """The report about a pair of a teacher and a student.

    - same: whether both have the same tokenizer; None if unknown.
    - difference: a sentence about the first difference between the tokenizers, or "".
    - shares: statistics of the alignment by kind of text, if the tokenizers must be aligned.
    - refusals: reasons why the pair cannot be trained.
    - loss: a description of the training objective.
    - lines: lines that the job file needs.
    - roles: pairs of special tokens (student, teacher) with the same role, if only special tokens
      differ.
    - missing: tokens that have text but no counterpart in the other tokenizer.
    """

    same: bool | None
    difference: str
    shares: Mapping[str, Shares]
    refusals: Sequence[str]
    loss: str
    lines: Sequence[str]
    roles: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = ()


def pair_report(teacher: Path, student: Path, texts: Iterable[str]) -> PairReport:
    """Compare the Hugging Face directories of a teacher and a student.

    If the tokenizers must be aligned, the report has statistics of their tokens on `texts`. Raises
    InvalidInput if a required package is not installed.
    """
    teacher_tokens, student_tokens = tokens_in(teacher), tokens_in(student)
    if teacher_tokens is None or student_tokens is None:
        name = "teacher" if teacher_tokens is None else "student"
        problem = f"the tokenizer.json of the {name} cannot be read; give a complete directory"
        return PairReport(None, "", {}, [problem], "", [])
    if teacher_tokens == student_tokens:
        return _report_one_tokenizer(teacher, student, student_tokens)
    difference = first_difference(teacher_tokens, student_tokens)
    roles = _read_roles(teacher, student)
    if roles is not None and not roles.missing:
        report = _report_one_tokenizer(
            teacher, student, max(teacher_tokens, student_tokens, key=len)
        )
        lines = [
            'teacher.tokenizer = "auto"  # on_policy and rl',
            'data.tokenizer = "auto"  # offline',
        ]
        return replace(report, same=False, difference=difference, lines=lines, roles=roles.pairs)
    require_extra("train", "distill pair", only={"transformers"})  # raises, unlike refusals
    try:
        aligner = Aligner(
            tokenizer_in(student, "student", "student.model"),
            tokenizer_in(teacher, "teacher", "teacher.tokenizer"),
            0,  # no text here has an end
        )
    except DistillError as error:
        return PairReport(False, difference, {}, [str(error)], "", [])
    by_kind: dict[str, list[str]] = {}
    for text in texts:
        by_kind.setdefault(kind_of(text), []).append(text)
    shares = {
        kind: measure_shares(aligner, kind_texts) for kind, kind_texts in sorted(by_kind.items())
    }
    if len(shares) > 1:
        shares[ALL] = measure_shares(
            aligner, [text for kind_texts in by_kind.values() for text in kind_texts]
        )
    loss = (
        "reverse KL of the teacher's log-probs of its own tokens, word by word"
        ' (method.horizon = "answer": with all that follows); offline, cross-entropy, with rows'
        " where words begin"
    )
    lines = ['teacher.tokenizer = "auto"  # on_policy', 'data.tokenizer = "auto"  # offline']
    if roles is None:
        return PairReport(False, difference, shares, [], loss, lines)
    lines += [
        f'teacher.roles = {{ "TOKEN" = "{token}" }}  # TOKEN of the student: rows of all tokens;'
        " offline: data.roles"
        for token in roles.missing
    ]
    return PairReport(False, difference, shares, [], loss, lines, roles.pairs, roles.missing)


def _read_roles(teacher: Path, student: Path) -> SpecialTokenMap | None:
    student_roles, teacher_roles = (
        SpecialTokens.in_directory(model) for model in (student, teacher)
    )
    return (
        None
        if student_roles is None or teacher_roles is None
        else map_special_tokens(student_roles, teacher_roles)
    )


def texts_in(path: str, columns: Sequence[str], max_records: int) -> list[str]:
    """Return the texts of the first `max_records` records of a data set, one per record.

    `columns`: the columns to read. If empty, all columns with a text or with messages are read.
    Raises InvalidInput if there is no text.
    """
    records = islice(DataSet(path, field="--data").records(columns), max_records)
    texts = ["\n".join(_texts_of(record, columns)) for record in records]
    nonempty_texts = [text for text in texts if text]
    if not nonempty_texts:
        problem = f"no column {', '.join(columns)} with text" if columns else "no column with text"
        raise InvalidInput(f"there is {problem} in {path}", field="--data", hint="set --column")
    return nonempty_texts


def _texts_of(record: Mapping[str, Any], columns: Sequence[str]) -> Iterator[str]:
    for name, value in record.items():
        if columns and name not in columns:
            continue
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (
                text_of_content(m["content"])
                for m in value
                if isinstance(m, dict) and m.get("content")
            )


def _report_one_tokenizer(teacher: Path, student: Path, tokens: Sequence[str]) -> PairReport:
    loss, refusals = "KL of the rows of every token (docs/methods.md)", []
    widths = [logits_in(student), logits_in(teacher)]
    if widths[0] and widths[1]:
        try:
            common = common_ids(widths[0], widths[1], "teacher", tokens)
            loss += f", over {common} ids"
        except DistillError as error:
            refusals = [str(error)]
    return PairReport(True, "", {}, refusals, "" if refusals else loss, [])


def kind_of(text: str) -> str:
    """Classify a text as `other scripts`, `code`, `maths` or `prose` by shares of characters."""
    length = max(len(text), 1)
    if len(_OTHER_LETTERS.findall(text)) > 0.3 * length:
        return "other scripts"
    if len(_BRACKETS.findall(text)) > 0.06 * length:
        return "code"
    return "maths" if len(_FIGURES.findall(text)) > 0.06 * length else "prose"


def summary_lines(report: PairReport) -> list[str]:
    """Return the lines of `distill pair` about the two tokenizers."""
    lines = []
    if report.same is not None:
        lines.append(f"tokenizer: {'the same' if report.same else 'another one'}")
    if report.difference:
        lines.append(f"{report.difference}\n")
    lines += [
        f"role: {student_token} of the student is {teacher_token} of the teacher"
        for student_token, teacher_token in report.roles
    ]
    if report.missing:
        lines.append(f"without a role in the other tokenizer: {', '.join(report.missing)}")
    return lines


def share_rows(report: PairReport) -> list[dict[str, object]]:
    """Return the rows of the table of one-to-one tokens, one per kind of text."""
    return [
        {
            "text": kind,
            "records": shares.texts,
            "tokens": shares.tokens,
            "one to one": f"{shares.one_to_one:.1%}",
            "left out": f"{shares.left_out:.1%}",
        }
        for kind, shares in report.shares.items()
    ]


def conclusion_lines(report: PairReport) -> list[str]:
    """Return lines with the training objective and the keys that the job file needs.

    If the pair cannot be trained, the lines give the reasons.
    """
    if report.refusals:
        return [f"The pair cannot be trained: {reason}" for reason in report.refusals]
    lines = [f"\nloss: {report.loss}"]
    job_file_lines = "".join(f"\n  {line}" for line in report.lines)
    return [*lines, f"job file:{job_file_lines}" if job_file_lines else "job file: nothing to set"]
