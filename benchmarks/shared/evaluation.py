"""Hidden states and logits of sampled answers, and the exact KL of a student held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.losses import exact_kl
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler

HELD_OUT_SEED = 10_000
BATCH = 16


def make_sampler(
    student: Any, tokenizer: Any, max_tokens: int, *, top_k: int = 1, draws: int = 0
) -> HuggingFaceRollouts:
    """Return a sampler of answers of at most `max_tokens` tokens at temperature 1.

    top_k, draws: head ids and tail draws of each row of an answer.
    """
    return HuggingFaceRollouts(
        Sampler(student.eval(), tokenizer, top_k=top_k, temperature=1.0, draws=draws),
        max_new_tokens=max_tokens,
        batch_tokens=1 << 20,
    )


def hidden_states(model: Any, answers: Sequence[Rollout]) -> Tensor:
    """Return the states [N, H] from which the sampled tokens of all answers are predicted."""
    # Padding at the end does not change the outputs of a causal model before it.
    ids = pad_sequence([answer.token_ids for answer in answers], batch_first=True)
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    spans = [(answer.start - 1, len(answer.token_ids) - 1) for answer in answers]
    return torch.cat([states[row, first:last] for row, (first, last) in enumerate(spans)])


def compute_logits(model: Any, states: Tensor) -> Tensor:
    """Return the logits [N, V] in float32."""
    return cast(Tensor, model.get_output_embeddings()(states))


@torch.no_grad()
def measure_kl(
    student: Any, teacher: Any, tokenizer: Any, held_out: Sequence[Prompt], max_tokens: int
) -> float:
    """Return the exact KL(student||teacher) per token on the student's answers, in nats.

    The random numbers of the answers are the same for every student.
    """
    sampler = make_sampler(student, tokenizer, max_tokens)
    total = count = 0.0
    for first in range(0, len(held_out), BATCH):
        batch = held_out[first : first + BATCH]
        (answers,) = sampler.generate(batch, range(first, first + len(batch)), seed=HELD_OUT_SEED)
        student_logits, teacher_logits = (
            compute_logits(model, hidden_states(model, answers)) for model in (student, teacher)
        )
        kl = exact_kl(student_logits, teacher_logits, direction="reverse")
        total, count = total + float(kl.double().sum()), count + len(kl)
    return total / count
