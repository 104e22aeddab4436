"""Everything that can be known to be wrong before a weight is loaded. Imports no torch: an answer
comes in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from clients.config import DataConfig, JobConfig, StudentConfig
from clients.hub import use_caches_if_away
from clients.offline_config import OfflineData, OfflineJob
from clients.records import FILE_SUFFIXES
from clients.rl_config import RLJob
from clients.score_query import tokenizer_fingerprint
from clients.token_ids import first_difference
from protos.errors import InvalidInput, WrongState
from protos.transport import MAX_MESSAGE_BYTES
from student_trainer.connections import AnyTraining, Connection
from student_trainer.stores import Store

log = logging.getLogger(__name__)


def check_hub(config: AnyTraining) -> None:
    """Where the hub is needed, see whether it is there, before its libraries are imported."""
    path = config.data.path if config.data is not None else None
    local_data = path is None or path.endswith(FILE_SUFFIXES) or Path(path).exists()
    if local_data and Path(config.student.model).is_dir():
        return
    use_caches_if_away()


def check_student(student: StudentConfig) -> None:
    """Refuse a student directory without a model in it."""
    path = Path(student.model)
    if path.is_dir() and not ((path / "config.json").is_file() and any(path.glob("*.safetensors"))):
        missing = "*.safetensors" if (path / "config.json").is_file() else "config.json"
        raise InvalidInput(
            f"no {missing} in {path}",
            field="student.model",
            hint="give a Hugging Face directory with config, tokenizer and safetensors",
        )


def check_processes(config: AnyTraining) -> None:
    """Refuse more processes than there is work for: one without any would stop the others."""
    for field, work in (
        ("train.prompts_per_step", config.sequences_per_step),
        ("eval.prompts", config.eval.prompts),
    ):
        if work < config.train.processes:
            raise InvalidInput(
                f"{work} sequences cannot be shared by {config.train.processes} processes",
                field=field,
                hint="raise it, or lower train.processes",
            )


def check_data(data: DataConfig | OfflineData) -> None:
    """Refuse a data file that is not there."""
    for field in ("path", "eval_path", "eval_prompts"):
        path = getattr(data, field, None)
        if path is not None and path.endswith(FILE_SUFFIXES) and not Path(path).is_file():
            raise InvalidInput(
                f"no such file: {path}", field=f"data.{field}", hint="check the path"
            )


def check_teacher(teacher: Connection, config: JobConfig | RLJob, top_k: int, key: str) -> None:
    """Refuse what this teacher cannot do: k, which the job has under `key`, and lengths."""
    most = teacher.info.max_top_k
    remedy = f"lower it to {most}, or start the teacher with a larger --max-top-k"
    _check_head(teacher, top_k, key, remedy)
    longest = config.method.max_prompt_tokens + config.method.max_new_tokens
    check_length(longest, teacher.label, teacher.info.max_length)
    # A student's own head ids travel with the query, four bytes each.
    size = 4 * config.method.max_new_tokens * top_k
    if config.method.divergence == "reverse_kl" and size > MAX_MESSAGE_BYTES * 3 // 4:
        raise InvalidInput(
            f"{config.method.max_new_tokens} tokens with {top_k} head ids each are "
            "more than one query holds",
            field=key,
            hint=f"lower it to {MAX_MESSAGE_BYTES * 3 // 16 // config.method.max_new_tokens}",
        )


def check_live_teacher(teacher: Connection, config: OfflineJob, store: Store) -> None:
    """Refuse one that cannot go on where the stored rows end: of other tokens, or with less k."""
    remedy = "start the teacher with a larger --max-top-k"
    _check_head(teacher, store.top_k, "teacher.address", remedy)
    longest = store.longest + config.method.max_new_tokens
    check_length(longest, teacher.label, teacher.info.max_length)
    for name in ("tokenizer_fingerprint", "vocab_size"):
        if str(getattr(teacher.info, name)) != store.facts[name]:
            raise WrongState(
                f"the {name} of the teacher differs from that of the {store.label}",
                field="teacher.address",
                hint="give the teacher that the store was captured from, or one of its tokenizer",
            )
    if teacher.info.fingerprint != store.facts["teacher_fingerprint"]:
        log.warning("the %s is not the one that the %s is of", teacher.label, store.label)


def check_length(longest: int, model: str, most: int | None) -> None:
    """Refuse prompts and answers that together are longer than `model` can read."""
    if most is not None and longest > most:
        raise InvalidInput(
            f"a prompt and its answer may have {longest} tokens, the {model} takes {most}",
            field="method.max_new_tokens",
            hint="lower it, or give shorter prompts",
        )


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


def _check_head(teacher: Connection, top_k: int, field: str, remedy: str) -> None:
    if top_k > teacher.info.max_top_k:
        raise InvalidInput(
            f"{top_k} is more than the {teacher.label} gives ({teacher.info.max_top_k})",
            field=field,
            hint=remedy,
        )
