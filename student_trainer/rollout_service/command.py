"""The command line of `distill-rollouts`: parses the options and runs the rollout service."""

from __future__ import annotations

from typing import Annotated

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
from student_trainer.parallel import launcher

EngineOption = Annotated[str, typer.Option(help="Engine that samples: hf (transformers) or vllm.")]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Compute dtype, as student.dtype of the job: float32, bfloat16, or auto (bfloat16 on a"
        " GPU that supports it)."
    ),
]
LoraRankOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Rank of the student's adapters, student.lora.rank of the job. New versions then"
        " contain only the adapters. Default: versions contain all weights, with merged adapters.",
    ),
]
MaxBatchTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of tokens of an engine step (vllm). Default: 16384. With hf, each"
        " order sets this number.",
    ),
]
SleepOption = Annotated[
    bool,
    typer.Option(
        "--sleep",
        help="Free the memory of the GPUs while the trainer learns (vllm, on the trainer's GPUs,"
        " with rollouts.lag = 0).",
    ),
]
RevisionOption = Annotated[str | None, typer.Option(help="Commit of the hub id.")]
EndWithParentOption = Annotated[
    int | None,
    typer.Option(
        hidden=True, metavar="PID", help="End when this process ends, which has started this one."
    ),
]


# The packages of the extra [train] for a machine that only samples.
_PACKAGES = ("accelerate", "safetensors", "torch", "transformers")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
)


@app.command()
def rollouts(
    model: ModelOption,
    port: PortOption = 50053,
    host: HostOption = "127.0.0.1",
    token_file: TokenFileOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    insecure: InsecureOption = False,
    revision: RevisionOption = None,
    engine: EngineOption = "hf",
    dtype: DtypeOption = "auto",
    lora_rank: LoraRankOption = 0,
    device: DeviceOption = "auto",
    max_batch_tokens: MaxBatchTokensOption = None,
    tensor_parallel_size: TensorParallelSizeOption = 1,
    gpu_memory_share: GpuMemoryShareOption = 0.9,
    sleep: SleepOption = False,
    threads: ThreadsOption = None,
    metrics_port: MetricsPortOption = 0,
    metrics_host: MetricsHostOption = "127.0.0.1",
    log_format: LogFormatOption = LogFormat.TEXT,
    log_level: LogLevelOption = LogLevel.INFO,
    end_with_parent: EndWithParentOption = None,
    version: VersionOption = False,
) -> None:
    """Sample rollouts for trainers with the weights that the trainers save."""
    if end_with_parent is not None:
        launcher.end_with_parent(end_with_parent)
    set_threads(threads)
    require_packages("train", "distill-rollouts", _PACKAGES)
    from protos.auth.tls import TlsFiles
    from protos.rpc.server import read_endpoint
    from student_trainer.rollout_service.program import (
        RolloutEngineSettings,
        RolloutVllmSettings,
        run,
    )

    vllm = RolloutVllmSettings(tensor_parallel_size, gpu_memory_share, max_batch_tokens, sleep)
    start_logging(log_format, log_level, "student_trainer")
    with errors_as_exit():
        tls = TlsFiles(tls_cert, tls_key, tls_client_ca)
        endpoint = read_endpoint(host, port, token_file, tls, insecure=insecure)
        settings = RolloutEngineSettings(engine, model, revision, dtype, lora_rank, device, vllm)
        run(settings, endpoint, (metrics_host, metrics_port))
