"""Checks that the teachers support the job. Does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from clients.config.capture import CaptureJob
from clients.config.kinds import AnyJob
from clients.config.tables.job import JobConfig
from clients.config.tables.teacher import RowRequest
from clients.preflight.limits import check_lengths
from clients.preflight.vocabulary import require_narrowing
from clients.store.captured_store import CapturedStore, captured_stores
from clients.teacher.client import TeacherClient
from clients.teacher.info import TeacherInfo
from protos.errors import DistillError, InvalidInput, WrongState

log = logging.getLogger(__name__)


class TeacherLimits(Protocol):
    """The limits of a teacher, which the info of a service or of an engine contains."""

    @property
    def max_top_k(self) -> int:
        """Largest number of head ids per row."""

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a sequence."""

    @property
    def max_tail_samples(self) -> int:
        """Largest number of tail samples per row."""

    @property
    def only_temperature_one(self) -> bool:
        """Whether the teacher only scores at temperature 1."""

    @property
    def takes_images(self) -> bool:
        """Whether the teacher's model accepts images."""


def services_of(config: JobConfig) -> Mapping[str, str | list[str]]:
    """Return the addresses of the teacher services that the job needs, by name.

    A single teacher has the name "". The result is empty if the job needs no service, or if its
    service is started for the job. In the second case, `started_services.connected` returns the job
    with the address.
    """
    return {} if config.started_teacher is not None else config.teacher_addresses


def adapter_of(config: JobConfig) -> str:
    """Return the name of the adapter that the job selects at its teacher, or ""."""
    return (config.teacher_link and config.teacher_link.adapter) or ""


def field_of(name: str) -> str:
    """Return the key of the job file that has the address of the teacher `name`."""
    return f"teachers.{name}" if name else "teacher.address"


def label_of(name: str) -> str:
    """Return the name of a teacher for messages: `teacher NAME`, or `teacher` without a name."""
    return f"teacher {name}".strip()


def contexts_of(infos: Mapping[str, TeacherInfo]) -> Mapping[str, int]:
    """Return the maximum number of tokens that each teacher reads, by label, for `fit_limits`."""
    return {label_of(name): info.max_length for name, info in infos.items()}


def ask_infos(config: AnyJob) -> Mapping[str, TeacherInfo]:
    """Return the infos of the job's teachers by name. A teacher must answer at once.

    Teachers without an answer are left out.
    """
    infos: dict[str, TeacherInfo] = {}
    for name, address in services_of(config).items():
        with TeacherClient(address, scope="preflight") as client, suppress(DistillError):
            infos[name] = client.info(waits=False)
    return infos


def check_teachers(config: AnyJob, infos: Mapping[str, TeacherInfo]) -> None:
    """Check a job against the infos of its teachers. `infos`: the info of each teacher, by name.

    Raises InvalidInput if the limits of a teacher are too small for the job. Raises WrongState if
    the teacher of an offline job does not match the store of the job.
    """
    _check_images(config, infos)
    for name, info in infos.items():
        if config.row_request is not None:
            check_lengths(config, label_of(name), info.max_length)
            _check_scorer(info, label_of(name), config.row_request)
        elif (stores := captured_stores(config)) is not None:
            _check_live_teacher(info, label_of(name), stores[0])
        elif isinstance(config, CaptureJob):
            check_capture(info, config)


def _check_images(config: JobConfig, infos: Mapping[str, TeacherLimits]) -> None:
    """Raise InvalidInput if a job with images has no teacher that accepts images.

    One such teacher is enough, even if the job has several teachers.
    """
    prompts = config.prompt_format
    if prompts is None or prompts.image_column is None or not infos:
        return
    if not any(info.takes_images for info in infos.values()):
        raise InvalidInput(
            "the teacher reads no images" if len(infos) == 1 else "no teacher reads images",
            field="data.image_column",
            hint="use a teacher whose model reads images, with --engine hf and the package pillow",
        )


def check_capture(teacher: TeacherLimits, job: CaptureJob) -> None:
    """Raise InvalidInput if the job requests more than the teacher supports."""
    _check_images(job, {"": teacher})
    _check_temperature(teacher, "teacher", job.method.temperature)
    if job.teacher.top_k > teacher.max_top_k:
        raise InvalidInput(
            f"{job.teacher.top_k} head ids are more than this teacher returns"
            f" ({teacher.max_top_k})",
            field="teacher.top_k",
            hint=f"lower the value to {teacher.max_top_k}",
        )
    if job.method.tail_samples > teacher.max_tail_samples:
        raise InvalidInput(
            f"{job.method.tail_samples} tail samples are more than this teacher draws"
            f" ({teacher.max_tail_samples})",
            field="method.tail_samples",
            hint=f"lower the value to {teacher.max_tail_samples}",
        )
    check_lengths(job, "teacher", teacher.max_length)


def _check_scorer(info: TeacherInfo, label: str, request: RowRequest) -> None:
    """Raise InvalidInput if a teacher of rollouts cannot return the rows of `request`."""
    hint = f"lower the value to {info.max_top_k}, or start the teacher with a larger --max-top-k"
    _check_head(info, label, request.top_k, request.top_k_key, hint)
    _check_ids(info, label, request)
    _check_temperature(info, label, request.temperature)
    if request.draws > info.max_tail_draws:
        raise InvalidInput(
            f"the {label} scores {info.max_tail_draws} tail draws per row, not {request.draws}",
            field="method.tail",
            hint=f"install the same version on the teacher's machine, or use '{request.tail}'",
        )
    if request.tail_samples > info.max_tail_samples:
        raise InvalidInput(
            f"the {label} draws {info.max_tail_samples} tail samples per row, not"
            f" {request.tail_samples}",
            field="method.tail",
            hint="lower teacher.tail_draws, or set method.tail = 'bucket+sampled'",
        )
    # For the reverse KL each query carries the student's head ids and draws, four bytes each.
    max_ids = info.max_request_bytes * 3 // 16 // request.answer_tokens
    if request.of_student and request.top_k + request.draws > max_ids:
        raise InvalidInput(
            f"{request.answer_tokens} tokens with {request.top_k} head ids and {request.draws}"
            " draws each exceed the size of one query",
            field=request.top_k_key,
            hint=f"lower the value or the draws: a row has at most {max_ids} ids",
        )


def _check_temperature(info: TeacherLimits, label: str, temperature: float) -> None:
    if info.only_temperature_one and temperature != 1:
        raise InvalidInput(
            f"the {label} scores at temperature 1 only, not {temperature:g}",
            field="method.temperature",
            hint="use 1.0, or a teacher that runs the model itself",
        )


def _check_ids(info: TeacherInfo, label: str, request: RowRequest) -> None:
    """Raise InvalidInput if the teacher scores fewer given ids per row than the student sends."""
    max_ids, ids = info.max_chosen_ids, request.top_k + request.draws
    if max_ids is None or not request.of_student or ids <= max_ids:
        return
    if not max_ids:
        raise InvalidInput(
            f"the {label} scores only its own most likely ids, but reverse_kl needs the"
            " student's ids",
            field="method.divergence",
            hint=f"{request.teacher_head}, or a server that scores chosen ids",
        )
    raise InvalidInput(
        f"the {label} scores {max_ids} chosen ids per row, not {request.top_k} head ids and"
        f" {request.draws} draws",
        field="teacher.top_k",
        hint=f"lower the value, or start the server with --max-logprobs {ids + 1}",
    )


def _check_live_teacher(info: TeacherInfo, label: str, store: CapturedStore) -> None:
    """Raise InvalidInput or WrongState if a running teacher does not match a store.

    The teacher must have the tokenizer of the store and enough logits. It must support the head
    size, the temperature and the tail samples of the store. The store must be captured without a
    context.
    """
    hint = "start the teacher with a larger --max-top-k"
    _check_head(info, label, store.top_k, "teacher.address", hint)
    if info.only_temperature_one and store.temperature != 1:
        raise WrongState(
            f"the {label} scores at temperature 1 only, and the {store.label} has rows of"
            f" {store.temperature:g}",
            field="teacher.address",
            hint="use a teacher with the engine hf or vllm, or train from the store alone",
        )
    if store.tail_samples > info.max_tail_samples:
        raise WrongState(
            f"the {label} draws at most {info.max_tail_samples} tail samples per row, and the"
            f" {store.label} has {store.tail_samples}",
            field="teacher.address",
            hint="use a teacher with the engine hf or vllm, or train from the store alone",
        )
    if "context" in store.facts:
        raise WrongState(
            f"the teacher of the {store.label} used a context, which the stored prompts do not"
            f" have",
            field="teacher.address",
            hint="train from the store alone, or capture again without teacher.context",
        )
    store_vocab_size = int(store.facts["vocab_size"])
    has_same_tokenizer = info.tokenizer_fingerprint == store.facts["tokenizer_fingerprint"]
    if not has_same_tokenizer or info.vocab_size < store_vocab_size:
        differing_fact = "number of logits" if has_same_tokenizer else "tokenizer_fingerprint"
        raise WrongState(
            f"the {differing_fact} of the teacher differs from that of the {store.label}",
            field="teacher.address",
            hint="use the teacher of the capture, or a teacher with the same tokenizer",
        )
    require_narrowing(info, store_vocab_size, label, "teacher.address")
    if info.fingerprint != store.facts["teacher_fingerprint"]:
        log.warning("the %s is not the teacher that made the %s", label, store.label)


def _check_head(info: TeacherInfo, label: str, top_k: int, field: str, hint: str) -> None:
    if top_k > info.max_top_k:
        raise InvalidInput(
            f"{top_k} head ids are more than the {label} returns ({info.max_top_k})",
            field=field,
            hint=hint,
        )
