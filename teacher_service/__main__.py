"""The command `distill-teacher`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from clients.cli.listen_options import (
    HostOption,
    InsecureOption,
    TlsCertOption,
    TlsClientCaOption,
    TlsKeyOption,
    TokenFileOption,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def teacher(
    model: Annotated[str, typer.Option(help="Hugging Face directory or hub id.")],
    port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)] = 50052,
    host: HostOption = "127.0.0.1",
    token_file: TokenFileOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    insecure: InsecureOption = False,
    engine: Annotated[str, typer.Option(help="hf, or fake (rows from a hash, for tests).")] = "hf",
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: auto (as saved), float32, bfloat16, float16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    max_top_k: Annotated[int, typer.Option(min=1, help="Most head ids of a row.")] = 1024,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Padded tokens of one forward pass.")
    ] = 16384,
    batch_invariant: Annotated[
        bool, typer.Option(help="Forward each sequence alone: same bits whatever else is scored.")
    ] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where rows are kept; ~/.cache/distill-service/rows.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep no rows at all.")] = False,
    cache_memory_mib: Annotated[int, typer.Option(min=0, help="Rows kept in memory.")] = 1024,
    cache_disk_gib: Annotated[
        int, typer.Option(min=1, help="Rows kept on disk; the oldest are removed.")
    ] = 16,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; OMP_NUM_THREADS, or half the cores.")
    ] = None,
) -> None:
    """Score sequences with a model and stream the top-k rows to students."""
    # Before torch is imported: every thread of it reads this once.
    os.environ["OMP_NUM_THREADS"] = str(threads or os.environ.get("OMP_NUM_THREADS") or _half())
    from protos.errors import DistillError
    from protos.server import read_endpoint
    from protos.tls import TlsFiles
    from teacher_service.program import Settings, run

    tls = TlsFiles(tls_cert, tls_key, tls_client_ca)
    try:
        settings = Settings(
            model=model,
            endpoint=read_endpoint(host, port, token_file, tls, insecure=insecure),
            engine=engine,
            dtype=dtype,
            device=device,
            max_top_k=max_top_k,
            max_batch_tokens=max_batch_tokens,
            batch_invariant=batch_invariant,
            cache_dir=None if no_cache else cache_dir or _default_cache(),
            cache_memory_bytes=0 if no_cache else cache_memory_mib << 20,
            cache_disk_bytes=cache_disk_gib << 30,
        )
        run(settings)
    except DistillError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error


def _half() -> int:
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "distill-service" / "rows"


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
