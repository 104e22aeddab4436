"""Builds the metadata of a captured store; `clients/store/manifest.py` documents each key."""

from __future__ import annotations

import json

import xxhash

from clients.config.capture import CaptureData, CaptureJob
from clients.store.manifest import PART, SEQUENCES
from teacher_service.capture.plan import CapturePlan
from teacher_service.capture.teacher import TeacherFacts


def build_metadata(
    job: CaptureJob, teacher: TeacherFacts, plan: CapturePlan, data_fingerprint: str
) -> dict[str, str]:
    """Return the metadata of the store. `data_fingerprint`: fingerprint of the data set.

    The result depends only on the job, the teacher and the data, not on the machine, so that the
    metadata of two captures can be compared.
    """
    data, method = job.data, job.method
    files = plan.files_of(*method.part)
    facts = {
        "teacher": teacher.name,
        "tokenizer": _find_tokenizer_name(job),
        "data": data.path,
        "teacher_fingerprint": teacher.fingerprint,
        "teacher_version": teacher.version,
        "tokenizer_fingerprint": teacher.tokenizer_fingerprint,
        "vocab_size": teacher.vocab_size,
        "top_k": job.teacher.top_k,
        "temperature": method.temperature,
        "logprob_format": job.teacher.logprob_format,
        "compress": str(method.compress).lower(),
        "tail_samples": method.tail_samples,
        "seed": job.seed,
        "form": data.form,
        "columns": ",".join(_list_columns(data)),
        "template": json.dumps(data.template),
        "max_tokens": method.max_tokens,
        "data_fingerprint": data_fingerprint,
        "sequences_fingerprint": _digest_sequences(plan),
        "too_long": plan.too_long,
        "empty": plan.empty,
        PART: method.shard,
        SEQUENCES: sum(len(plan.file(number)) for number in files),
        # Without images and context, the facts are the same as in versions without these features.
        **({"image_column": data.image_column} if data.image_column else {}),
        **({} if job.teacher.context is None else {"context": json.dumps(job.teacher.context)}),
    }
    return {name: str(value) for name, value in facts.items()}


def _find_tokenizer_name(job: CaptureJob) -> str:
    student = job.student.model if job.student else None
    return job.data.tokenizer or student or job.teacher.model or ""


def _list_columns(data: CaptureData) -> tuple[str, ...]:
    match data.form:
        case "completion":
            more_columns = [] if data.input_column is None else [data.input_column]
            return data.prompt_column, data.answer_column, *more_columns
        case "messages":
            more_columns = [] if data.completion_column is None else [data.completion_column]
            return data.messages_column, *more_columns
        case "text":
            return (data.text_column,)


def _digest_sequences(plan: CapturePlan) -> str:
    """Return the xxh3-128 hex digest of the arrays of the plan that define its sequences.

    The arrays are the token ids, their offsets, the starts, the images and the prompts.
    """
    hasher = xxhash.xxh3_128()
    image_arrays = (plan.images, plan.image_ends) if len(plan.images) else ()
    prompt_arrays = (plan.prompts, plan.prompt_ends) if len(plan.prompts) else ()
    for array in (plan.token_ids, plan.offsets, plan.starts, *image_arrays, *prompt_arrays):
        hasher.update(array.data.cast("B"))
    return hasher.hexdigest()
