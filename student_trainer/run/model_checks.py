"""What a trainer refuses once it has a tokenizer, and before a weight is loaded. Imports no torch.

What needs no tokenizer is in `clients/preflight/files.py`.
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
from student_trainer.data.captured_stores import Store
from student_trainer.teachers.connections import Connection


def check_hub(config: AnyTraining) -> None:
    """Where the hub is needed, see whether it is there, before its libraries are imported."""
    path = config.data.path if config.data is not None else None
    local_data = path is None or path.endswith(FILE_SUFFIXES) or Path(path).exists()
    if local_data and Path(config.student.model).is_dir():
        return
    use_caches_if_away()


def check_top_k(top_k: int, width: int) -> None:
    """Refuse a head with more ids than the student has; `width`: of its logits."""
    if top_k > width:
        raise InvalidInput(
            f"{top_k} is more than the student's {width} ids",
            field="method.top_k",
            hint=f"lower it; at {width} the KL is exact",
        )


def check_stored_length(store: Store, most: int | None) -> None:
    """Refuse sequences that the student cannot read."""
    if most is not None and store.longest > most:
        raise InvalidInput(
            f"a sequence of the {store.label} has {store.longest} tokens, the student takes {most}",
            field=store.field,
            hint="capture with a smaller method.max_tokens",
        )


def check_vocabulary(teacher: Connection, tokens: Sequence[str], width: int) -> None:
    """Refuse a teacher whose ids mean other tokens than the student's, naming the first one.

    `tokens`: the student's by id; `width`: of the student's logits.
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
    store: Store, tokens: Sequence[str], width: int, stored: Sequence[str] | None
) -> None:
    """The same for a store. `stored`: the tokens of its tokenizer, where that is at hand."""
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
            f" the tokenizers agree, so one is padded from id {min(width, theirs)} on",
            field="student.model",
            hint="pad or trim the student's embeddings to the teacher's size",
        )
