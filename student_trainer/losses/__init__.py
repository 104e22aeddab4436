"""Pure functions of rows: each loss can be checked against its formula on one page.

Shapes: N tokens, K head ids, V vocabulary. Losses return one value a token; masks, weights and the
one division by the number of tokens belong to the caller.
"""

from student_trainer.losses.exact import exact_kl
from student_trainer.losses.fused import (
    FusedLoss,
    LossFunction,
    fused_linear_loss,
    fused_linear_rows,
)
from student_trainer.losses.rows import Rows, entropy_from_logits, rows_from_logits
from student_trainer.losses.sampled import sampled_kl
from student_trainer.losses.topk import Direction, Tail, topk_kl

__all__ = [
    "Direction",
    "FusedLoss",
    "LossFunction",
    "Rows",
    "Tail",
    "entropy_from_logits",
    "exact_kl",
    "fused_linear_loss",
    "fused_linear_rows",
    "rows_from_logits",
    "sampled_kl",
    "topk_kl",
]
