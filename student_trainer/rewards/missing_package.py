"""The error for a reward that needs a package which is not installed."""

from __future__ import annotations

from protos.errors import InvalidInput
from protos.extras import install_command


def missing_package(package: str, kind: str, extra: str = "rl") -> InvalidInput:
    """Return the error for a reward of type `kind`; `extra` is the extra that has `package`."""
    return InvalidInput(
        f"{kind} needs the package {package}, which is not installed",
        field="reward.type",
        hint=install_command(extra),
    )
