"""Read the metrics page of a running service, as Prometheus does."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


def metrics_address(log: Path) -> str:
    """Return the HOST:PORT of the metrics page from the log of a service."""
    match = re.search(r"metrics at http://(127\.0\.0\.1:\d+)/", log.read_text())
    assert match, log.read_text()
    return match[1]


def status(address: str, path: str) -> int:
    """Return the HTTP status of a path of the page, such as /readyz."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def scrape(address: str) -> dict[str, float]:
    """Return the samples by name and labels, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
