"""The student: a transformers causal LM, and the one place where hidden states meet the loss."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from clients.config import StudentConfig
from protos.errors import InvalidInput
from student_trainer.batches import Batch
from student_trainer.losses import FusedLoss, LossFunction, fused_linear_loss, rows_from_logits

log = logging.getLogger(__name__)


def load_config(student: StudentConfig) -> Any:
    """The model's config; raises InvalidInput where there is no usable model."""
    return _explained(student, AutoConfig.from_pretrained)


def load_tokenizer(student: StudentConfig) -> Any:
    return _explained(student, AutoTokenizer.from_pretrained)


def load_model(student: StudentConfig, directory: Path | None = None) -> Any:
    """The model with its weights: from `directory` (a checkpoint's) if given, else from the job."""
    source = student if directory is None else student.model_copy(update={"model": str(directory)})
    model = _explained(
        source,
        AutoModelForCausalLM.from_pretrained,
        dtype=getattr(torch, student.dtype),
        use_safetensors=True,
    )
    if student.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _explained(student: StudentConfig, load: Any, **options: Any) -> Any:
    path = Path(student.model)
    if path.is_dir():
        _refuse_code(path)
    revision = student.revision if not path.is_dir() else None
    try:
        return load(student.model, revision=revision, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        what = "directory" if path.is_dir() else "directory or reachable hub id"
        raise InvalidInput(
            f"no usable model at {student.model!r}",
            field="student.model",
            hint=f"give a Hugging Face {what} with config, tokenizer and safetensors",
        ) from error


def _refuse_code(path: Path) -> None:
    config = path / "config.json"
    if config.is_file() and "auto_map" in json.loads(config.read_text()):
        raise InvalidInput(
            f"{config} asks to run code of its own (auto_map)",
            field="student.model",
            hint="only architectures of transformers itself are loaded",
        )


def vocabulary(tokenizer: Any) -> list[str]:
    """The tokens by id, "" for an unused one."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [token or "" for token in tokens]


class Student(nn.Module):
    """What DDP and FSDP wrap: the head runs inside `forward`, where its weights are at hand."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._linear_head = has_linear_head(model)
        if not self._linear_head:
            log.info("the head is not one linear layer: its logits are made in full")

    def forward(self, batch: Batch, loss_fn: LossFunction, temperature: float) -> FusedLoss:
        """loss_fn summed over the batch's rows; see fused_linear_loss."""
        if not self._linear_head:
            return self._plain(batch, loss_fn, temperature)
        body = self.model.get_decoder()
        states = body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return fused_linear_loss(
            batch.select(states),
            head.weight,
            batch.head_ids,
            batch.token_ids,
            loss_fn,
            bias=getattr(head, "bias", None),
            temperature=temperature,
        )

    def _plain(self, batch: Batch, loss_fn: LossFunction, temperature: float) -> FusedLoss:
        logits = batch.select(self.model(input_ids=batch.input_ids, use_cache=False).logits)
        rows = rows_from_logits(logits, batch.head_ids, batch.token_ids, temperature=temperature)
        losses = loss_fn(rows, slice(0, len(rows)))
        return FusedLoss(losses.sum(), rows.detach(), losses.detach())


@torch.no_grad()
def has_linear_head(model: Any) -> bool:
    """Whether the logits are exactly hidden @ weight.T (+ bias): no soft-cap, no scale."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        return False
    size = min(model.config.get_text_config().vocab_size, 1000)
    ids = torch.arange(1, 9, device=model.device)[None] % size
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    linear = nn.functional.linear(states, head.weight, getattr(head, "bias", None))
    tolerance = 1e-4 if logits.dtype == torch.float32 else 2e-2
    return linear.shape == logits.shape and bool(
        torch.allclose(linear, logits, rtol=tolerance, atol=tolerance)
    )
