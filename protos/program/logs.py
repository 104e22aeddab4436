"""Logging of the services: one line per event, never with prompts, tokens or rows."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum


class LogFormat(StrEnum):
    """The format of log lines: text for people, or one JSON object per line for log collectors."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe level that is logged; `debug` adds a line per request."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def plain(text: str) -> str:
    """Return `text` in one line: spaces for line breaks, and escapes for control characters, so
    that text from a job cannot control the terminal.
    """
    text = " ".join(line for line in text.splitlines() if line)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_controls(text: str) -> str:
    """Return `text` with escapes for control characters other than tabs and line breaks.

    For text of several lines from a job. A carriage return within a line, as progress bars send it,
    becomes a line break.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def start_logging(form: LogFormat, level: LogLevel, package: str) -> None:
    """Log messages of `level` and above to stderr; from other libraries, only warnings and above.

    `package` is the package of the program; its subpackages log at the same level.

    Replaces the handlers of the root logger.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Text() if form is LogFormat.TEXT else _Json())
    root = logging.getLogger()
    root.handlers = [handler]
    level_number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(logging.WARNING, level_number))
    for own_package in (package, "protos", "clients"):
        logging.getLogger(own_package).setLevel(level_number)


def fields(**values: object) -> dict[str, object]:
    """Return the `extra=` argument of a log call that adds `values` to the event."""
    return {"fields": values}


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = getattr(record, "fields", {}).items()
        return super().formatMessage(record) + "".join(f" {name}={value}" for name, value in pairs)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)
