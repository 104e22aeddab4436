"""Load the student's configuration, tokenizer and weights from a directory or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from clients.config.common import StudentConfig
from clients.data.model_files import refuse_code
from protos.errors import InvalidInput
from student_trainer.model.lora import add_adapters, load_adapters


def load_config(student: StudentConfig) -> Any:
    """Return the configuration of the student's model.

    Raises InvalidInput (`student.model`) if there is no usable model, or if it needs code of its
    own.
    """
    return _explained(student, AutoConfig.from_pretrained)


def load_tokenizer(student: StudentConfig) -> Any:
    """Return the tokenizer of the student's model. Raises InvalidInput as `load_config` does."""
    return _explained(student, AutoTokenizer.from_pretrained)


def count_weights(student: StudentConfig) -> int:
    """Return the number of weights of the student, without adapters; loads none of them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(student))
    return int(model.num_parameters())


def load_model(student: StudentConfig, directory: Path | None = None) -> Any:
    """Return the model with the weights of a checkpoint, if one is given, or those of the job.

    `directory`: the checkpoint's. If the student has adapters, the checkpoint has only those, and
    the frozen weights come from the job. Weights are float32, except that the frozen weights of a
    student with adapters have `student.dtype`. Dropout is off.

    Raises InvalidInput if there is no usable model, or if the adapters of the checkpoint do not fit
    `student.lora`.
    """
    source = student
    if directory is not None and student.lora is None:
        source = student.model_copy(update={"model": str(directory)})
    # Frozen weights are never updated, so they can be stored in the dtype of the computation.
    frozen = torch.bfloat16 if student.dtype == "bfloat16" else torch.float32
    model = _explained(
        source,
        AutoModelForCausalLM.from_pretrained,
        config=_without_dropout(load_config(source)),
        dtype=frozen if student.lora is not None else torch.float32,
        use_safetensors=True,
    )
    if student.lora is not None:
        add_adapters(model, student)
        if directory is not None:
            load_adapters(directory, model)
    if student.gradient_checkpointing:
        # The newer name of the method; the older one warns if both exist.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def _without_dropout(config: Any) -> Any:
    """Set all dropout rates to 0: with dropout, the trained model differs from the sampling one.

    Dropout would also make a run irreproducible.
    """
    for name, value in config.to_dict().items():
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _explained(student: StudentConfig, load: Any, **options: Any) -> Any:
    path = Path(student.model)
    if path.is_dir():
        refuse_code(path, "student.model")
    revision = student.revision if not path.is_dir() else None
    try:
        return load(student.model, revision=revision, trust_remote_code=False, **options)
    except (OSError, ValueError, SafetensorError) as error:
        what = "directory" if path.is_dir() else "directory or reachable hub id"
        raise InvalidInput(
            f"no usable model at {student.model!r}: {str(error).strip().splitlines()[0]}",
            field="student.model",
            hint=f"give a Hugging Face {what} with config, tokenizer and safetensors",
        ) from error


def vocabulary(tokenizer: Any) -> list[str]:
    """Return the tokens of the tokenizer by id; "" for an id without a token."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [token or "" for token in tokens]
