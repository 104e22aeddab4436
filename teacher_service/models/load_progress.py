"""The progress of loading a model, for clients that wait for the teacher."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_WIDTH = 6  # characters of a share in a file, "0.4100"
_FAILED = "failed: "


class LoadProgress:
    """The progress of a start: the current stage, and the share of the stage that is done.

    A stage is a text such as "reading its weights". One thread writes and other threads read, so
    each attribute is replaced as a whole.
    """

    def __init__(self) -> None:
        self._stage = "starting"
        self._share: float | None = None
        self._file: Path | None = None

    def begin(self, stage: str) -> None:
        """Begin a stage. Its share is unknown until `set_share` is called."""
        self._share, self._stage = None, stage

    @contextmanager
    def follow_process(self) -> Iterator[Path]:
        """Yield a file; another process writes the share of the stage to it with `write_share`."""
        with tempfile.NamedTemporaryFile(prefix="distill-load-") as file:
            self._file = Path(file.name)
            try:
                yield self._file
            finally:
                self._file = None

    def set_share(self, share: float) -> None:
        """Set the share of the current stage that is done, in [0, 1]."""
        self._share = share

    def __str__(self) -> str:
        """Return the stage, and its share in percent if the share is known."""
        share = self._share
        if file := self._file:
            with suppress(OSError, ValueError):  # the file is empty before the first share
                share = float(file.read_text())
        return self._stage if share is None else f"{self._stage}: {share:.0%}"

    @contextmanager
    def follow_transformers(self) -> Iterator[None]:
        """In the block, take the share from transformers' progress bar, which counts tensors."""
        from transformers.utils import logging as transformers_logging

        def wrap_bar(
            make_bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
        ) -> Any:
            bar = make_bar(*args, **options)
            items = args[0] if args else options.get("iterable")
            return _FollowedBar(bar, len(items), self) if isinstance(items, Sized) else bar

        previous_hook = transformers_logging.set_tqdm_hook(wrap_bar)
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(previous_hook)


def write_share(file: Path, share: float) -> None:
    """Write the share to a file of `follow_process`. A reader never sees an incomplete number."""
    with suppress(OSError), file.open("r+b", buffering=0) as stream:
        stream.write(f"{share:.4f}"[:_WIDTH].encode())


def write_failure(file: Path, reason: str) -> None:
    """Write the reason of a failed load to `file`, for the process that waits for the load."""
    with suppress(OSError):
        file.write_text(_FAILED + reason)


def read_failure(file: Path) -> str:
    """Return the reason that `write_failure` wrote to `file`; "" if there was no failure."""
    with suppress(OSError):
        text = file.read_text()
        return text.removeprefix(_FAILED) if text.startswith(_FAILED) else ""
    return ""


class _FollowedBar:
    """A progress bar over `count` items that reports its iterations to a LoadProgress."""

    def __init__(self, bar: Any, count: int, progress: LoadProgress) -> None:
        self._bar = bar
        self._count = count
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._bar):
            self._progress.set_share(number / self._count)
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
