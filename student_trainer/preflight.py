"""Everything that can be known to be wrong before a weight is loaded. Imports no torch: an answer
comes in seconds.
"""

from __future__ import annotations

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from clients.config import DataConfig, JobConfig, StudentConfig
from clients.records import FILE_SUFFIXES
from clients.score_query import tokenizer_fingerprint
from clients.token_ids import first_difference
from protos.errors import InvalidInput, WrongState
from protos.transport import MAX_MESSAGE_BYTES
from student_trainer.connections import Connection

_HUB_SECONDS = 3.0

log = logging.getLogger(__name__)


def check_hub(config: JobConfig) -> None:
    """Where the hub is needed but cannot be reached, leave its libraries to their caches.

    They would try again for most of a minute, once for each file, before they say the same. Call
    it before they are imported.
    """
    path = config.data.path
    local_data = path.endswith(FILE_SUFFIXES) or Path(path).exists()
    if local_data and Path(config.student.model).is_dir():
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_HUB_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()  # it is there, whatever it thinks of the request
    except OSError as error:
        log.warning("%s cannot be reached, only its cache is used: %s", endpoint, error)
        os.environ["HF_HUB_OFFLINE"] = "1"


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


def check_processes(config: JobConfig) -> None:
    """Refuse more processes than there is work for: one without any would stop the others."""
    answers = config.train.prompts_per_step * config.method.rollouts_per_prompt
    for field, work in (("train.prompts_per_step", answers), ("eval.prompts", config.eval.prompts)):
        if work < config.train.processes:
            raise InvalidInput(
                f"{work} answers cannot be shared by {config.train.processes} processes",
                field=field,
                hint="raise it, or lower train.processes",
            )


def check_data(data: DataConfig) -> None:
    """Refuse a data file that is not there."""
    for field, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if path is not None and path.endswith(FILE_SUFFIXES) and not Path(path).is_file():
            raise InvalidInput(f"no such file: {path}", field=field, hint="check the path")


def check_teacher(teacher: Connection, config: JobConfig) -> None:
    """Refuse what this teacher cannot do: k and lengths."""
    info = teacher.info
    if config.teacher.top_k > info.max_top_k:
        raise InvalidInput(
            f"{config.teacher.top_k} is more than the {teacher.label} gives ({info.max_top_k})",
            field="teacher.top_k",
            hint=f"lower it to {info.max_top_k}, or start the teacher with a larger --max-top-k",
        )
    check_length(config, teacher.label, info.max_length)
    # A student's own head ids travel with the query, four bytes each.
    size = 4 * config.method.max_new_tokens * config.teacher.top_k
    if config.method.divergence == "reverse_kl" and size > MAX_MESSAGE_BYTES * 3 // 4:
        raise InvalidInput(
            f"{config.method.max_new_tokens} tokens with {config.teacher.top_k} head ids each are "
            "more than one query holds",
            field="teacher.top_k",
            hint=f"lower it to {MAX_MESSAGE_BYTES * 3 // 16 // config.method.max_new_tokens}",
        )


def check_length(config: JobConfig, model: str, most: int | None) -> None:
    """Refuse prompts and answers that together are longer than `model` can read."""
    longest = config.method.max_prompt_tokens + config.method.max_new_tokens
    if most is not None and longest > most:
        raise InvalidInput(
            f"a prompt and its answer may have {longest} tokens, the {model} takes {most}",
            field="method.max_new_tokens",
            hint="lower it or method.max_prompt_tokens",
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
    if width != info.vocab_size:
        raise WrongState(
            f"the student has logits for {width} ids, the {teacher.label} for {info.vocab_size};"
            f" the tokenizers agree, so one is padded from id {min(width, info.vocab_size)} on",
            field="student.model",
            hint="pad or trim the student's embeddings to the teacher's size",
        )
