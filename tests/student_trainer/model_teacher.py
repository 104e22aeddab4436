"""A teacher in this process, with rows by their definition, from a plain log_softmax."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protos.rows.codec import RowBlock
from student_trainer.data.sequence import Rollout


class ModelTeacher:
    """Scores rollouts at their head ids, or at its own `top_k` ids if `top_k` > 0."""

    any_time = True

    def __init__(self, model: Any, *, temperature: float = 1.0, top_k: int = 0) -> None:
        self._model = model
        self._temperature = temperature
        self._top_k = top_k

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        logprobs = completion_logprobs(self._model, rollout, self._temperature)
        head = logprobs.topk(self._top_k).indices if self._top_k else rollout.head_ids.long()
        outside_probabilities = logprobs.exp().scatter(1, head, 0.0)
        future: Future[RowBlock] = Future()
        future.set_result(
            RowBlock(
                head_ids=head.numpy().astype(np.int32),
                head_logprobs=logprobs.gather(1, head).float().numpy(),
                tail_logmass=outside_probabilities.sum(1).log().float().numpy(),
                token_logprobs=logprobs.gather(1, rollout.completion[:, None])[:, 0]
                .float()
                .numpy(),
                draw_logprobs=(
                    None
                    if rollout.draws is None
                    else logprobs.gather(1, rollout.draws.ids.long()).float().numpy()
                ),
            )
        )
        return future

    def finish(self) -> None:
        """Do nothing, as `score` returns finished futures."""


@torch.no_grad()
def completion_logprobs(model: Any, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Return log-probs of the answer [tokens, V] in float64, from a pass over this rollout."""
    logits = model(input_ids=rollout.token_ids[None], use_cache=False).logits[0]
    scaled = logits[rollout.start - 1 : -1].double() / temperature
    return scaled.log_softmax(1)
