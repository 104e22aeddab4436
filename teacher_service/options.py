"""The options that only `distill-teacher` has, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineOption = Annotated[
    str,
    typer.Option(
        help="Scoring engine: hf, vllm, endpoint (an external vLLM server at the address "
        "--model), or fake (rows from a hash, for tests)."
    ),
]
TokenizerOption = Annotated[
    str | None, typer.Option(help="Directory or hub id of the tokenizer (endpoint).")
]
ServedModelOption = Annotated[
    str | None,
    typer.Option(help="Name of the model at the server, if it has several (endpoint)."),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=DIR",
        help="LoRA adapter for requests, in peft's format; may be repeated (hf, vllm).",
    ),
]
EngineOptionOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Further argument of vLLM's AsyncEngineArgs, such as data_parallel_size=2; may be "
        "repeated (vllm).",
    ),
]
HttpPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Also serve HTTP on this port, like vLLM (/v1/completions); 0: any free port. "
        "Default: no HTTP.",
    ),
]
DtypeOption = Annotated[
    str, typer.Option(help="Dtype of the weights: auto (as saved), float32, bfloat16 or float16.")
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        help="auto: place layers on all GPUs, then in CPU memory, then on disk, for a model that "
        "exceeds one GPU; --gpu-memory-share then refers to free memory (hf). Default: the whole "
        "model is on --device."
    ),
]
MaxTopKOption = Annotated[int, typer.Option(min=1, help="Largest number of head ids of a row.")]
MaxBatchTokensOption = Annotated[
    int, typer.Option(min=1, help="Largest number of tokens of a batch, padding included.")
]
BatchInvariantOption = Annotated[
    bool,
    typer.Option(help="Score each sequence alone: its rows have the same bits in every batch."),
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
