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
    """The operations of one forward and backward pass, by the lengths of a sequence.

    The head runs on the learned tokens only, all other modules on all tokens. Experts of a mixture
    are not counted, so that a mixture has a lower bound.
    """

    def __init__(self, student: Student) -> None:
        """Count the weights of `student`, before or after they are sharded."""
        head = student.model.get_output_embeddings()
        body = [one for one in student.linear if isinstance(one, nn.Linear) and one is not head]
        self._body = sum(_of_weight(module.weight) for module in body)
        self._head = _of_weight(head.weight) if head is not None else 0
        config = student.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)  # 0: a model without attention
        width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        self._attention = 12 * config.num_hidden_layers * heads * width

    def of_sequence(self, tokens: int, learned: int) -> float:
        """Return the operations for a sequence of `tokens` tokens, of which `learned` are rows."""
        return float(tokens * (self._body + self._attention * tokens) + learned * self._head)


def _of_weight(weight: Tensor) -> int:
    return weight.numel() * (6 if weight.requires_grad else 4)
