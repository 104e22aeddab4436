"""Checks of the student against teachers and stores, before weights are loaded. Imports no torch.

The checks that need no tokenizer are in `clients/preflight/files.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clients.config.kinds import AnyTraining
from clients.data.hub import use_caches_if_away
from clients.data.records import FILE_SUFFIXES
from clients.data.tokenization import first_difference
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import InvalidInput, WrongState
from student_trainer.data.captured_stores import TrainingStore
from student_trainer.teachers.connections import Connection


def check_hub(config: AnyTraining) -> None:
    """Switch the hub's libraries to their cache if the job needs the hub and it does not answer.

    Call it before these libraries are imported.
    """
    paths = [] if config.data is None else [path for _, path in config.data.training_paths]
    local_data = all(path.endswith(FILE_SUFFIXES) or Path(path).exists() for path in paths)
    if local_data and Path(config.student.model).is_dir():
        return
    use_caches_if_away()


def check_top_k(top_k: int, width: int) -> None:
    """Raise InvalidInput if `top_k` exceeds `width`, the number of the student's logits."""
    if top_k > width:
        raise InvalidInput(
            f"{top_k} is more than the {width} token ids of the student",
            field="method.top_k",
            hint=f"lower it to at most {width}, where the KL is exact",
        )


def check_max_tokens(max_tokens: int, most: int | None) -> None:
    """Raise InvalidInput if the student reads less than `max_tokens`; `most`: None is no limit."""
    if most is not None and max_tokens > most:
        raise InvalidInput(
            f"{max_tokens} is more than the {most} tokens that the student can read",
            field="method.max_tokens",
            hint=f"lower it to {most}",
        )


def check_stored_length(store: TrainingStore, most: int | None) -> None:
    """Raise InvalidInput if a stored sequence has more than `most` tokens; None is no limit."""
    if most is not None and store.longest > most:
        raise InvalidInput(
            f"a sequence of the {store.label} has {store.longest} tokens, but the student can read"
            f" only {most}",
            field=store.field,
            hint="capture again with a smaller method.max_tokens",
        )


def check_vocabulary(teacher: Connection, tokens: Sequence[str], width: int) -> None:
    """Raise WrongState if teacher and student do not have the same token for every id.

    The message names the first id that differs. `tokens`: the student's tokens by id. `width`: the
    number of the student's logits, which must be the teacher's. Raises Unavailable if the teacher
    does not answer.
    """
    info = teacher.info
    if tokenizer_fingerprint(tokens) != info.tokenizer_fingerprint:
        raise WrongState(
            first_difference(teacher.client.vocabulary(), tokens),
            field="student.model",
            hint=f"distillation by token id needs a student with the {teacher.label}'s tokenizer",
        )
    _check_width(width, teacher.label, info.vocab_size)


def check_stored_vocabulary(
    store: TrainingStore, tokens: Sequence[str], width: int, stored: Sequence[str] | None
) -> None:
    """Raise WrongState if store and student do not have the same token for every id.

    `stored`: the tokens of the store's tokenizer, None if it is not on this machine; with them, the
    message names the first id that differs.
    """
    theirs = store.facts["tokenizer_fingerprint"]
    if tokenizer_fingerprint(tokens) != theirs:
        what = f"the {store.label} was captured with another tokenizer than the student's"
        if stored is not None and tokenizer_fingerprint(stored) == theirs:
            what = first_difference(stored, tokens)
        raise WrongState(
            what,
            field="student.model",
            hint="distillation by token id needs a student with the store's tokenizer",
        )
    _check_width(width, store.label, int(store.facts["vocab_size"]))


def _check_width(width: int, label: str, theirs: int) -> None:
    if width != theirs:
        raise WrongState(
            f"the student has logits for {width} ids, the {label} for {theirs};"
            f" the tokenizers agree, so ids from {min(width, theirs)} on are padding",
            field="student.model",
            hint=f"pad or trim the student's embeddings to {theirs} ids",
        )
