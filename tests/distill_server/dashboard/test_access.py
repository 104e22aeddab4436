"""Who may read the dashboard, who may change jobs through it, and its security headers."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from distill_server.dashboard.gate import DashboardGate
from distill_server.dashboard.serve import Dashboard, external_host
from distill_server.jobs.preflight import accept_all
from distill_server.runners.local.runner import LocalRunner
from distill_server.scheduler import Policy
from distill_server.server import run_server
from protos.auth.access import Role, Tokens
from protos.errors import InvalidInput
from protos.rpc.server import ServerEndpoint
from tests.distill_server.conftest import eventually
from tests.distill_server.dashboard.site import TOKENS, Site
from tests.security.processes import Program

READING = [
    *("/api/access", "/api/jobs", "/api/jobs/x", "/api/jobs/x/events", "/api/jobs/x/log"),
    *("/api/jobs/x/steps", "/api/jobs/x/tokens", "/api/jobs/x/tokens/5", "/api/jobs/x/evaluation"),
    *("/api/jobs/x/samples", "/api/jobs/x/samples/5", "/api/teachers", "/api/machine"),
    *("/api/jobs/x/attempts", "/api/jobs/x/checkpoints", "/api/jobs/x/usage"),
    *("/api/jobs/x/preview", "/metrics"),
    "/no/such/page",
]
CHANGING = [
    *("/api/jobs/x/cancel", "/api/jobs/x/resume", "/api/jobs/x/remove", "/api/jobs/x/pin"),
    *("/api/jobs", "/", "/metrics"),
]


@pytest.mark.parametrize("path", READING)
def test_reading_needs_a_token_where_there_are_any(guarded_site: Site, path: str) -> None:
    answer = guarded_site.ask(path)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "UNAUTHENTICATED"
    assert guarded_site.ask(path, role="read").status in (200, 404)


@pytest.mark.parametrize("path", CHANGING)
def test_changing_needs_the_submit_role(guarded_site: Site, path: str) -> None:
    def status(role: str) -> int:
        return guarded_site.ask(path, method="POST", body={}, role=role).status

    assert (status(""), status("read")) == (401, 403)
    assert status("submit") in (404, 405)
    assert status("admin") in (404, 405)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_other_methods_are_refused_before_anybody_looks_at_them(
    guarded_site: Site, method: str
) -> None:
    assert guarded_site.ask("/api/jobs", method=method, role="read").status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Cookie": f"token={TOKENS['admin']}; Authorization=Bearer {TOKENS['admin']}"},
        {"X-Token": TOKENS["admin"]},
        {"Authorization": TOKENS["admin"]},
        {"Authorization": f"Basic {TOKENS['admin']}"},
        {"Authorization": f"Bearer {TOKENS['admin'][:-1]}"},
        {"Authorization": f"Bearer {TOKENS['admin'] * 100}"},
        {},
    ],
)
def test_a_token_counts_only_in_its_header(guarded_site: Site, headers: dict[str, str]) -> None:
    token = TOKENS["admin"]
    path = f"/api/jobs?token={token}&access_token={token}"
    assert guarded_site.ask(path, headers=headers).status == 401


def test_the_page_is_open_and_holds_nothing(guarded_site: Site) -> None:
    guarded_site.submit(name="a-name-to-hide", max_steps=1)
    for path in ("/", "/main.js", "/style.css"):
        answer = guarded_site.ask(path)
        assert answer.status == 200
        assert b"a-name-to-hide" not in answer.body


def test_a_server_without_tokens_is_read_only(site: Site) -> None:
    job = site.submit(name="pause=0.05", max_steps=400)
    assert site.ask("/api/access").json() == {
        "asks_tokens": False,
        "role": "read",
        "may_act": False,
        "server": site.address,
    }
    for wish in ("cancel", "resume"):
        # A simple cross-site request, as another site's page could send.
        answer = site.ask(f"/api/jobs/{job}/{wish}", method="POST", role="admin")
        assert answer.status == 403
        assert "--token-file" in answer.json()["error"]["hint"]
    assert site.job(job)["state"] in ("QUEUED", "PREPARING", "RUNNING")


def test_cancel_and_resume_with_a_token(guarded_site: Site) -> None:
    job = guarded_site.submit(name="pause=0.05", max_steps=400)
    path = f"/api/jobs/{job}"
    eventually(lambda: guarded_site.job(job, "read")["step"] >= 1)
    assert guarded_site.ask(f"{path}/cancel", method="POST", body={}, role="read").status == 403
    answer = guarded_site.ask(f"{path}/cancel", method="POST", body={"now": False}, role="submit")
    assert (answer.status, answer.json()["state"]) == (200, "CANCELLING")
    eventually(lambda: guarded_site.job(job, "read")["state"] == "CANCELLED")
    steps = guarded_site.job(job, "read")["step"] + 3
    answer = guarded_site.ask(
        f"{path}/resume", method="POST", body={"max_steps": steps}, role="submit"
    )
    assert answer.json()["attempt"] == 2
    eventually(lambda: guarded_site.job(job, "read")["state"] == "SUCCEEDED")
    answer = guarded_site.ask(f"{path}/cancel", method="POST", body={}, role="submit")
    assert answer.status == 409


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"now": "yes"}, "now"),
        ({"later": True}, "later"),
        ([], "body"),
        ({"now": True, "x": "y" * 5000}, "body"),
    ],
)
def test_wishes_are_checked(guarded_site: Site, body: object, field: str) -> None:
    answer = guarded_site.ask("/api/jobs/x/cancel", method="POST", body=body, role="submit")
    assert answer.status == 400
    assert answer.json()["error"]["field"] == field


@pytest.mark.parametrize("path", ["/", "/main.js", "/api/jobs", "/api/nothing", "/metrics"])
def test_every_answer_tells_the_browser_to_run_nothing_else(site: Site, path: str) -> None:
    headers = site.ask(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert not any(name.startswith("access-control") for name in headers)
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),
        ("127.0.0.1:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:9", 200),
        ("[::1]", 200),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_names_that_others_lead_here_are_refused(site: Site, host: str, status: int) -> None:
    assert site.ask("/api/jobs", headers={"Host": host}).status == status


@pytest.mark.parametrize(
    ("external", "host", "status"),
    [
        ("distill.example", "distill.example", 200),
        ("distill.example", "DISTILL.example:8443", 200),
        ("distill.example", "127.0.0.1:8080", 200),
        ("distill.example", "evil.example", 403),
        ("distill.example", "distill.example.evil.example", 403),
        ("distill.example", "a.distill.example", 403),
        ("distill.example", "", 403),
        ("2001:db8::1", "[2001:db8::1]:8443", 200),
        ("", "", 403),
        ("", "distill.example", 403),
    ],
)
def test_the_name_of_a_proxy_is_served(external: str, host: str, status: int) -> None:
    application = PlainTextResponse("ok")
    gate = DashboardGate(application, tokens=Tokens(), host="127.0.0.1", external=external)
    scope = {
        **{"type": "http", "method": "GET", "path": "/api/jobs", "query_string": b""},
        "headers": [(b"host", host.encode())],
    }
    statuses: list[int] = []

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    assert statuses[0] == status


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("", ""),
        ("https://Distill.Example/tools/distill/", "distill.example"),
        ("http://distill.example:8443", "distill.example"),
        ("https://[2001:DB8::1]:8443/", "2001:db8::1"),
        ("https://user@distill.example/", "distill.example"),
    ],
)
def test_the_host_of_an_external_url(url: str, host: str) -> None:
    assert external_host(url) == host


@pytest.mark.parametrize(
    "url", ["distill.example", "distill.example:80", "ftp://x/", "https://", "/x"]
)
def test_what_is_no_external_url(url: str) -> None:
    with pytest.raises(InvalidInput, match="--external-url"):
        external_host(url)


@pytest.mark.parametrize("tokens", [Tokens(), Tokens({TOKENS["admin"]: Role.ADMIN})])
def test_strangers_are_not_served_without_token_and_tls(tmp_path: Path, tokens: Tokens) -> None:
    endpoint = ServerEndpoint("0.0.0.0", tokens=tokens)
    with pytest.raises(InvalidInput, match="without tokens and TLS"):
        asyncio.run(serve_once(tmp_path, endpoint, 0))


def test_a_taken_port_is_named(site: Site, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--dashboard: cannot listen on"):
        asyncio.run(serve_once(tmp_path, ServerEndpoint(), site.port))


async def serve_once(runs: Path, endpoint: ServerEndpoint, port: int) -> None:
    await run_server(
        runs,
        endpoint=endpoint,
        runner=LocalRunner(),
        policy=Policy(),
        preflight=accept_all,
        on_ready=lambda bound: pytest.fail("it serves"),
        dashboard=Dashboard(port),
    )


def test_the_dashboard_has_the_tls_of_the_server(tmp_path: Path) -> None:
    """With the real program, as people start it."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=x"
        f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    key.chmod(0o600)
    options = ("--tls-cert", cert, "--tls-key", key, "--dashboard", "0")
    program = Program(
        *("distill_server", "--runs", tmp_path / "runs", *options),
        log=tmp_path / "log",
        variables={"DISTILL_TOKENS": f"read {TOKENS['read']}"},
    )
    try:
        match = re.fullmatch(
            r"dashboard at https://127.0.0.1:(\d+)", program.output.readline().strip()
        )
        assert match
        bearer = {"Authorization": f"Bearer {TOKENS['read']}"}
        trusted = ssl.create_default_context(cafile=cert)
        with closing(HTTPSConnection("127.0.0.1", int(match[1]), context=trusted)) as connection:
            connection.request("GET", "/api/jobs", headers=bearer)
            assert json.load(connection.getresponse())["jobs"] == []
        with closing(HTTPConnection("127.0.0.1", int(match[1]))) as plain:
            plain.request("GET", "/api/jobs", headers=bearer)
            with pytest.raises((HTTPException, OSError)):
                plain.getresponse()
    finally:
        program.close()
