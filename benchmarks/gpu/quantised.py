"""Rows of quantised teachers on one CUDA device, against float64.

    python -m benchmarks.gpu.quantised [--out FILE]          or: make bench-gpu

Q1: for each format of `tests/vllm/quantised.py`, as dense layers and as experts, the difference
between the log-probs of the vllm engine and those of transformers in float64 with the weights that
the quantised ones mean, in nats: its median, its root mean square, and the largest. "rounding": the
median for transformers with these weights in the dtype of the engine. "unquantised": the median for
the engine against the weights before they were quantised. A format that vLLM does not run here has
its sentence instead. Random weights; logits have a standard deviation of about 4 nats. Writes
benchmarks/results/gpu-quantised-<device>.json. `--device cpu --quick` runs the same code with
vLLM's CPU build, for one format.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from benchmarks.gpu.benchmark import describe_device, parse_options, write_results
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ScoringEngine
from teacher_service.engines.hf import HfEngine
from teacher_service.engines.vllm import VllmEngine
from tests.vllm.float64 import Differences, Exact, queries
from tests.vllm.quantised import FORMATS, VOCAB_SIZE, round_states, save_plain, save_quantised

QUICK = ("AWQ",)
COLUMNS = ("median", "rms", "largest", "rounding", "unquantised")


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments, __doc__)
    result = {"machine": describe_device(options.device), "rows": []}
    print(f"{'Q1 format':<40}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name in QUICK if options.quick else FORMATS:
        for experts in (False, True):
            row = {"format": name, "experts": experts}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row |= measure_format(Path(folder), name, experts=experts)
                except InvalidInput as error:
                    row["refused"] = error.message.rpartition(f"{folder}/")[2]
            result["rows"].append(row)
            print_row(row)
    write_results(result, options, "gpu-quantised")


def measure_format(folder: Path, name: str, *, experts: bool = False) -> dict[str, float]:
    """Return the differences of a format, in nats. Raises InvalidInput if vLLM refuses it."""
    form = FORMATS[name]
    plain = save_plain(folder / "plain", experts=experts)
    quantised, dequantised = save_quantised(plain, folder, form)
    exact, rounded = Exact(dequantised), HfEngine(str(dequantised), dtype=form.dtype, device="cpu")
    for model in (exact.model, rounded._model):
        round_states(model, form)
    with start_engine(quantised) as engine:
        engine_differences, unquantised_differences = (
            largest_differences(engine, exact),
            largest_differences(engine, Exact(plain)),
        )
    rounding = largest_differences(rounded, exact).median
    return {
        **vars(engine_differences),
        "rounding": rounding,
        "unquantised": unquantised_differences.median,
    }


@contextmanager
def start_engine(path: Path, **options: Any) -> Iterator[VllmEngine]:
    engine = VllmEngine(str(path), max_batch_tokens=256, gpu_memory_share=0.3, **options)
    try:
        yield engine
    finally:
        engine.close()


def largest_differences(engine: ScoringEngine, exact: Exact) -> Differences:
    """Of sequences of several lengths, and at two temperatures: the largest of each number."""
    score_queries = queries(VOCAB_SIZE)
    query_differences = []
    for query, rows in zip(score_queries, engine.score(score_queries), strict=True):
        assert isinstance(rows, RowBlock), rows
        query_differences.append(exact.differences(query, rows))
    return Differences(
        *(max(values) for values in zip(*map(astuple, query_differences), strict=True))
    )


def print_row(row: dict[str, Any]) -> None:
    name = row["format"] + (", experts" if row["experts"] else "")
    if "refused" in row:
        print(f"{name:<40}  {row['refused']}")
    else:
        print(f"{name:<40}" + "".join(f"{row[column]:>12.4f}" for column in COLUMNS))


if __name__ == "__main__":
    main()
