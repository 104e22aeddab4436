"""The options of `distill-teacher`, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from teacher_service.logs import LogFormat, LogLevel

ModelOption = Annotated[str, typer.Option(help="Hugging Face directory or hub id of the model.")]
PortOption = Annotated[
    int, typer.Option(help="Port of the gRPC service; 0: any free port.", min=0, max=65535)
]
EngineOption = Annotated[
    str, typer.Option(help="Scoring engine: hf, vllm, or fake (rows from a hash, for tests).")
]
DtypeOption = Annotated[
    str, typer.Option(help="Dtype of the weights: auto (as saved), float32, bfloat16 or float16.")
]
DeviceOption = Annotated[str, typer.Option(help="Device of the model: auto, cpu, cuda or cuda:1.")]
MaxTopKOption = Annotated[int, typer.Option(min=1, help="Largest number of head ids of a row.")]
MaxBatchTokensOption = Annotated[
    int, typer.Option(min=1, help="Largest number of tokens of a batch, padding included.")
]
BatchInvariantOption = Annotated[
    bool,
    typer.Option(help="Score each sequence alone: its rows have the same bits in every batch."),
]
TensorParallelSizeOption = Annotated[
    int, typer.Option(min=1, help="Number of GPUs that share each layer (vllm).")
]
GpuMemoryShareOption = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of each GPU's memory to use (vllm).")
]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the disk cache. Default: distill-service/rows in $XDG_CACHE_HOME or "
        "~/.cache."
    ),
]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Do not cache rows.")]
CacheMemoryOption = Annotated[int, typer.Option(min=0, help="Size of the memory cache in MiB.")]
CacheDiskOption = Annotated[
    int, typer.Option(min=1, help="Size of the disk cache in GiB; the oldest rows are removed.")
]
CacheZstdOption = Annotated[
    bool, typer.Option(help="Compress rows on disk and in Redis, to about half their size.")
]
RedisUrlOption = Annotated[
    str | None,
    typer.Option(
        help="Redis server through which teachers share rows: redis://user@host:6379/0, or "
        "rediss:// for TLS. Default: $DISTILL_REDIS_URL. Put the password in "
        "$DISTILL_REDIS_PASSWORD."
    ),
]
RedisTtlOption = Annotated[
    int, typer.Option(min=1, help="Hours after which Redis removes a sequence.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of CPU threads. Default: $OMP_NUM_THREADS, or else half of the cores."
    ),
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Serve Prometheus metrics at /metrics on this port; 0: any free port. "
        "Default: no metrics.",
    ),
]
MetricsHostOption = Annotated[
    str,
    typer.Option(
        help="Address to serve /metrics on. It needs no token; it has numbers, but no contents."
    ),
]
LogFormatOption = Annotated[
    LogFormat, typer.Option(help="Format of log lines: text, or JSON objects.")
]
LogLevelOption = Annotated[
    LogLevel, typer.Option(help="Least severe level to log; debug adds a line per request.")
]
