"""The options of a command that listens: the same for both servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
HostOption = Annotated[str, typer.Option(help="Address of this machine to listen on.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Lines of `ROLE TOKEN`: who may call. Else $DISTILL_TOKENS, else all."
    ),
]
TlsCertOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PEM certificate: serve TLS.")
]
TlsKeyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Its PEM key.")]
TlsClientCaOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Only for clients that it certified (mTLS)."),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Let other machines call without token or TLS.")
]
