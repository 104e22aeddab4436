"""Losses as pure functions of rows. A test can compare each loss with its formula.

Shapes: N tokens, K head ids, M tail samples, V vocabulary. A loss returns one value per token, [N];
a KL is in nats. The caller applies masks and token weights, and divides the sum once by the number
of tokens of all processes.
"""

from student_trainer.losses.advantages import (
    flat_groups,
    gae,
    group_advantages,
    kl_reward,
    reward_at_last_token,
)
from student_trainer.losses.aggregate import Aggregate, sequence_weights, token_weights, weight_loss
from student_trainer.losses.fused.linear_loss import (
    FusedLoss,
    LossFunction,
    fused_linear_loss,
    fused_linear_rows,
    fused_linear_top_ids,
)
from student_trainer.losses.fused.logit_map import LogitMap
from student_trainer.losses.off_policy import importance_weights, mismatch
from student_trainer.losses.policy import (
    clipped_surrogate,
    is_clipped,
    sequence_log_ratio,
    token_log_ratio,
)
from student_trainer.losses.rows import Index, Rows, entropy_from_logits, rows_from_logits
from student_trainer.losses.sampled import sampled_kl
from student_trainer.losses.topk import Direction, Tail, draw_noise, exact_kl, topk_kl

__all__ = [
    "Aggregate",
    "Direction",
    "FusedLoss",
    "Index",
    "LogitMap",
    "LossFunction",
    "Rows",
    "Tail",
    "clipped_surrogate",
    "draw_noise",
    "entropy_from_logits",
    "exact_kl",
    "flat_groups",
    "fused_linear_loss",
    "fused_linear_rows",
    "fused_linear_top_ids",
    "gae",
    "group_advantages",
    "importance_weights",
    "is_clipped",
    "kl_reward",
    "mismatch",
    "reward_at_last_token",
    "rows_from_logits",
    "sampled_kl",
    "sequence_log_ratio",
    "sequence_weights",
    "token_log_ratio",
    "token_weights",
    "topk_kl",
    "weight_loss",
]
