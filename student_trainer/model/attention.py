"""Chooses the student's implementation of attention, and the layout of its batches.

The layout is the placement of sequences in the lines of a batch.
"""

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
    """Set and log the attention and the layout of a student and of its copy.

    - copy: the same student with other weights, or `student` itself.
    - settings: the job's table `student`.

    With `settings.attention` = "auto", the student gets variable-length flash attention if it runs
    on a GPU, computes in bfloat16, the package flash-attn is installed, and the model supports it.
    Otherwise the student keeps the default of transformers: sdpa, or eager for a model without
    sdpa.

    With flash attention, all sequences of a batch are in one line. With the other implementations,
    lines have a dense mask. If the model cannot separate the sequences of a line, batches are
    padded: each line has one sequence.

    Call this function when the student is on the training device, because the probe of the layout
    runs `student`. Raises InvalidInput (`student.attention`) if "flash", "sdpa" or "eager" is not
    available.
    """
    requested_attention = _choose_implementation(student, settings.attention)
    if requested_attention is not None:
        try:
            for module in {id(module): module for module in (student, copy)}.values():
                module.model.set_attn_implementation(requested_attention)
        except (ImportError, OSError, ValueError) as error:
            if settings.attention != "auto":
                raise _build_error(
                    settings.attention, str(error).strip().splitlines()[0]
                ) from error
            log.info("no flash attention: %s", error)
    current_attention = student.model.config._attn_implementation
    if settings.attention != "auto" and current_attention != requested_attention:
        raise _build_error(
            settings.attention, f"the model has {current_attention!r}, which cannot be changed"
        )
    flash = current_attention.startswith(_FLASH)
    student.eval()
    separate = separates_packed_sequences(student, lines=1 if flash else 2)
    student.layout = copy.layout = ("one_line" if flash else "lines") if separate else "padded"
    log.info(
        "attention %s, %s",
        current_attention,
        "several sequences in a line" if separate else "padded: it cannot separate sequences",
    )


def _choose_implementation(student: Student, attention: str) -> str | None:
    """Return the attention to set, by its name in transformers; None: do not set one."""
    on_gpu = student.model.device.type == "cuda"
    installed = _installed_flash()
    match attention:
        case "auto":
            # For these models transformers would download another kernel from the hub.
            supported_kernels = getattr(student.model, "_compatible_flash_implementations", None)
            usable = (
                on_gpu
                and student.bf16
                and (supported_kernels is None or installed in supported_kernels)
            )
            return installed if usable else None
        case "flash" if not on_gpu:
            raise _build_error(attention, "flash attention needs an NVIDIA GPU")
        case "flash" if not student.bf16:
            raise _build_error(
                attention, "flash attention needs a student that computes in bfloat16"
            )
        case "flash":
            # transformers downloads a kernel from the hub if only the package kernels is there.
            implementation = installed or ("flash_attention_2" if is_kernels_available() else None)
            if implementation is None:
                raise _build_error(attention, "the package flash-attn is not installed")
            return implementation
    return attention


def _installed_flash() -> str | None:
    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


def _build_error(attention: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"the student cannot use the attention {attention!r}: {why}",
        field="student.attention",
        hint="remove the key, or install flash-attn on a machine with a GPU",
    )
