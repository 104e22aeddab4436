"""Command-line options of several programs: version, address, tokens, TLS, model and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protos.program.logs import LogFormat, LogLevel


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from protos.extras import version

        typer.echo(f"distill-service {version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
]
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
PortOption = Annotated[
    int, typer.Option(help="Port of the gRPC service; 0: any free port.", min=0, max=65535)
]
HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of the accepted tokens, one `ROLE TOKEN` per line; read again when it changes."
        " Without it $DISTILL_TOKENS is used; without both, every caller is accepted.",
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="PEM certificate of this server; enables TLS. Read again, with its key, when it"
        " changes.",
    ),
]
TlsKeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate.")
]
TlsClientCaOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="PEM certificate of a CA; only clients with a certificate from it are accepted"
        " (mTLS).",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Allow other machines to connect without tokens or TLS."),
]
MetricsPortOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the HTTP page with /metrics (Prometheus), /healthz and /readyz; 0: any free"
        " port, which the log names.",
    ),
]
MetricsHostOption = Annotated[
    str,
    typer.Option(help="Address of this page. The page needs no token and contains only metrics."),
]
ModelOption = Annotated[str, typer.Option(help="Hugging Face directory or hub id of the model.")]
DeviceOption = Annotated[str, typer.Option(help="Device of the model: auto, cpu, cuda or cuda:1.")]
TensorParallelSizeOption = Annotated[
    int, typer.Option(min=1, help="Number of GPUs that share each layer (vllm).")
]
GpuMemoryShareOption = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of each GPU's memory to use (vllm).")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of CPU threads. Default: $OMP_NUM_THREADS, or else half of the cores."
    ),
]
LogFormatOption = Annotated[
    LogFormat, typer.Option(help="Format of log lines: text, or JSON objects.")
]
LogLevelOption = Annotated[
    LogLevel, typer.Option(help="Least severe level to log; debug adds a line per request.")
]
