"""Choose the attention of the student, and how sequences share the lines of a batch."""

from __future__ import annotations

import logging

from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_kernels_available,
)

from clients.config.tables.common import StudentConfig
from protos.errors import InvalidInput
from student_trainer.model.probes import separates_packed_sequences
from student_trainer.model.student import Student

log = logging.getLogger(__name__)

_FLASH = "flash_attention"  # the start of transformers' names


def choose_attention(student: Student, copy: Student, settings: StudentConfig) -> None:
    """Set the attention and the layout of a student and of `copy`, and log both.

    `copy`: the same student with other weights, or `student` itself. Call it on the device of the
    training: the probe of the layout runs `student`.

    `settings.attention` = "auto" is variable-length flash attention on a GPU, if the student
    computes in bfloat16, the package flash-attn is installed, and the model supports it; otherwise
    the default of transformers (sdpa, or eager for models without it). With flash attention all
    sequences of a batch are one line; with the others, lines have a dense mask. A model that cannot
    separate the sequences of a line gets padded batches.

    Raises InvalidInput (`student.attention`) if "flash", "sdpa" or "eager" cannot be had.
    """
    wanted = _wanted(student, settings.attention)
    if wanted is not None:
        try:
            for one in {id(one): one for one in (student, copy)}.values():
                one.model.set_attn_implementation(wanted)
        except (ImportError, OSError, ValueError) as error:
            if settings.attention != "auto":
                raise _refused(settings.attention, str(error).strip().splitlines()[0]) from error
            log.info("no flash attention: %s", error)
    used = student.model.config._attn_implementation
    if settings.attention != "auto" and used != wanted:
        raise _refused(settings.attention, f"the model has {used!r} and cannot change it")
    flash = used.startswith(_FLASH)
    student.eval()
    separate = separates_packed_sequences(student, lines=1 if flash else 2)
    student.layout = copy.layout = ("one_line" if flash else "lines") if separate else "padded"
    log.info(
        "attention %s, %s",
        used,
        "several sequences in a line" if separate else "padded: it cannot separate sequences",
    )


def _wanted(student: Student, attention: str) -> str | None:
    """Return transformers' name of the attention to set; None: leave the model as it is."""
    on_gpu = student.model.device.type == "cuda"
    installed = _installed_flash()
    match attention:
        case "auto":
            # For these models transformers would download another kernel from the hub.
            only = getattr(student.model, "_compatible_flash_implementations", None)
            usable = on_gpu and student.bf16 and (only is None or installed in only)
            return installed if usable else None
        case "flash" if not on_gpu:
            raise _refused(attention, "it needs an NVIDIA GPU")
        case "flash" if not student.bf16:
            raise _refused(attention, "it needs a student that computes in bfloat16")
        case "flash":
            # transformers downloads a kernel from the hub if only the package kernels is there.
            found = installed or ("flash_attention_2" if is_kernels_available() else None)
            if found is None:
                raise _refused(attention, "the package flash-attn is not installed")
            return found
    return attention


def _installed_flash() -> str | None:
    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


def _refused(attention: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"the student cannot have the attention {attention!r}: {why}",
        field="student.attention",
        hint="leave it out, or install flash-attn on a machine with a GPU",
    )
