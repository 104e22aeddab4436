"""The options of `distill-teacher`, each with the sentence that `--help` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from teacher_service.logs import LogFormat, LogLevel

ModelOption = Annotated[str, typer.Option(help="Hugging Face directory or hub id.")]
PortOption = Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)]
EngineOption = Annotated[str, typer.Option(help="hf, vllm, or fake (rows from a hash, for tests).")]
DtypeOption = Annotated[
    str, typer.Option(help="Type of the weights: auto (as saved), float32, bfloat16, float16.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")]
MaxTopKOption = Annotated[int, typer.Option(min=1, help="Most head ids of a row.")]
MaxBatchTokensOption = Annotated[
    int, typer.Option(min=1, help="Padded tokens of one forward pass.")
]
BatchInvariantOption = Annotated[
    bool, typer.Option(help="Forward each sequence alone: same bits whatever else is scored.")
]
TensorParallelSizeOption = Annotated[
    int, typer.Option(min=1, help="GPUs that share the model's layers (vllm).")
]
GpuMemoryShareOption = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Part of each GPU's memory to use (vllm).")
]
CacheDirOption = Annotated[
    Path | None, typer.Option(help="Where rows are kept; ~/.cache/distill-service/rows.")
]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Keep no rows at all.")]
CacheMemoryOption = Annotated[int, typer.Option(min=0, help="Rows kept in memory.")]
CacheDiskOption = Annotated[
    int, typer.Option(min=1, help="Rows kept on disk; the oldest are removed.")
]
CacheZstdOption = Annotated[
    bool, typer.Option(help="Compress rows on disk and in Redis: about half the bytes.")
]
RedisUrlOption = Annotated[
    str | None,
    typer.Option(
        help="Redis that teachers share rows through: redis://user@host:6379/0, or rediss:// "
        "(TLS). $DISTILL_REDIS_PASSWORD has the password; $DISTILL_REDIS_URL may be used."
    ),
]
RedisTtlOption = Annotated[int, typer.Option(min=1, help="How long Redis keeps a sequence.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; OMP_NUM_THREADS, or half the cores.")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Serve /metrics for Prometheus there; off without. 0: any free port."
    ),
]
MetricsHostOption = Annotated[
    str, typer.Option(help="Address of /metrics. It asks for no token: figures, no contents.")
]
LogFormatOption = Annotated[LogFormat, typer.Option(help="Lines for people, or JSON objects.")]
LogLevelOption = Annotated[LogLevel, typer.Option(help="debug has a line a request.")]
