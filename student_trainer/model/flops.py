"""Floating-point operations of learning from a sequence, as PaLM's appendix B counts them.

A weight of a linear module takes 2 operations per token in the forward pass, 2 for the gradient of
its input, and 2 for its own gradient if it learns: 6 N in all. Attention takes 12 * layers * width
of the queries * tokens per token, as if every token saw all others (PaLM, arXiv 2204.02311). Not
counted, as in every model FLOPs utilization: embeddings, norms, softmax, and what gradient
checkpointing computes again.
"""

from __future__ import annotations

from torch import Tensor, nn

from student_trainer.model.student import Student


class LearningFlops:
    """Counts the operations of one forward and backward pass of a sequence.

    The head runs on the learned tokens only, all other modules on all tokens. Experts of a mixture
    are not counted, so that the count of a mixture is a lower bound.
    """

    def __init__(self, student: Student) -> None:
        """Count the weights of `student`, before or after they are sharded."""
        head = student.model.get_output_embeddings()
        body_modules = [
            module
            for module in student.linear
            if isinstance(module, nn.Linear) and module is not head
        ]
        self._body = sum(_count_operations(module.weight) for module in body_modules)
        self._head = _count_operations(head.weight) if head is not None else 0
        config = student.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)  # 0: a model without attention
        width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        self._attention = 12 * config.num_hidden_layers * heads * width

    def count_sequence(self, tokens: int, learned: int) -> float:
        """Return the operations for a sequence of `tokens` tokens, of which `learned` are rows."""
        return float(tokens * (self._body + self._attention * tokens) + learned * self._head)


def _count_operations(weight: Tensor) -> int:
    return weight.numel() * (6 if weight.requires_grad else 4)
