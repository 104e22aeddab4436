"""Compiles the decoder layers of the student with torch.compile, one layer at a time.

All layers share the compiled code. Only layers are compiled: the loss is unchanged, and FSDP2
gathers the weights of a layer outside of the compiled code.
"""

from __future__ import annotations

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from protos.errors import InvalidInput
from student_trainer.model.student import Student


def compile_layers(student: Student) -> None:
    """Compile every layer of the student in place. Compilation runs in the first update.

    Call this after the student is distributed and its attention is selected. Sequence lengths are
    dynamic, so new lengths cause no recompilation. Recomputed activations are part of the compiled
    code. Sampling and scoring are not compiled: their passes are in `gathered()`, and compilation
    does not speed up single tokens.

    Raises InvalidInput (`student.compile`) if the model has no transformers layers, or if this
    machine cannot compile.
    """
    layers = [
        module for module in student.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise _build_error(
            "the model has no layers that transformers marks as such", "leave it out"
        )
    try:
        torch.compile(torch.neg)(torch.ones(2, device=student.model.device))
    except Exception as error:  # any part of the compiler or of the machine's tools may fail
        reason = str(error).strip().splitlines()[0]
        raise _build_error(
            reason, "install a C++ compiler such as g++, or remove the key"
        ) from error
    # Batches of one line, batches without padding and layers that recompute each compile a variant.
    # The default limit of 8 variants is too few for a model with two kinds of layers.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    student.compiled = True


def _build_error(reason: str, hint: str) -> InvalidInput:
    message = f"the student cannot be compiled: {reason}"
    return InvalidInput(message, field="student.compile", hint=hint)
