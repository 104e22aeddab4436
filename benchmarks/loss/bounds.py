"""The claims about the fused loss, checked against the measurements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PUBLISHED = "published formula (EMA-PG {}, re-implemented)"
AT_MOST, AT_LEAST = "<=", ">="


def check_bounds(result: dict[str, Any], chunk_mib: float) -> list[dict[str, Any]]:
    """Return one entry per claim; claims about methods that were not measured are left out.

    `chunk_mib` is the size of one chunk of float32 logits in MiB.
    """
    return [
        {
            "bound": name,
            "wanted": f"{sign} {limit}",
            "measured": value,
            "met": value <= limit if sign == AT_MOST else value >= limit,
        }
        for name, sign, limit, value in _claims(result, chunk_mib)
    ]


def _claims(result: dict[str, Any], chunk_mib: float) -> Iterator[tuple[str, str, float, float]]:
    seconds = {name: row["seconds"] for name, row in result["time"].items()}
    for name, limit in (
        ("chunked cross-entropy", 1.05),
        ("three products", 1.1),
        ("cross-entropy", 1.0),
    ):
        yield f"time over {name}", AT_MOST, limit, seconds["fused"] / seconds[name]
    for name, limit in (
        (PUBLISHED.format("math"), 1.25),
        (PUBLISHED.format("search"), 1.25),
        ("TRL, full vocabulary, and the teacher's logits", 1.6),
    ):
        if name in seconds:
            yield f"times faster: {name}", AT_LEAST, limit, seconds[name] / seconds["fused"]
    by_k = result["k"]
    yield (
        "time at k = 512 over k = 32",
        AT_MOST,
        1.05,
        (by_k["512"]["seconds"] / by_k["32"]["seconds"]),
    )
    errors = [row["gradient_error"] / row["autograd_error"] for row in by_k.values()]
    yield "gradient error over that of autograd in float32", AT_MOST, 1.1, max(errors)
    yield from _memory_claims(result["memory"], chunk_mib)


def _memory_claims(
    rows: list[dict[str, Any]], chunk_mib: float
) -> Iterator[tuple[str, str, float, float]]:
    by_tokens = {row["tokens"]: row["mib"] for row in rows if row["method"] == "fused"}
    few, usual, many = (by_tokens[n] for n in sorted(by_tokens))
    yield "memory over one chunk of logits", AT_MOST, 1.2, many / chunk_mib
    yield "memory at the most tokens over the least", AT_MOST, 1.2, many / few
    name = PUBLISHED.format("math")
    for row in rows:
        if row["method"] == name:
            yield f"times less memory: {name}", AT_LEAST, 50, row["mib"] / usual
