"""The student: a transformers causal LM, and the one place where hidden states meet the loss."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from clients.config.on_policy import StudentConfig
from clients.data.model_files import refuse_code
from protos.errors import InvalidInput
from student_trainer.data.batch import Batch
from student_trainer.losses import (
    FusedLoss,
    LossFunction,
    Rows,
    entropy_from_logits,
    fused_linear_loss,
    fused_linear_rows,
    fused_linear_top_ids,
    rows_from_logits,
)
from student_trainer.model.lora import add_adapters, load_adapters

log = logging.getLogger(__name__)


def load_config(student: StudentConfig) -> Any:
    """The model's config; raises InvalidInput where there is no usable model."""
    return _explained(student, AutoConfig.from_pretrained)


def load_tokenizer(student: StudentConfig) -> Any:
    return _explained(student, AutoTokenizer.from_pretrained)


def load_model(student: StudentConfig, directory: Path | None = None) -> Any:
    """The model with its weights: from `directory` (a checkpoint's) if given, else from the job.

    A checkpoint of adapters has nothing else: the frozen weights are the job's.
    """
    source = student
    if directory is not None and student.lora is None:
        source = student.model_copy(update={"model": str(directory)})
    # Frozen weights are never updated: there is nothing to lose in what is computed in anyway.
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
        # Its newer name; the older one warns where both exist.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def _without_dropout(config: Any) -> Any:
    """With dropout the student that learns would not be the one that sampled, nor repeatable."""
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
    """The tokens by id, "" for an unused one."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [token or "" for token in tokens]


class Student(nn.Module):
    """What DDP and FSDP wrap: the head runs inside `forward`, where its weights are at hand."""

    def __init__(self, model: Any, *, bf16: bool = False, pack: bool = False) -> None:
        """`bf16`: compute in it (weights that learn stay float32, or updates would be lost);
        `pack`: read several sequences in one line, if the model can (`packs` says so).
        """
        super().__init__()
        self.model = model
        self._bf16 = bf16
        with self._precision():
            self._linear_head = has_linear_head(model)
            self.packs = pack and keeps_apart(model)
        if not self._linear_head:
            log.info("the head is not one linear layer: its logits are made in full")
        if pack and not self.packs:
            log.info("this model does not keep sequences in one line apart: they are padded")

    def forward(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        temperature: float,
        of_all_rows: bool = False,
    ) -> FusedLoss:
        """loss_fn summed over the batch's rows, some at a time; see fused_linear_loss.

        `of_all_rows`: it must see all of them at once; see fused_linear_rows.
        """
        if not self._linear_head:
            return self._plain(batch, loss_fn, temperature)
        with self._precision():
            hidden, weight, bias = self._to_head(batch)
            inputs = (hidden, weight, batch.head_ids, batch.token_ids)
            options: dict[str, Any] = {"sample_ids": batch.sample_ids, "bias": bias}
            if not of_all_rows:
                return fused_linear_loss(*inputs, loss_fn, **options, temperature=temperature)
            rows, entropy = fused_linear_rows(*inputs, **options, temperature=temperature)
        return _summed(rows, entropy, loss_fn)

    @torch.no_grad()
    def rows(
        self, batch: Batch, temperature: float, top_k: int | None = None
    ) -> tuple[Tensor, Rows]:
        """(head ids [N, K], rows of N) at the ids of the batch, or at the `top_k` likeliest."""
        ids = batch.head_ids
        if not self._linear_head:
            logits = self._logits(batch)
            ids = ids if top_k is None else logits.topk(top_k, 1).indices
            return ids, rows_from_logits(logits, ids, batch.token_ids, temperature=temperature)
        with self._precision():
            hidden, weight, bias = self._to_head(batch)
            if top_k is not None:
                ids = fused_linear_top_ids(hidden, weight, top_k, bias=bias)
            rows, _ = fused_linear_rows(
                hidden, weight, ids, batch.token_ids, bias=bias, temperature=temperature
            )
        return ids, rows

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        """[N, H], of which the head makes the rows of the batch."""
        with self._precision():
            return self._to_head(batch)[0]

    def _to_head(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states [N, H], weight [V, H] and bias [V], of which a linear head makes logits."""
        head = self.model.get_output_embeddings()
        states = self.model.get_decoder()(**batch.inputs, use_cache=False).last_hidden_state
        return batch.select(states), head.weight, getattr(head, "bias", None)

    def _logits(self, batch: Batch) -> Tensor:
        with self._precision():
            return batch.select(self.model(**batch.inputs, use_cache=False).logits)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._bf16)

    def _plain(self, batch: Batch, loss_fn: LossFunction, temperature: float) -> FusedLoss:
        logits = self._logits(batch)
        rows = rows_from_logits(
            logits,
            batch.head_ids,
            batch.token_ids,
            sample_ids=batch.sample_ids,
            temperature=temperature,
        )
        return _summed(rows, entropy_from_logits(logits, temperature=temperature), loss_fn)


def _summed(rows: Rows, entropy: Tensor, loss_fn: LossFunction) -> FusedLoss:
    losses = loss_fn(rows, slice(0, len(rows)))
    return FusedLoss(losses.sum(), rows.detach(), {"loss": losses.detach(), "entropy": entropy})


@torch.no_grad()
def has_linear_head(model: Any) -> bool:
    """Whether the logits are exactly a linear layer of the last hidden states: no cap, no scale.

    The layer's output is replaced by large numbers: they must come out as they are. A comparison
    of logits would miss a cap that only bites when they grow.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    seen: list[Tensor] = []
    # Numbers that bfloat16 has too.
    probe = torch.linspace(-200, 200, head.out_features, device=model.device).bfloat16().float()

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        return probe.to(output.dtype).expand_as(output)

    ids = torch.arange(4, device=model.device)[None] % head.out_features
    handle = head.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    except AttributeError:
        return False
    finally:
        handle.remove()
    return torch.equal(logits.float(), probe.expand_as(logits)) and torch.equal(seen[0], states)


@torch.no_grad()
def keeps_apart(model: Any) -> bool:
    """Whether sequences that share a line, told apart by positions that begin again, are read as if
    each was alone.

    Other tokens in the one must not change a bit of what comes out for the other.
    """
    length, width = 6, model.get_input_embeddings().num_embeddings
    ids = torch.arange(2 * length, device=model.device) % width
    positions = torch.arange(length, device=model.device).repeat(2)

    def states(tokens: Tensor) -> Tensor:
        # Two lines, as some kernels know one way for one of them and another for more.
        inputs = {
            "input_ids": tokens.repeat(2, 1),
            "position_ids": positions[: len(tokens)].repeat(2, 1),
        }
        found: Tensor = body(**inputs, use_cache=False).last_hidden_state[1]
        return found.float()

    try:
        body = model.get_decoder()
        together = states(ids)
        changed = states(torch.cat([(ids[:length] + 1) % width, ids[length:]]))
        alone = states(ids[length:])
    except (AttributeError, TypeError, ValueError):
        return False
    second = together[length:]
    near = (second - alone).norm() <= 2e-2 * alone.norm()  # bfloat16 is no closer
    return torch.equal(second, changed[length:]) and bool(near)
