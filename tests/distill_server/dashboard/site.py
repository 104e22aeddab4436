"""A server with a dashboard, and an independent HTTP client from the standard library."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clients.config.on_policy import OnPolicyJob
from clients.jobs.client import DistillClient
from tests.distill_server.conftest import end_attempt, job_config
from tests.forked_python import ForkedPython

ROOT = Path(__file__).parents[3]
TOKENS = {role: role[0] * 43 for role in ("read", "submit", "admin")}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """`tokens`: whether the server requires them. `external`: the URL of a proxy; needs `port`."""

    def __init__(
        self,
        runs: Path,
        *,
        tokens: bool = False,
        patience: float = 10.0,
        port: int = 0,
        slots: int = 4,
        external: str = "",
    ) -> None:
        self.runs = runs
        self.asks_tokens = tokens
        lines = "\n".join(f"{role} {token}" for role, token in TOKENS.items())
        self.log = runs.with_suffix(".log")
        words = [str(runs), str(patience), str(port), str(slots), *([external] if external else [])]
        with self.log.open("ab") as stderr:
            self.process = ForkedPython(
                [sys.executable, "-m", "tests.distill_server.dashboard.scripted_site", *words],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "DISTILL_TOKENS": lines if tokens else ""},
            )
        assert self.process.stdout is not None
        bound, self.url = (self.process.stdout.readline().strip() for _ in range(2))
        assert self.url, self.log.read_text()
        self.address = f"127.0.0.1:{bound}"
        self.port = port or urlsplit(self.url).port or 0

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        role: str = "",
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        connection = self.connect()
        try:
            request_headers = dict(headers or {})
            if role:
                request_headers["Authorization"] = f"Bearer {TOKENS[role]}"
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, request_headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def messages(
        self, path: str, *, after: str = "", role: str = ""
    ) -> Iterator[tuple[str, str, Any]]:
        """Yield (event, id, data) from a feed; closing the iterator disconnects."""
        connection = self.connect()
        try:
            request_headers = {"Last-Event-ID": after} if after else {}
            if role:
                request_headers["Authorization"] = f"Bearer {TOKENS[role]}"
            connection.request("GET", path, headers=request_headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.getheader("Content-Type", "").startswith("text/event-stream")
            fields: dict[str, str] = {}
            for line in response:
                name, colon, value = line.decode().rstrip("\n").partition(": ")
                if colon:
                    fields[name] = value
                elif fields:
                    yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
                    fields = {}
        finally:
            connection.close()

    def submit(self, config: OnPolicyJob | None = None, **values: Any) -> str:
        """Submit a job and return its id."""
        os.environ["DISTILL_TOKEN"] = TOKENS["submit"] if self.asks_tokens else ""
        try:
            with DistillClient(self.address) as client:
                return client.submit(config or job_config(**values)).id
        finally:
            del os.environ["DISTILL_TOKEN"]

    def job(self, job_id: str, role: str = "") -> Any:
        return self.ask(f"/api/jobs/{job_id}", role=role).json()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        assert self.process.stdout is not None
        self.process.send_signal(signum)
        code = self.process.wait(20)
        self.process.stdout.close()
        return code

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)
        for kind in ("*", ".teachers/*"):
            for directory in self.runs.glob(f"{kind}/logs/attempt-*"):
                end_attempt(directory)
        assert "Traceback" not in self.log.read_text()
