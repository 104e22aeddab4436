"""The files of deploy/monitoring, and the metrics they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deploy" / "monitoring"
_METRIC = re.compile(r"\b(?:distill|process)_\w+\b|\bup\b(?=\{)")


def rules() -> Iterator[tuple[str, str]]:
    """Yield the name and expression of each alert."""
    for group in yaml.safe_load((FILES / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def panels() -> Iterator[tuple[str, str]]:
    """Yield the panel title and expression of each curve of the dashboard."""
    board: Any = json.loads((FILES / "dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def metrics() -> set[str]:
    """Return every metric that an alert or a panel names."""
    return {name for _, expr in (*rules(), *panels()) for name in _METRIC.findall(expr)}
