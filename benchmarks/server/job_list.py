"""The dashboard's list of many jobs: python -m benchmarks.server.job_list [--jobs N ...]

Measures, for each number of jobs, the bytes and the server's CPU seconds of a page of the list,
and the time from the start of the navigation until Chromium has painted the rows. The CPU seconds
depend little on the load of the machine, the time does; the result has the load. Needs Debian's
chromium and chromium-driver. Writes results/job_list.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.distill_server.conftest import eventually
from tests.distill_server.dashboard.browser import Browser
from tests.distill_server.dashboard.site import TOKENS

RESULTS = Path(__file__).parents[1] / "results" / "job_list.json"
REQUESTS, VISITS = 20, 5
PATHS = {
    "page": "/api/jobs",
    "search": "/api/jobs?search=project%3Dmath",
    "by_time": "/api/jobs?sort=-time",
    "last_page": "/api/jobs?offset={last}",
}
# Called in each new document: remembers when the rows of the list were painted.
_CLOCK = """
new MutationObserver(() => {
  if (window.paintedAt || !document.querySelector('.jobs tbody tr')) return;
  window.paintedAt = -1;
  requestAnimationFrame(() => setTimeout(() => { window.paintedAt = performance.now(); }));
}).observe(document, {childList: true, subtree: true});
"""
_MEASURED = """
const isFile = (entry) => !entry.name.includes("/api/");
const files = performance.getEntriesByType("resource").filter(isFile);
return {
  first_paint_ms: performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null,
  rows_ms: window.paintedAt,
  files: files.length,
  file_bytes: files.reduce((sum, entry) => sum + entry.decodedBodySize, 0),
};
"""


class Server:
    """A server with seeded jobs, in a process of its own."""

    def __init__(self, runs: Path, jobs: int) -> None:
        program = "tests.distill_server.dashboard.seeded_site"
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, str(runs), str(jobs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the port of gRPC
        self.url = self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def get(self, path: str) -> int:
        """Return the number of bytes of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(self.url).port or 0)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {TOKENS['read']}"})
            response = connection.getresponse()
            assert response.status == 200
            return len(response.read())
        finally:
            connection.close()


def measure_request(server: Server, path: str) -> dict[str, float]:
    """Measure a request after one that has filled the server's caches."""
    size = server.get(path)
    began = server.cpu_seconds
    for _ in range(REQUESTS):
        server.get(path)
    seconds = (server.cpu_seconds - began) / REQUESTS
    return {"bytes": size, "cpu_seconds": round(seconds, 4)}


def measure_visits(server: Server, profile: Path) -> dict[str, Any]:
    """Open the list several times, with an empty cache the first time."""
    visits = []
    with Browser(profile) as browser:
        browser.resize(1280)
        browser._command("Page.addScriptToEvaluateOnNewDocument", {"source": _CLOCK})
        browser.open(server.url)
        browser.run(f"sessionStorage.setItem('distill-token', '{TOKENS['read']}')")
        for _ in range(VISITS):
            browser.open(f"{server.url}/#/")
            eventually(lambda: browser.run("return window.paintedAt > 0"))
            visits.append(browser.run(_MEASURED))
        rows = browser.count(".jobs tbody tr")
        heights = browser.run(
            "return [...document.querySelectorAll('.jobs tbody tr')].map((row) => row.offsetHeight)"
        )
    return {
        "rows": rows,
        "row_height": max(heights),
        "files": visits[0]["files"],
        "file_bytes": visits[0]["file_bytes"],
        "first_paint_ms": round(statistics.median(visit["first_paint_ms"] for visit in visits)),
        "rows_ms": round(statistics.median(visit["rows_ms"] for visit in visits)),
    }


def measure(jobs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "runs", jobs)
        try:
            requests = {
                name: measure_request(server, path.format(last=jobs - 10))
                for name, path in PATHS.items()
            }
            load = os.getloadavg()[0]
            visits = measure_visits(server, Path(folder) / "profile")
        finally:
            server.close()
    return {"jobs": jobs, "requests": requests, "visits": visits, "load": round(load, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[18, 1000, 10_000])
    options = parser.parse_args()
    results = []
    for jobs in options.jobs:
        results.append(measure(jobs))
        print(json.dumps(results[-1]), flush=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
