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
from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.data.answer_end import answer_end
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import DistillError, InvalidInput, WrongState
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.model.loading import load_tokenizer, vocabulary
from student_trainer.teachers.connections import Connection

log = logging.getLogger(__name__)

_FIELD = "teacher.tokenizer"


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of a student and of a teacher that has another one.

    form: of the prompts. tokenizer: the teacher's, as transformers loads it.
    """

    aligner: Aligner
    tokenizer: Any
    form: PromptFormat

    @property
    def tokens(self) -> int:
        """Number of ids of the student's tokenizer; its model may have more logits."""
        return len(self.aligner.writer.lengths)

    def prompt(self, rollout: Rollout) -> NDArray[np.int32]:
        """Return the prompt ids [P] that the teacher reads for a rollout, in its own template."""
        form = self.form
        if form.messages_column is None:
            asked = form.asked(rollout.text)
        else:
            asked = form.conversation(rollout.fields, "the record").unanswered()
        return np.array(form.ids(self.tokenizer, asked), np.int32)

    def log_shares(self, prompts: Sequence[Prompt]) -> None:
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
    config: OnPolicyJob, teachers: Mapping[str, Connection], ours: Any
) -> TokenizerPair | None:
    """Return the tokenizers of a job's student and teacher; None if they are, or must be, the same.

    `ours`: the student's. `teachers`: only one if it may have another tokenizer. Raises
    InvalidInput or WrongState, naming `teacher.tokenizer`, if the teacher's tokenizer is not found,
    is not the teacher's, or cannot be aligned.
    """
    wanted = config.teacher.tokenizer
    if wanted == "same":
        return None
    [teacher] = teachers.values()
    theirs_known_by = teacher.info.tokenizer_fingerprint
    if tokenizer_fingerprint(vocabulary(ours)) == theirs_known_by:
        return None
    name = teacher.info.model if wanted == "auto" else wanted
    theirs = known_tokenizer(name, theirs_known_by, teacher.label, _FIELD)
    form = config.data.prompt_format
    check_chat_template(form, template_text(theirs.chat_template))
    student, reader = (
        bytes_of(ours, "student", "student.model"),
        bytes_of(theirs, "teacher", _FIELD),
    )
    aligner = Aligner(student, reader, end_of(theirs, "teacher", _FIELD))
    return TokenizerPair(aligner, theirs, form)


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
