"""Prometheus and Alertmanager on free ports, installed as docs/operations.md says.

They read copies of deploy/monitoring in which only addresses and durations differ.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from protos.rpc.ports import free_ports
from tests.distill_server.conftest import eventually
from tests.documents import ROOT, blocks


class Prometheus:
    """A running Prometheus, by its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expr: str) -> Sequence[Mapping[str, Any]]:
        """Return the current samples of an expression."""
        query_string = urllib.parse.urlencode({"query": expr})
        response: Any = _read(f"{self._url}/query?{query_string}")
        assert response["status"] == "success", response
        samples: Sequence[Mapping[str, Any]] = response["data"]["result"]
        return samples

    def value(self, expr: str) -> float | None:
        """Return the only sample of an expression; None if there is none."""
        samples = self.query(expr)
        assert len(samples) < 2, samples
        return float(samples[0]["value"][1]) if samples else None

    def firing_alerts(self) -> set[str]:
        """Return the names of the firing alerts."""
        samples = self.query('ALERTS{alertstate="firing"}')
        return {sample["metric"]["alertname"] for sample in samples}


class Messages:
    """The notifications from Alertmanager: (name, status) of each alert."""

    def __init__(self) -> None:
        self.alerts: set[tuple[str, str]] = set()

    def read(self, body: bytes) -> None:
        for alert in json.loads(body)["alerts"]:
            assert alert["annotations"]["summary"]
            self.alerts.add((alert["labels"]["alertname"], alert["status"]))


@contextlib.contextmanager
def monitoring(home: Path, targets: Mapping[str, str]) -> Iterator[tuple[Prometheus, Messages]]:
    """Run both programs within the block. `targets`: HOST:PORT by the name of the scrape job."""
    messages = Messages()
    with _receiver(messages) as port, contextlib.ExitStack() as stack:
        prometheus_port, alertmanager_port = free_ports(2)
        options = _install(home)
        files = home / "etc" / "prometheus"
        _edit(files / "alertmanager.yml", r"(group_wait|group_interval): \w+", r"\1: 1s")
        _edit(files / "alertmanager.yml", ":9095/", f":{port}/")
        _edit(files / "rules.yml", r"for: \d+m", "for: 1s")
        _edit(files / "prometheus.yml", r"(\w+_interval): 15s", r"\1: 1s")
        _edit(files / "prometheus.yml", ":9093", f":{alertmanager_port}")
        for job, target in targets.items():
            target_pattern = rf'(job_name: {job}\n.*\n.*targets: \[)"[^"]+"'
            _edit(files / "prometheus.yml", target_pattern, rf'\1"{target}"')
        for program, storage in (
            ("prometheus-alertmanager", f"--storage.path={home}/alerts"),
            ("prometheus", f"--storage.tsdb.path={home}/series"),
        ):
            config_name = program.removeprefix("prometheus-")
            arguments = (
                options[program]
                .replace(":9090", f":{prometheus_port}")
                .replace(":9093", f":{alertmanager_port}")
            )
            words = [program, *shlex.split(arguments), storage, "--log.level=warn"]
            words += [f"--config.file={files}/{config_name}.yml"]
            stack.enter_context(_process(words, home / f"{config_name}.log"))
        eventually(lambda: _answers(prometheus_port) and _answers(alertmanager_port))
        yield Prometheus(prometheus_port), messages


def _install(home: Path) -> Mapping[str, str]:
    """Run the document's commands with `home` as the root; return the options of each service."""
    for folder in ("default", "prometheus"):
        (home / "etc" / folder).mkdir(parents=True)
    (block,) = blocks("docs/operations.md", "monitoring")
    commands = block.body.replace("/etc/", f"{shlex.quote(str(home))}/etc/")
    stubs = "apt-get() { :; }; systemctl() { :; }"
    subprocess.run(["bash", "-euc", f"{stubs}\n{commands}"], cwd=ROOT, check=True)
    options = {}
    for path in (home / "etc" / "default").iterdir():
        match = re.fullmatch(r'ARGS="(.*)"\n', path.read_text())
        assert match, path
        options[path.name] = match[1]
    return options


def _edit(path: Path, pattern: str, replacement: str) -> None:
    changed, count = re.subn(pattern, replacement, path.read_text())
    assert count, pattern
    path.write_text(changed)


@contextlib.contextmanager
def _process(words: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
        try:
            yield
            assert process.poll() is None, log.read_text()
        finally:
            process.kill()


@contextlib.contextmanager
def _receiver(messages: Messages) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.read(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready"):
        return True
    return False


def _read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())
