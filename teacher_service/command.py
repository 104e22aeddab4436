"""The command line of `distill-teacher`: parses the options and runs the teacher service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protos.program.logs import LogFormat, LogLevel, start_logging
from protos.program.options import (
    HELP_OPTIONS,
    DeviceOption,
    GpuMemoryShareOption,
    HostOption,
    InsecureOption,
    LogFormatOption,
    LogLevelOption,
    MetricsHostOption,
    MetricsPortOption,
    ModelOption,
    PortOption,
    TensorParallelSizeOption,
    ThreadsOption,
    TlsCertOption,
    TlsClientCaOption,
    TlsKeyOption,
    TokenFileOption,
    VersionOption,
)
from protos.program.startup import errors_as_exit, require_packages, set_threads
from teacher_service import options

if TYPE_CHECKING:
    from teacher_service.cache.settings import CacheSettings

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
)


@app.command()
def teacher(
    model: ModelOption,
    port: PortOption = 50052,
    http_port: options.HttpPortOption = None,
    host: HostOption = "127.0.0.1",
    token_file: TokenFileOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    insecure: InsecureOption = False,
    engine: options.EngineOption = "hf",
    dtype: options.DtypeOption = "auto",
    device: DeviceOption = "auto",
    device_map: options.DeviceMapOption = None,
    max_top_k: options.MaxTopKOption = 1024,
    max_batch_tokens: options.MaxBatchTokensOption = 16384,
    batch_invariant: options.BatchInvariantOption = False,
    tensor_parallel_size: TensorParallelSizeOption = 1,
    gpu_memory_share: GpuMemoryShareOption = 0.9,
    engine_option: options.EngineOptionOption = None,
    adapter: options.AdapterOption = None,
    tokenizer: options.TokenizerOption = None,
    served_model: options.ServedModelOption = None,
    cache_dir: options.CacheDirOption = None,
    no_cache: options.NoCacheOption = False,
    cache_memory_mib: options.CacheMemoryOption = 1024,
    cache_disk_gib: options.CacheDiskOption = 16,
    cache_zstd: options.CacheZstdOption = True,
    redis_url: options.RedisUrlOption = None,
    redis_ttl_hours: options.RedisTtlOption = 168,
    threads: ThreadsOption = None,
    metrics_port: MetricsPortOption = 0,
    metrics_host: MetricsHostOption = "127.0.0.1",
    log_format: LogFormatOption = LogFormat.TEXT,
    log_level: LogLevelOption = LogLevel.INFO,
    version: VersionOption = False,
) -> None:
    """Score sequences with a model and stream the top-k rows to students."""
    set_threads(threads)
    require_packages("teacher", "distill-teacher")
    from protos.auth.tls import TlsFiles
    from protos.rpc.server import read_endpoint
    from teacher_service import program
    from teacher_service.http.front import HttpFront

    sizes = cache_memory_mib << 20, cache_disk_gib << 30
    common = engine, model, dtype, device, batch_invariant, max_batch_tokens, max_top_k
    vllm = program.VllmEngineSettings(tensor_parallel_size, gpu_memory_share, engine_option or ())
    remote = program.EndpointSettings(tokenizer or "", served_model or "")
    scoring = program.ScoringEngineSettings(*common, vllm, remote, adapter or (), device_map or "")
    start_logging(log_format, log_level, "teacher_service")
    with errors_as_exit():
        tls = TlsFiles(tls_cert, tls_key, tls_client_ca)
        endpoint = read_endpoint(host, port, token_file, tls, insecure=insecure)
        cache = _read_cache_settings(
            no_cache, cache_dir, sizes, cache_zstd, redis_url, redis_ttl_hours
        )
        http = None if http_port is None else HttpFront(http_port)
        page = metrics_host, metrics_port
        program.run(program.TeacherSettings(scoring, endpoint, cache, page, http))


def _read_cache_settings(
    no_cache: bool,
    directory: Path | None,
    sizes: tuple[int, int],
    zstd: bool,
    redis_url: str | None,
    redis_ttl_hours: int,
) -> CacheSettings | None:
    from protos.errors import InvalidInput
    from teacher_service.cache.settings import CacheSettings

    if no_cache and redis_url:
        raise InvalidInput(
            "cannot be combined with --no-cache, which keeps no rows",
            field="--redis-url",
            hint="remove one of the two options",
        )
    directory, seconds = directory or _default_cache_directory(), redis_ttl_hours * 3600
    settings = CacheSettings(directory, *sizes, zstd, redis_url, seconds)
    return None if no_cache else settings


def _default_cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "distill-service" / "rows"
