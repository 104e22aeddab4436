"""Finds out whether a teacher has the student's tokenizer, and makes ready for another one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.alignment.alignment import Aligner
from clients.alignment.byte_tokenizer import ByteTokenizer
from clients.alignment.report import measured
from clients.alignment.roles import FIELD as ROLES
from clients.alignment.roles import RoleMap, TokenRoles, role_map
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.teacher import OtherTokens
from clients.data.answer_end import answer_end
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import DistillError, InvalidInput, WrongState
from student_trainer.data.prompts import Prompt
from student_trainer.model.loading import load_tokenizer, vocabulary
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.reading import (
    Reading,
    reads_another_prompt,
    teacher_form,
    teacher_prompt,
)

log = logging.getLogger(__name__)

_FIELD = "teacher.tokenizer"


@dataclass(frozen=True)
class RolePair:
    """Tokenizers that differ in their special tokens only; see `clients/alignment/roles.py`.

    tokenizer: the teacher's, as transformers loads it. tokens: of either by id, "" for an id that
    is unused in both.
    """

    roles: RoleMap
    tokenizer: Any
    tokens: Sequence[str]

    def ids(self, vocab_size: int) -> NDArray[np.int32]:
        """Return the teacher's id of each of the first `vocab_size` ids of the student."""
        found = np.arange(vocab_size, dtype=np.int32)
        count = min(len(self.roles.ids), vocab_size)
        found[:count] = self.roles.ids[:count]
        return found


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of a student and of a teacher that has another one.

    tokenizer: the teacher's, as transformers loads it.
    """

    aligner: Aligner
    tokenizer: Any

    @property
    def tokens(self) -> int:
        """Number of ids of the student's tokenizer; its model may have more logits."""
        return len(self.aligner.writer.lengths)

    def log_facts(self, prompts: Sequence[Prompt]) -> None:
        """Log one line: how many of the student's tokens are one token of the teacher here."""
        texts = [f"{prompt.text}\n{prompt.answer}" for prompt in prompts]
        found = measured(self.aligner, texts)
        log.info(
            "the teacher has another tokenizer: %.1f%% of %d tokens of held-out prompts and"
            " answers are one token of it",
            100 * found.one_to_one,
            found.tokens,
        )


def tokenizer_pair(
    config: OnPolicyJob | RLJob, teachers: Mapping[str, Connection], ours: Any
) -> TokenizerPair | RolePair | None:
    """Return the tokenizers of a job's student and teacher; None if they are, or must be, the same.

    `ours`: the student's. `teachers`: only one if it may have another tokenizer. Raises
    InvalidInput or WrongState, naming `teacher.tokenizer`, if the teacher's tokenizer is not found,
    is not the teacher's, cannot be aligned, or must be for an RL job; naming `teacher.roles`, if
    the job gives roles that the tokenizers do not have.
    """
    teacher = config.teacher
    found = None
    if teacher is not None and teacher.tokenizer != "same":
        found = _other(config, teacher, teachers, ours)
    if found is not None or reads_another_prompt(config):
        teacher_form(config, ours if found is None else found.tokenizer)  # may refuse its template
    return found


def _other(
    config: OnPolicyJob | RLJob,
    asked: OtherTokens,
    teachers: Mapping[str, Connection],
    ours: Any,
) -> TokenizerPair | RolePair | None:
    [teacher] = teachers.values()
    theirs_known_by = teacher.info.tokenizer_fingerprint
    if tokenizer_fingerprint(vocabulary(ours)) == theirs_known_by:
        _refuse_unread(config, "the teacher has the student's tokenizer")
        return None
    name = teacher.info.model if asked.tokenizer == "auto" else asked.tokenizer
    theirs = known_tokenizer(name, theirs_known_by, teacher.label, _FIELD)
    paired = role_pair(asked.roles, ours, theirs)
    if paired is not None:
        _refuse_unread(config, "student and teacher differ in special tokens only")
        return paired
    if isinstance(config, RLJob):
        raise InvalidInput(
            "the tokenizers of student and teacher differ in more than special tokens, and the KL"
            " of rl compares rows of the same tokens",
            field=_FIELD,
            hint="use a teacher with the student's words (distill pair says what differs; tokens"
            " such as <think> need teacher.roles), or a job of method on_policy",
        )
    student, reader = (
        bytes_of(ours, "student", "student.model"),
        bytes_of(theirs, "teacher", _FIELD),
    )
    aligner = Aligner(student, reader, end_of(theirs, "teacher", _FIELD))
    return TokenizerPair(aligner, theirs)


def _refuse_unread(config: OnPolicyJob | RLJob, found: str) -> None:
    """Raise InvalidInput if the job has a key that is for tokens aligned by bytes only."""
    if isinstance(config, RLJob):
        return
    method = config.method
    for key, used in (
        ("horizon", method.horizon != "word"),
        ("control_variate", method.control_variate),
    ):
        if used:
            raise InvalidInput(
                f"has no effect: {found}, and the loss is that of every token",
                field=f"method.{key}",
                hint="leave it out",
            )


def reading_of(
    config: OnPolicyJob | RLJob,
    connection: Connection,
    vocab_size: int,
    tokenizer: Any,
    pair: RolePair | None,
) -> Reading | None:
    """Return what a teacher reads; None: the tokens of the student. `tokenizer`: the student's.

    `vocab_size`: number of ids that rows are about.
    """
    most = connection.info.max_length
    if pair is not None:
        return Reading(teacher_prompt(config, pair.tokenizer, most), pair.ids(vocab_size))
    if reads_another_prompt(config):
        return Reading(teacher_prompt(config, tokenizer, most))
    return None


def role_pair(
    given: Mapping[str, str], ours: Any, theirs: Any, field: str = ROLES
) -> RolePair | None:
    """Return the pair if the tokenizers differ in their special tokens only, otherwise None.

    Without `given`, tokens that stand for text, such as <think>, must be in both: a tokenizer that
    has none spells the text with others. Raises InvalidInput, naming `field`, if roles are given
    in vain.
    """
    student, teacher = TokenRoles.of(ours), TokenRoles.of(theirs)
    try:
        found = role_map(student, teacher, given)
    except InvalidInput as error:
        error.field = field
        raise
    if given and found is None:
        raise InvalidInput(
            "the tokenizers of student and teacher differ in more than special tokens",
            field=field,
            hint="leave it out",
        )
    if found is None or (found.missing and not given):
        return None
    named = ", ".join(f"{one} is {other}" for one, other in found.pairs) or "at other ids"
    log.info("the teacher has other special tokens: %s", named)
    both = [student.token(number) or teacher.token(number) for number in range(len(found.ids))]
    return RolePair(found, theirs, both)


def known_tokenizer(name: str, fingerprint: str, label: str, field: str) -> Any:
    """Return the tokenizer at `name`, a directory or hub id, as transformers loads it.

    `fingerprint`: of its tokens. `label`: the teacher or the store that has it. Raises InvalidInput
    or WrongState, naming `field`, if there is none, or one with other tokens.
    """
    try:
        found = load_tokenizer(StudentConfig(model=name))
    except (DistillError, ValueError) as error:  # ValueError: the name is empty
        raise InvalidInput(
            f"the {label} has another tokenizer than the student, and there is none to"
            f" load at {name!r}",
            field=field,
            hint="set it to a directory or hub id with the teacher's tokenizer",
        ) from error
    if tokenizer_fingerprint(vocabulary(found)) != fingerprint:
        raise WrongState(
            f"the tokenizer at {name!r} is not that of the {label}",
            field=field,
            hint="set it to a directory or hub id with the teacher's tokenizer",
        )
    return found


def end_of(tokenizer: Any, label: str, field: str) -> int:
    """Return the id of the token that ends an answer. Raises InvalidInput, naming `field`."""
    end = answer_end(tokenizer)
    if end is None:
        raise InvalidInput(
            f"the tokenizer of the {label} names no token that ends an answer",
            field=field,
            hint="use a directory whose tokenizer_config.json has an eos_token",
        )
    return end


def bytes_of(tokenizer: Any, label: str, field: str) -> ByteTokenizer:
    """Return a tokenizer of transformers as bytes. Raises InvalidInput, naming `field`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInput(
            "a tokenizer without tokenizer.json cannot be aligned with another one",
            field=field,
            hint="convert it with transformers, and save it with the model",
        )
    return ByteTokenizer(json.loads(backend.to_str()), label, field)
