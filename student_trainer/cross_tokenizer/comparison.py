"""Compares the tokenizers of teacher and student, and prepares pairs of different tokenizers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.teacher import OtherTokens
from clients.cross_tokenizer.alignment import Aligner, measure_shares
from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer
from clients.cross_tokenizer.special_tokens import FIELD as ROLES
from clients.cross_tokenizer.special_tokens import (
    SpecialTokenMap,
    SpecialTokens,
    map_special_tokens,
)
from clients.data.tokens.answers import answer_end
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import DistillError, InvalidInput, WrongState
from student_trainer.data.prompts import Prompt
from student_trainer.model.loading import load_tokenizer, vocabulary
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.teacher_input import (
    TeacherInput,
    teacher_form,
    teacher_prompt,
)

log = logging.getLogger(__name__)

_FIELD = "teacher.tokenizer"


@dataclass(frozen=True)
class SpecialTokenPair:
    """The tokenizers of a student and a teacher that differ only in special tokens.

    - roles: which special token of the student corresponds to which of the teacher.
    - tokenizer: the teacher's transformers tokenizer.
    - tokens: the token of each id; "" for an id that neither tokenizer uses.
    """

    roles: SpecialTokenMap
    tokenizer: Any
    tokens: Sequence[str]

    def ids(self, vocab_size: int) -> NDArray[np.int32]:
        """Return the teacher's id for each of the first `vocab_size` ids of the student."""
        teacher_ids = np.arange(vocab_size, dtype=np.int32)
        count = min(len(self.roles.ids), vocab_size)
        teacher_ids[:count] = self.roles.ids[:count]
        return teacher_ids


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of a student and a teacher that differ in ordinary tokens.

    - aligner: aligns the tokens of the two by their bytes.
    - tokenizer: the teacher's transformers tokenizer.
    """

    aligner: Aligner
    tokenizer: Any

    @property
    def tokens(self) -> int:
        """Number of ids of the student's tokenizer. The student model may have more logits."""
        return len(self.aligner.writer.lengths)

    def log_facts(self, prompts: Sequence[Prompt]) -> None:
        """Log the percentage of student tokens that are exactly one token of the teacher.

        The tokens are those of the prompts and their answers.
        """
        texts = [f"{prompt.text}\n{prompt.answer}" for prompt in prompts]
        report = measure_shares(self.aligner, texts)
        log.info(
            "the teacher has another tokenizer: %.1f%% of %d tokens of held-out prompts and"
            " answers are one token of it",
            100 * report.one_to_one,
            report.tokens,
        )


def compare_tokenizers(
    config: OnPolicyJob | RLJob, teachers: Mapping[str, Connection], student_tokenizer: Any
) -> TokenizerPair | SpecialTokenPair | None:
    """Return the different tokenizers of a job's student and teacher.

    None if the tokenizers are equal, or if the job requires equal ones. `teachers`: has only one
    teacher if its tokenizer may differ. Raises InvalidInput or WrongState:

    - field `teacher.tokenizer`: the given tokenizer does not exist, does not match the teacher,
      cannot be aligned, or would have to be aligned for an RL job.
    - field `teacher.roles`: the job names roles that the tokenizers do not have.
    """
    teacher = config.teacher
    pair = None
    if teacher is not None and teacher.tokenizer != "same":
        pair = _compare_with_teacher(config, teacher, teachers, student_tokenizer)
    if pair is not None or config.has_other_teacher_prompt:
        teacher_form(
            config, student_tokenizer if pair is None else pair.tokenizer
        )  # may refuse its template
    return pair


def _compare_with_teacher(
    config: OnPolicyJob | RLJob,
    teacher_config: OtherTokens,
    teachers: Mapping[str, Connection],
    student_tokenizer: Any,
) -> TokenizerPair | SpecialTokenPair | None:
    [teacher] = teachers.values()
    fingerprint = teacher.info.tokenizer_fingerprint
    if tokenizer_fingerprint(vocabulary(student_tokenizer)) == fingerprint:
        _refuse_unused_keys(config, "the teacher has the student's tokenizer")
        return None
    name = teacher.info.model if teacher_config.tokenizer == "auto" else teacher_config.tokenizer
    teacher_tokenizer = load_known_tokenizer(name, fingerprint, teacher.label, _FIELD)
    pair = find_special_token_pair(teacher_config.roles, student_tokenizer, teacher_tokenizer)
    if pair is not None:
        _refuse_unused_keys(config, "student and teacher differ in special tokens only")
        return pair
    if not config.aligns_tokens:
        raise InvalidInput(
            "the tokenizers of student and teacher differ in more than special tokens, and the"
            " KL of rl needs the same tokens",
            field=_FIELD,
            hint="use a teacher with the student's tokenizer (distill pair lists the"
            " differences; tokens such as <think> need teacher.roles), or method on_policy",
        )
    student, reader = (
        to_byte_tokenizer(student_tokenizer, "student", "student.model"),
        to_byte_tokenizer(teacher_tokenizer, "teacher", _FIELD),
    )
    aligner = Aligner(student, reader, find_end_token(teacher_tokenizer, "teacher", _FIELD))
    return TokenizerPair(aligner, teacher_tokenizer)


def _refuse_unused_keys(config: OnPolicyJob | RLJob, reason: str) -> None:
    """Raise InvalidInput if the job sets a key that only has an effect when tokens are aligned."""
    for key in config.alignment_keys:
        raise InvalidInput(
            f"has no effect: {reason}, so the loss uses every token",
            field=key,
            hint="remove the key",
        )


def build_teacher_input(
    config: OnPolicyJob | RLJob,
    connection: Connection,
    vocab_size: int,
    tokenizer: Any,
    pair: SpecialTokenPair | None,
) -> TeacherInput | None:
    """Return how rollouts are converted to the teacher's input.

    None if the teacher reads the student's tokens. `vocab_size`: number of ids that rows cover.
    `tokenizer`: the student's tokenizer.
    """
    max_length = connection.info.max_length
    if pair is not None:
        return TeacherInput(
            teacher_prompt(config, pair.tokenizer, max_length), pair.ids(vocab_size)
        )
    if config.has_other_teacher_prompt:
        return TeacherInput(teacher_prompt(config, tokenizer, max_length))
    return None


def find_special_token_pair(
    roles: Mapping[str, str], student_tokenizer: Any, teacher_tokenizer: Any, field: str = ROLES
) -> SpecialTokenPair | None:
    """Return the pair of tokenizers if they differ only in special tokens, otherwise None.

    `roles`: the job's roles of special tokens, may be empty. Without roles, both tokenizers must
    have the special tokens that represent text, such as <think>: a tokenizer without such a token
    encodes the text with other tokens. Raises InvalidInput, with `field`, if the roles do not fit.
    """
    student, teacher = SpecialTokens.of(student_tokenizer), SpecialTokens.of(teacher_tokenizer)
    try:
        role_mapping = map_special_tokens(student, teacher, roles)
    except InvalidInput as error:
        error.field = field
        raise
    if roles and role_mapping is None:
        raise InvalidInput(
            "the tokenizers of student and teacher differ in more than special tokens",
            field=field,
            hint="remove the key",
        )
    if role_mapping is None or (role_mapping.missing and not roles):
        return None
    described_pairs = (
        ", ".join(
            f"{student_role} is {teacher_role}" for student_role, teacher_role in role_mapping.pairs
        )
        or "at other ids"
    )
    log.info("the teacher has other special tokens: %s", described_pairs)
    tokens = [
        student.token(number) or teacher.token(number) for number in range(len(role_mapping.ids))
    ]
    return SpecialTokenPair(role_mapping, teacher_tokenizer, tokens)


def load_known_tokenizer(name: str, fingerprint: str, label: str, field: str) -> Any:
    """Load the tokenizer `name` with transformers, and check its fingerprint.

    - name: a directory or hub id.
    - fingerprint: the expected fingerprint of its tokens.
    - label: the teacher or the store that uses the tokenizer, for messages.
    - field: the job key, for errors.

    Raises InvalidInput if the tokenizer does not exist, and WrongState if its fingerprint differs.
    """
    try:
        tokenizer = load_tokenizer(StudentConfig(model=name))
    except (DistillError, ValueError) as error:  # ValueError: the name is empty
        raise InvalidInput(
            f"the {label} has another tokenizer than the student, and no tokenizer can be loaded"
            f" from {name!r}",
            field=field,
            hint="set the key to a directory or hub id with the teacher's tokenizer",
        ) from error
    if tokenizer_fingerprint(vocabulary(tokenizer)) != fingerprint:
        raise WrongState(
            f"the tokenizer at {name!r} is not that of the {label}",
            field=field,
            hint="set the key to a directory or hub id with the teacher's tokenizer",
        )
    return tokenizer


def find_end_token(tokenizer: Any, label: str, field: str) -> int:
    """Return the id of the token that ends an answer.

    Raises InvalidInput, with `field`, if the tokenizer has no end token.
    """
    end = answer_end(tokenizer)
    if end is None:
        raise InvalidInput(
            f"the tokenizer of the {label} has no end-of-sequence token",
            field=field,
            hint="use a directory whose tokenizer_config.json has an eos_token",
        )
    return end


def to_byte_tokenizer(tokenizer: Any, label: str, field: str) -> ByteTokenizer:
    """Convert a transformers tokenizer to a ByteTokenizer.

    Raises InvalidInput, with `field`, if this is not possible.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInput(
            "a tokenizer without tokenizer.json cannot be aligned with another tokenizer",
            field=field,
            hint="convert the tokenizer with transformers, and save it in the model directory",
        )
    return ByteTokenizer(json.loads(backend.to_str()), label, field)
