"""The error for a reward whose package is not installed."""

from __future__ import annotations

from protos.errors import InvalidInput
from protos.extras import install_command


def missing(package: str, kind: str, extra: str = "rl") -> InvalidInput:
    """The refusal of a reward whose package is not installed."""
    return InvalidInput(
        f"{kind} needs the package {package}, which is not installed",
        field="reward.type",
        hint=install_command(extra),
    )
