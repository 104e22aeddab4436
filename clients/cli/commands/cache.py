"""`distill cache`: prints the size of the local copies of data, and deletes cached records."""

from __future__ import annotations

from typing import Annotated

import typer

from clients.cli.settings import settings_of
from protos.errors import ExitCode


def cache(
    context: typer.Context,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the cached records.")] = False,
) -> ExitCode:
    """Print the directory and the size of the cache, or delete the cached records.

    `records` has the records of data sets, which jobs read by memory map and create again if they
    are missing. When a job adds records, the records that no job has opened for 30 days are
    deleted. `files` and `stores` have copies of the files and stores that jobs name at s3:// and
    gs://.
    """
    from clients.cli.commands.submit import format_size
    from clients.store.copies import cache_directory
    from clients.store.record_cache import cached_sizes, clear_records

    output = settings_of(context).output
    if clear:
        size = cached_sizes().get("records", 0)
        kept_count = clear_records()
        freed = size - cached_sizes().get("records", 0)
        text = f"{format_size(freed)} freed"
        if kept_count:
            text += f"; data sets that a job reads or checks now, and that are kept: {kept_count}"
        output.result({"freed_bytes": freed, "kept": kept_count}, text)
        return ExitCode.OK
    sizes = cached_sizes()
    lines = [str(cache_directory())] + [f"{name}: {format_size(n)}" for name, n in sizes.items()]
    output.result({"path": lines[0], "bytes": sizes}, "\n".join(lines))
    return ExitCode.OK
