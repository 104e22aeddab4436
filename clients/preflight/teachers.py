"""What a job asks of its teachers, held against what they say of themselves. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from clients.config.capture import CaptureJob
from clients.config.kinds import AnyJob
from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.store.captured_store import CapturedStore, captured_store_of
from clients.teacher.info import TeacherInfo
from protos.errors import InvalidInput, WrongState
from protos.rpc.transport import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)


class Limits(Protocol):
    """What a teacher can do at most: a service's info, or that of an engine."""

    @property
    def max_top_k(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def max_tail_samples(self) -> int: ...


def services_of(config: AnyJob) -> Mapping[str, str | list[str]]:
    """Addresses of the running teachers that the job needs, by name; "" where it is the only one.

    Empty where no service scores.
    """
    if not isinstance(config, CaptureJob):
        return {} if config.teacher is None else config.teacher_addresses
    loads_its_own = config.teacher.model is not None or config.method.ray is not None
    return {} if loads_its_own else {"": config.teacher.address}


def field_of(name: str) -> str:
    """The key of a job that has the address of the teacher of this name."""
    return f"teachers.{name}" if name else "teacher.address"


def label_of(name: str) -> str:
    """What people are told."""
    return f"teacher {name}".strip()


def check_teachers(config: AnyJob, infos: Mapping[str, TeacherInfo]) -> None:
    """Refuse what these teachers, by their names, cannot do. Raises InvalidInput, WrongState."""
    for name, info in infos.items():
        match config:
            case OnPolicyJob():
                _check_scorer(info, label_of(name), config, config.teacher.top_k, "teacher.top_k")
            case RLJob():
                _check_scorer(info, label_of(name), config, config.method.top_k, "method.top_k")
            case OfflineJob():
                _check_live_teacher(info, label_of(name), captured_store_of(config)[0])
            case CaptureJob():
                check_capture(info, config)


def check_capture(teacher: Limits, job: CaptureJob) -> None:
    """Refuse a k, a length or a number of samples that this teacher does not do."""
    if job.teacher.top_k > teacher.max_top_k:
        raise InvalidInput(
            f"{job.teacher.top_k} is more than this teacher gives ({teacher.max_top_k})",
            field="teacher.top_k",
            hint=f"lower it to {teacher.max_top_k}",
        )
    if job.method.tail_samples > teacher.max_tail_samples:
        raise InvalidInput(
            f"{job.method.tail_samples} is more than this teacher draws"
            f" ({teacher.max_tail_samples})",
            field="method.tail_samples",
            hint=f"lower it to {teacher.max_tail_samples}",
        )
    if job.method.max_tokens > teacher.max_length:
        raise InvalidInput(
            f"the teacher takes sequences of {teacher.max_length} tokens, not of"
            f" {job.method.max_tokens}",
            field="method.max_tokens",
            hint=f"lower it to {teacher.max_length}",
        )


def check_length(longest: int, model: str, most: int | None) -> None:
    """Refuse prompts and answers that together are longer than `model` can read."""
    if most is not None and longest > most:
        raise InvalidInput(
            f"a prompt and its answer may have {longest} tokens, the {model} takes {most}",
            field="method.max_new_tokens",
            hint="lower it, or give shorter prompts",
        )


def _check_scorer(
    info: TeacherInfo, label: str, config: OnPolicyJob | RLJob, top_k: int, key: str
) -> None:
    """Refuse k, which the job has under `key`, and lengths."""
    remedy = f"lower it to {info.max_top_k}, or start the teacher with a larger --max-top-k"
    _check_head(info, label, top_k, key, remedy)
    longest = config.method.max_prompt_tokens + config.method.max_new_tokens
    check_length(longest, label, info.max_length)
    # A student's own head ids travel with the query, four bytes each.
    size = 4 * config.method.max_new_tokens * top_k
    if config.method.divergence == "reverse_kl" and size > MAX_MESSAGE_BYTES * 3 // 4:
        raise InvalidInput(
            f"{config.method.max_new_tokens} tokens with {top_k} head ids each are "
            "more than one query holds",
            field=key,
            hint=f"lower it to {MAX_MESSAGE_BYTES * 3 // 16 // config.method.max_new_tokens}",
        )


def _check_live_teacher(info: TeacherInfo, label: str, store: CapturedStore) -> None:
    """Refuse one that cannot go on where the stored rows end: of other tokens, or with less k."""
    remedy = "start the teacher with a larger --max-top-k"
    _check_head(info, label, store.top_k, "teacher.address", remedy)
    for name in ("tokenizer_fingerprint", "vocab_size"):
        if str(getattr(info, name)) != store.facts[name]:
            raise WrongState(
                f"the {name} of the teacher differs from that of the {store.label}",
                field="teacher.address",
                hint="give the teacher that the store was captured from, or one of its tokenizer",
            )
    if info.fingerprint != store.facts["teacher_fingerprint"]:
        log.warning("the %s is not the one that the %s is of", label, store.label)


def _check_head(info: TeacherInfo, label: str, top_k: int, field: str, remedy: str) -> None:
    if top_k > info.max_top_k:
        raise InvalidInput(
            f"{top_k} is more than the {label} gives ({info.max_top_k})",
            field=field,
            hint=remedy,
        )
