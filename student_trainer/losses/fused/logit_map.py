"""The map from the products of a head to logits: vocabulary size, scale and soft cap.

The product z = hidden . weight + bias of an id becomes one of these logits:

    s z                   a plain linear head, with s = 1 by default
    c tanh(s z / c)       with a cap c, as in Gemma 2 (arXiv 2408.00118)

The logit is then divided by the temperature T. Without a cap, the scale s is the same as the
temperature T/s, so it needs no extra computation. With a cap, the derivative of a loss with respect
to a product has the factor s (1 - (logit / c)^2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitCurve:
    """The function from products z to logits divided by the temperature.

    It is z / width if `height` is None, otherwise height tanh(z / width).
    """

    width: float
    height: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """Return the function values at `products`, in the same dtype; -inf gives -inf."""
        if self.height is None:
            return products / self.width
        capped = (products / self.width).tanh_().mul_(self.height)
        return capped.masked_fill_(products == -torch.inf, -torch.inf)

    @property
    def steepest(self) -> float:
        """The largest slope of the function, at product 0."""
        return (1.0 if self.height is None else self.height) / self.width

    def slope(self, values: Tensor) -> Tensor | float:
        """Return the slope f'(x) of the curve at the points x with f(x) = `values`."""
        if self.height is None:
            return self.steepest
        return (1 - (values / self.height).square()).clamp_(min=0).mul_(self.steepest)


@dataclass(frozen=True)
class LogitMap:
    """The map from products to logits. The default is a plain linear head.

    - vocab_size: only the first `vocab_size` ids have logits; None: all ids.
    - scale: the factor s of the products, above 0.
    - cap: the soft cap c; None without a cap.
    """

    vocab_size: int | None = None
    scale: float = 1.0
    cap: float | None = None

    def curve(self, temperature: float) -> LogitCurve:
        """Return the function from products to logits divided by `temperature`."""
        if self.cap is None:
            return LogitCurve(temperature / self.scale)
        return LogitCurve(self.cap / self.scale, self.cap / temperature)

    def narrow(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the rows of weight [V, H] and bias [V] for the ids that have logits, as views."""
        return weight[: self.vocab_size], None if bias is None else bias[: self.vocab_size]
