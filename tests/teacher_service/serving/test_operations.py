"""What an operator sees of a running teacher: /metrics, logs, `distill teacher info`, its end."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from clients.cli.app import main
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2_grpc
from protos.errors import Corrupt, ExitCode, InvalidInput
from tests.scraping import metrics_address, scrape
from tests.teacher_service.conftest import StartTeacher

FAKE = ["--engine", "fake", "--model"]
WAIT = 60.0


def query(seed: int, length: int = 20) -> ScoreQuery:
    tokens = np.random.default_rng(seed).integers(0, 60, length).astype(np.int32)
    return ScoreQuery(tokens, 1, top_k=4)


def with_token(token: int) -> ScoreQuery:
    return ScoreQuery(np.array([1, token, 2], np.int32), 1, top_k=4)


def test_metrics_say_what_happened(start_teacher: StartTeacher, tmp_path: Path) -> None:
    teacher = start_teacher(
        *FAKE,
        "vocab=64,nan_token=60,crash_token=61,latency_ms=20",
        "--max-batch-tokens",
        "100",
        "--metrics-port",
        "0",
        "--cache-dir",
        str(tmp_path / "rows"),
    )
    address = metrics_address(teacher.log)
    assert scrape(address)["distill_teacher_forward_seconds_count"] == 0
    with TeacherClient(teacher.address) as client:
        for number in (1, 2, 3, 1, 2):
            client.submit(query(number)).result(WAIT)
        for bad, fault in ((60, Corrupt), (64, InvalidInput), (61, Exception)):
            assert isinstance(client.submit(with_token(bad)).exception(WAIT), fault)
        now = scrape(address)
        assert now["distill_teacher_active_streams"] == 1
    p = "distill_teacher_"
    outcomes = {
        name.split("[")[1].rstrip("]"): value
        for name, value in now.items()
        if name.startswith(p + "requests_total") and value
    }
    assert outcomes == {"OK": 5, "DATA_LOSS": 1, "INVALID_ARGUMENT": 1, "INTERNAL": 3}
    assert now[p + "scored_tokens_total"] == 3 * 19
    # Three sequences, and the one that was found not finite; the crash ended no forward.
    assert now[p + "forward_seconds_count"] == now[p + "batch_fill_ratio_count"] == 4
    assert now[p + "forward_seconds_sum"] >= 4 * 0.02
    assert now[p + "batch_fill_ratio_sum"] == pytest.approx((3 * 20 + 3) / 100)
    assert now[p + "first_chunk_seconds_count"] == now[p + "request_seconds_count"] == 5
    assert now[p + "cache_hits_total[memory]"] == 2
    # The client asks three times before it believes an internal error.
    assert now[p + "cache_misses_total[memory]"] == 3 + 1 + 3
    assert now[p + "queued_tokens"] == now[p + "weights_version"] == 0
    assert now[p + "self_test_nats"] == 0
    assert teacher.stop() == 0


def test_logs_are_json_and_hold_no_contents(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(
        *FAKE, "vocab=64,crash_token=61", "--log-format", "json", "--log-level", "debug"
    )
    secret = "the-caller-wrote-this"
    with grpc.insecure_channel(teacher.address) as channel:
        stub = teacher_pb2_grpc.TeacherStub(channel)
        score_requests = [request_of(query(1), secret), request_of(with_token(61), secret)]
        assert len(list(stub.Score(iter(score_requests), timeout=WAIT))) == 2
    assert teacher.stop() == 0
    events = [json.loads(line) for line in teacher.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "event"} <= event.keys() for event in events)
    [serving] = [event for event in events if event["event"] == "serving"]
    assert (serving["engine"], serving["level"]) == ("fake", "info")
    requests = [event for event in events if event["event"] == "request"]
    outcomes = {(event["code"], event["rows"], event["level"]) for event in requests}
    assert outcomes == {("OK", 19, "debug"), ("INTERNAL", 0, "debug")}
    assert all(0 < event["seconds"] < 10 for event in requests)
    [defect] = [event for event in events if event["event"].startswith("defect")]
    assert "set to crash" in defect["exception"]
    text = teacher.log.read_text()
    assert secret not in text
    assert str(query(1).token_ids[:5].tolist())[1:-1] not in text


def test_a_taken_metrics_port_is_one_sentence(start_teacher: StartTeacher) -> None:
    from tests.teacher_service.test_command import run

    teacher = start_teacher(*FAKE, "", "--metrics-port", "0")
    port = metrics_address(teacher.log).split(":")[1]
    process = run(*FAKE, "", "--no-cache", "--metrics-port", port)
    assert process.returncode == ExitCode.USAGE
    assert process.stderr.startswith("error: --metrics-port: ")
    assert process.stderr.count("\n") == 1


def test_silent_readers_of_the_page_cost_the_teacher_nothing(start_teacher: StartTeacher) -> None:
    """The page asks for no token: who connects and says nothing must not take every descriptor."""
    teacher = start_teacher(*FAKE, "vocab=64", "--metrics-port", "0")
    address = metrics_address(teacher.log)
    host, port = address.split(":")
    process = psutil.Process(teacher.process.pid)
    idle = process.num_fds(), process.num_threads()
    with ExitStack() as stack:
        for _ in range(50):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex((host, int(port)))
            time.sleep(0.005)
        assert process.num_fds() <= idle[0] + 3
        assert process.num_threads() <= idle[1] + 3
    assert scrape(address)["distill_teacher_active_streams"] == 0


def test_distill_teacher_info(
    start_teacher: StartTeacher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = start_teacher(*FAKE, "vocab=64", "--cache-dir", str(tmp_path / "rows"))
    with TeacherClient(teacher.address) as client:
        for number in (1, 2, 1):
            client.submit(query(number)).result(WAIT)
        teacher_info = client.info()
    assert main(["--json", "teacher", "info", teacher.address]) == ExitCode.OK
    record = json.loads(capsys.readouterr().out)
    assert main(["teacher", "info", teacher.address]) == ExitCode.OK
    table = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert table == {key: str(value) for key, value in record.items()}
    assert record["address"] == teacher.address
    assert (record["engine"], record["dtype"], record["version"]) == ("fake", "float64", 0)
    assert (record["fingerprint"], record["vocab_size"]) == (teacher_info.fingerprint, 64)
    assert (record["scored_tokens"], record["forwards"]) == (38, 2)
    assert record["queued_tokens"] == record["cancelled"] == 0
    assert (record["cache_memory_hits"], record["cache_memory_misses"]) == (1, 2)
    assert (record["cache_disk_hits"], record["cache_disk_misses"]) == (0, 2)
    teacher.kill()
    assert main(["--json", "teacher", "info", teacher.address]) == ExitCode.UNREACHABLE
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "UNAVAILABLE"


def test_every_metric_is_explained(start_teacher: StartTeacher, tmp_path: Path) -> None:
    teacher = start_teacher(
        *FAKE, "vocab=64", "--metrics-port", "0", "--cache-dir", str(tmp_path / "rows")
    )
    names = {
        re.sub(r"\[.*|_(bucket|count|sum|created)$", "", name.split("[")[0])
        for name in scrape(metrics_address(teacher.log))
        if not name.startswith("process_")
    }
    page = (Path(__file__).parents[3] / "docs/teacher.md").read_text()
    explained = set(re.findall(r"^\| `(distill_teacher_\w+)` \|", page, re.MULTILINE))
    created = {name.removesuffix("_total") for name in explained if name.endswith("_total")}
    # tests/teacher_service/engines/test_endpoint.py has a teacher that counts them.
    assert names - created == explained - {"distill_teacher_endpoint_tokens"}
