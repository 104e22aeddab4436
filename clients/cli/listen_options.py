"""Command line options that all services share: address, tokens, TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
PortOption = Annotated[
    int, typer.Option(help="Port of the gRPC service; 0: any free port.", min=0, max=65535)
]
HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of the accepted tokens, one `ROLE TOKEN` per line. Without it $DISTILL_TOKENS"
        " is used; without both, every caller is accepted.",
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM certificate of this server; enables TLS."),
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
    typer.Option(help="Address of that page. It needs no token; it has numbers, but no contents."),
]
