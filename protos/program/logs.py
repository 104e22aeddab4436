"""Logging of the services. An event is one line, and never contains prompts, tokens or rows."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum


class LogFormat(StrEnum):
    """The format of log lines: text, or one JSON object per line for log collectors."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The lowest severity that is logged. `debug` also logs a line per request."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def plain(text: str) -> str:
    """Return `text` as one line, with spaces for line breaks and escapes for control characters.

    A text from a job can therefore not control the terminal.
    """
    text = " ".join(line for line in text.splitlines() if line)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_controls(text: str) -> str:
    """Return `text` with escapes for control characters other than tabs and line breaks.

    Use this for a text of several lines from a job. A carriage return within a line, which progress
    bars print, becomes a line break.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def start_logging(form: LogFormat, level: LogLevel, package: str) -> None:
    """Log to stderr. Replaces the handlers of the root logger.

    Messages of `package`, its subpackages, `protos` and `clients` are logged if they have at least
    `level`. Messages of other libraries must also be at least warnings.
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
    """Return the value of the argument `extra` of a log call that adds `values` to the event."""
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
