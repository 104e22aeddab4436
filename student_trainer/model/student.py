"""The student: a transformers causal language model whose forward pass includes the loss."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from protos.errors import InvalidInput
from student_trainer.data.batch import Batch
from student_trainer.data.packing import Layout
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
from student_trainer.model.packed_lines import known_packing
from student_trainer.model.probes import body_of, called_linear_modules, find_logit_map

log = logging.getLogger(__name__)


class Student(nn.Module):
    """The module that DDP and FSDP wrap.

    Its forward pass runs the model, the model's head and the loss. The head runs inside `forward`,
    because FSDP gathers the full weights of the head only there.

    - layout: the placement of sequences in the lines of a batch; `choose_attention` sets it.
    - compiled: whether the layers are compiled; `compile_layers` sets it.
    - bf16: whether the student computes in bfloat16.
    - linear: the linear modules that every forward pass calls.
    - vocab_size: the number of token ids that have a logit in the softmax.
    - placeholder: the token id that stands for a part of an image; None: no batch has images.
    - equal_lengths: whether prompts are sampled together only if their lengths are equal; the
      self-test (`run/self_test.py`) sets it.
    """

    def __init__(
        self,
        model: Any,
        *,
        bf16: bool = False,
        vocab_size: int | None = None,
        placeholder: int | None = None,
    ) -> None:
        """Wrap a transformers causal language model, and probe the model on a few tokens.

        - bf16: compute in bfloat16. Trainable weights stay float32, because bfloat16 would lose
          small updates.
        - vocab_size: ignore the logits of ids from `vocab_size` on, which are only padding for the
          teacher; None: use all logits.
        - placeholder: see the class.
        """
        super().__init__()
        self.model = model
        self.bf16 = bf16
        self.placeholder = placeholder
        self.vocab_size = vocab_size or int(model.config.get_text_config().vocab_size)
        # Each cast weight is used once: the cache of autocast would only hold a copy of the model.
        with self.precision(cache=False), called_linear_modules(model) as linear:
            self._logit_map = find_logit_map(model, self.vocab_size)
        self.linear = frozenset(linear)
        self.layout: Layout = "padded"
        self.compiled = False
        self.equal_lengths = False
        if self._logit_map is None:
            log.info(
                "the head is not one linear layer with a scale or a cap: computing full logits,"
                " which takes more memory"
            )

    def forward(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        temperature: float,
        needs_all_rows: bool = False,
    ) -> FusedLoss:
        """Return the sum of `loss_fn` over the rows of the batch.

        - loss_fn: returns the loss of each row in a chunk of rows; see `fused_linear_loss`.
        - temperature: divides the logits.
        - needs_all_rows: pass all rows to `loss_fn` in one call instead; see `fused_linear_rows`.

        In training, call `Replicated` or `Sharded` (`parallel/sharding.py`) instead of this method.
        Their call is collective.
        """
        if self._logit_map is None:
            return self._loss_from_logits(batch, loss_fn, temperature)
        with self.precision():
            hidden, weight, bias = self._compute_head_inputs(batch)
            inputs = (hidden, weight, batch.head_ids, batch.token_ids)
            options: dict[str, Any] = {
                "sample_ids": batch.sample_ids,
                "bias": bias,
                "temperature": temperature,
                "logit_map": self._logit_map,
            }
            if not needs_all_rows:
                return fused_linear_loss(*inputs, loss_fn, **options)
            rows, entropy = fused_linear_rows(*inputs, **options)
        return _sum_losses(rows, entropy, loss_fn)

    @torch.no_grad()
    def rows(
        self,
        batch: Batch,
        temperature: float,
        top_k: int | None = None,
        *,
        every_id: bool = False,
    ) -> tuple[Tensor, Rows]:
        """Return the head ids [N, K] int64 of the N rows of a batch, and the rows, without a
        gradient.

        - top_k: use the `top_k` most likely ids of each row; None: use the head ids of the batch.
        - every_id: also include the logits of ids from `vocab_size` on in the softmax.

        The rows have `sample_logprobs` if the batch has sample ids.
        """
        ids = batch.head_ids
        if self._logit_map is None:
            logits = self._compute_logits(batch, None if every_id else self.vocab_size)
            ids = ids if top_k is None else logits.topk(top_k, 1).indices
            return ids, rows_from_logits(
                logits,
                ids,
                batch.token_ids,
                sample_ids=batch.sample_ids,
                temperature=temperature,
            )
        logit_map = replace(self._logit_map, vocab_size=None) if every_id else self._logit_map
        with self.precision():
            hidden, weight, bias = self._compute_head_inputs(batch)
            if top_k is not None:
                ids = fused_linear_top_ids(hidden, weight, top_k, bias=bias, logit_map=logit_map)
            rows, _ = fused_linear_rows(
                hidden,
                weight,
                ids,
                batch.token_ids,
                sample_ids=batch.sample_ids,
                bias=bias,
                temperature=temperature,
                logit_map=logit_map,
            )
        return ids, rows

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        """Return the hidden states [N, H] from which the head computes the N rows, without a
        gradient.
        """
        with self.precision():
            return self._compute_head_inputs(batch)[0]

    @torch.no_grad()
    def line_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the last hidden states [B, T, H] of lines [B, T], without a gradient."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        with self.precision():
            hidden: Tensor = body_of(self.model)(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _compute_head_inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the inputs of the linear head: states [N, H], weight [V, H], and bias [V] or None.

        V is the number of all ids, including the ids from `vocab_size` on.
        """
        head = self.model.get_output_embeddings()
        body = body_of(self.model) if self.placeholder is None else self.model.base_model
        with known_packing(batch.position_ids is not None):
            states = body(**batch.inputs, use_cache=False).last_hidden_state
        if self.placeholder is not None and batch.images is None:
            states = states + _zero_with_gradients(body)
        return batch.select(states), head.weight, getattr(head, "bias", None)

    def _compute_logits(self, batch: Batch, vocab_size: int | None) -> Tensor:
        """Return the logits [N, V] of the first `vocab_size` ids; None: of all ids."""
        with self.precision(), known_packing(batch.position_ids is not None):
            logits = self.model(**batch.inputs, use_cache=False).logits
        return batch.select(logits[..., :vocab_size])

    def precision(self, *, cache: bool = True) -> torch.autocast:
        """Return the context in which the model computes: with `bf16`, autocast to bfloat16.

        `cache`: keep the bfloat16 copies of the weights until the context ends, so that each weight
        is cast only once.
        """
        device = self.model.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.bf16, cache_enabled=cache)

    def _loss_from_logits(
        self, batch: Batch, loss_fn: LossFunction, temperature: float
    ) -> FusedLoss:
        logits = self._compute_logits(batch, self.vocab_size)
        rows = rows_from_logits(
            logits,
            batch.head_ids,
            batch.token_ids,
            sample_ids=batch.sample_ids,
            temperature=temperature,
        )
        return _sum_losses(rows, entropy_from_logits(logits, temperature=temperature), loss_fn)


def _sum_losses(rows: Rows, entropy: Tensor, loss_fn: LossFunction) -> FusedLoss:
    losses = loss_fn(rows, slice(0, len(rows)))
    return FusedLoss(losses.sum(), rows.detach(), {"loss": losses.detach(), "entropy": entropy})


def hollow_copy(student: Student) -> Student:
    """Return a copy of the student without weights.

    The copy has the buffers of the student. Its parameters have no elements.
    """
    return copy.deepcopy(
        student,
        {
            id(parameter): nn.Parameter(parameter.data.new_empty(0), parameter.requires_grad)
            for parameter in student.parameters()
        },
    )


def _zero_with_gradients(body: nn.Module) -> Tensor | float:
    """Return 0 as a sum that depends on every trainable weight.

    Each weight then gets a gradient of 0. DDP waits for the gradients of all weights, but a batch
    without images does not use the weights of the vision part.
    """
    weights = [weight.flatten()[0] for weight in body.parameters() if weight.requires_grad]
    return torch.stack(weights).sum() * 0 if weights and torch.is_grad_enabled() else 0.0


def compile_layers(student: Student) -> None:
    """Compile every layer of the student, in place. The compiler runs in the first update.

    All layers share the compiled code. Sequence lengths are dynamic, so new lengths cause no new
    compilation. The recomputation of activations is part of the compiled code. The loss is not
    compiled, and FSDP2 gathers the weights of a layer outside of the compiled code. Sampling and
    scoring use no compiled code: their passes are in `gathered()`, and compilation does not speed
    up passes of single tokens.

    Call this function after the student is distributed and its attention is chosen.

    Raises InvalidInput (`student.compile`) if transformers does not define the layers of the model,
    or if this machine cannot compile.
    """
    layers = [
        module for module in student.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise _build_error(
            "transformers does not define which modules are its layers", "remove the key"
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
