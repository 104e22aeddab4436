"""AdamW of torchao with 8-bit moments. The blocks do not depend on the number of processes.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from student_trainer.checkpoints.optimizer_state import BLOCK, is_quantized
from student_trainer.parallel.shards import local, tensor_with_rows


class RowwiseAdamW8bit(AdamW8bit):  # type: ignore[misc]
    """AdamW8bit of torchao, with blocks of BLOCK elements that never span two rows of a weight.

    In torchao, the blocks begin at the start of a process's shard, and thus depend on the number of
    processes. `is_quantized` returns which weights have 8-bit moments.
    """

    def __init__(self, parameters: Sequence[Tensor], **options: object) -> None:
        super().__init__(parameters, block_size=BLOCK, **options)

    def new_moment(self, weight: Tensor, *, signed: bool) -> Tensor:
        """Return a new moment of zeros, sharded like `weight`.

        `signed`: True for the first moment, which has a sign.
        """
        own_shard = local(weight)
        zeros = torch.zeros_like(own_shard)
        if is_quantized(weight) and len(own_shard):
            zeros = OptimState8bit.zeros(
                own_shard.shape, signed, BLOCK, own_shard.device, dtype=own_shard.dtype
            )
        return tensor_with_rows(zeros, weight)

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        return self.new_moment(p, signed=signed)
