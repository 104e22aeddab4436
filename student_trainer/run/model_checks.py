"""Checks of the student against teachers and stores, before weights are loaded. Without torch.

Checks that need no tokenizer are in `clients/preflight/files.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.config.kinds import AnyTraining
from clients.data.formats import FILE_SUFFIXES, exists_here
from clients.data.hub import use_caches_if_away
from clients.data.models.shape import rope_switch
from clients.data.tokens.tokenizer import first_difference
from clients.preflight.vocabulary import common_ids, other_tokenizer, require_narrowing
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import InvalidInput, WrongState
from student_trainer.data.captured_stores import TrainingStore
from student_trainer.teachers.connections import Connection

log = logging.getLogger(__name__)


def check_hub(config: AnyTraining) -> None:
    """Let the hub's libraries use only their local cache if the hub is unreachable.

    Does nothing if the job needs nothing from the hub. Call this before these libraries are
    imported.
    """
    data_paths = [] if config.data is None else [path for _, path in config.data.training_paths]
    local_data = all(path.endswith(FILE_SUFFIXES) or exists_here(path) for path in data_paths)
    if local_data and Path(config.student.model).is_dir():
        return
    use_caches_if_away()


def max_sequence_length(text_config: Any) -> int | None:
    """Return the maximum number of tokens in a sequence of the student; None if there is no limit.

    `text_config`: the configuration of the student's text model. With LongRoPE, sequences beyond a
    certain length use other rotary factors, and so do all other sequences of their batch. This
    length is then the limit, and a warning is logged.
    """
    max_length: int | None = getattr(text_config, "max_position_embeddings", None)
    switch = rope_switch(text_config)
    if switch is None or (max_length is not None and max_length <= switch):
        return max_length
    log.warning(
        "the student has other rotary factors beyond %d tokens (LongRoPE): longer sequences are"
        " refused; to train on them, make short_factor equal to long_factor in its config.json",
        switch,
    )
    return switch


def check_top_k(top_k: int, width: int, field: str) -> None:
    """Raise InvalidInput if `top_k` exceeds `width`, the number of the student's token ids.

    `field`: the key that sets `top_k`, for the error message.
    """
    if top_k > width:
        raise InvalidInput(
            f"{top_k} is more than the {width} token ids of the student",
            field=field,
            hint=f"set the value to at most {width}; the KL is exact at {width}",
        )


def check_max_tokens(max_tokens: int, max_length: int | None) -> None:
    """Raise InvalidInput if `max_tokens` exceeds `max_length`.

    `max_length`: the maximum number of tokens in a sequence of the student; None: no limit.
    """
    if max_length is not None and max_tokens > max_length:
        raise InvalidInput(
            f"{max_tokens} is more than the {max_length} tokens that the student can read",
            field="method.max_tokens",
            hint=f"set method.max_tokens to at most {max_length}",
        )


def check_stored_length(store: TrainingStore, max_length: int | None) -> None:
    """Raise InvalidInput if a sequence of the store has more than `max_length` tokens.

    `max_length`: the maximum number of tokens in a sequence of the student; None: no limit.
    """
    if max_length is not None and store.longest > max_length:
        raise InvalidInput(
            f"a sequence of the {store.label} has {store.longest} tokens, but the student can read"
            f" only {max_length}",
            field=store.field,
            hint=f"capture again with method.max_tokens = {max_length}",
        )


def check_vocabulary(teacher: Connection, tokens: Sequence[str], width: int) -> int:
    """Return the number of ids that teacher and student have in common; see `common_ids`.

    `tokens`: the student's tokens by id. `width`: the number of the student's logits.

    Raises WrongState if the tokens differ; the message gives the first difference. Also raises
    WrongState if the numbers of logits differ by more than padding. Raises Unavailable if the
    teacher does not answer.
    """
    info = teacher.info
    if tokenizer_fingerprint(tokens) != info.tokenizer_fingerprint:
        difference = first_difference(teacher.client.vocabulary(), tokens)
        raise other_tokenizer(difference, teacher.label)
    return check_width(teacher, tokens, width)


def check_width(teacher: Connection, tokens: Sequence[str], width: int) -> int:
    """Return the number of ids that teacher and student have in common.

    The tokens may differ in special tokens: they are not compared with the teacher's. `tokens`,
    `width`: see `check_vocabulary`, which raises the same errors about the number of logits.
    """
    info = teacher.info
    common = common_ids(width, info.vocab_size, teacher.label, tokens)
    require_narrowing(info, common, teacher.label, "student.model")
    return common


def check_stored_vocabulary(
    store: TrainingStore, tokens: Sequence[str], width: int, stored_tokens: Sequence[str] | None
) -> int:
    """Return the number of ids that the rows of the store cover.

    - tokens: the student's tokens by id.
    - width: the number of the student's logits.
    - stored_tokens: the tokens of the store's tokenizer by id, with which an error message can give
      the first id that differs; None if this tokenizer is not on this machine.

    Raises WrongState if store and student have different tokens for an id, or if the rows cover ids
    for which the student has no logits.
    """
    stored_fingerprint = store.facts["tokenizer_fingerprint"]
    if tokenizer_fingerprint(tokens) != stored_fingerprint:
        message = f"the {store.label} was captured with another tokenizer than the student's"
        if stored_tokens is not None and tokenizer_fingerprint(stored_tokens) == stored_fingerprint:
            message = first_difference(stored_tokens, tokens)
        raise WrongState(
            message,
            field="student.model",
            hint="use a student with the store's tokenizer, or set data.tokenizer = 'auto'",
        )
    return check_stored_width(store, tokens, width)


def check_stored_width(store: TrainingStore, tokens: Sequence[str], width: int) -> int:
    """Return the number of ids that the rows of the store cover.

    The tokens may differ in special tokens: they are not compared with the store's. See
    `check_stored_vocabulary` for the arguments and errors.
    """
    stored_width = int(store.facts["vocab_size"])
    common_ids_count = common_ids(width, stored_width, store.label, tokens)
    if common_ids_count < stored_width:
        # The mass of later ids is not stored, so the rows cannot be normalised without them.
        raise WrongState(
            f"the rows of the {store.label} cover {stored_width} ids, but the student has"
            f" logits for {width} only",
            field="student.model",
            hint=f"capture again with student.model set to a model with {width} logits",
        )
    return common_ids_count
