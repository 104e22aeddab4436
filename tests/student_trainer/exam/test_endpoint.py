"""The same model behind a server: equal scores, no repeated requests, and faults of the server."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from protos.errors import (
    DistillError,
    Forbidden,
    InvalidInput,
    NotFound,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from protos.rpc import web_client
from student_trainer.exam import endpoint
from student_trainer.exam.__main__ import run
from student_trainer.exam.answer_store import derive_seed
from student_trainer.exam.questions import load_questions
from tests.student_trainer.environments.server import serve_drips
from tests.student_trainer.exam.conftest import Material, exam
from tests.student_trainer.exam.openai_server import OpenAIServer, http_response

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:httpx")


REPEATS = max(1, int(os.environ.get("DISTILL_REPEATS", "3")) // 20)


@pytest.fixture(autouse=True)
def _shorten_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_client, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.delenv(endpoint.API_KEY, raising=False)


def test_scores_are_those_of_the_directory(material: Material, tmp_path: Path) -> None:
    with OpenAIServer(material.model) as server:
        config = exam(material, tmp_path / "served", endpoint=server.endpoint)
        (served_row,) = run(config)
    (local_row,) = run(exam(material, tmp_path / "local"))
    (wider_row,) = run(exam(material, tmp_path / "wider", top_p=1.0))
    share = local_row["pass@1"]["mean"]
    error = math.sqrt(2 * share * (1 - share) / (10 * 24))
    assert abs(served_row["pass@1"]["mean"] - share) < 4 * error
    assert abs(wider_row["pass@1"]["mean"] - share) > 4 * error, (
        "the test would not see another top_p"
    )
    assert served_row["tokens"]["mean"] == pytest.approx(local_row["tokens"]["mean"], abs=0.2)
    assert server.paths == {"/v1/completions"}
    assert set(server.requests_by_seed.values()) == {1}
    assert 2 <= server.most_at_once <= config.in_flight


def test_chat(material: Material, tmp_path: Path) -> None:
    with OpenAIServer(material.model) as server:
        config = exam(material, tmp_path, endpoint=server.endpoint + "/", api="chat", prompts=2)
        (row,) = run(config)
    assert server.paths == {"/v1/chat/completions"}
    assert 0 < row["pass@1"]["mean"] < 1


def test_faults_that_pass_are_endured(material: Material, tmp_path: Path) -> None:
    faults = {
        1: http_response(503, {"error": "loading"}),
        2: http_response(429, {"error": "busy"}, "Retry-After: 0\r\n"),
        3: b"",  # the connection is closed without an answer
        4: http_response(500, "a defect"),
        9: http_response(200, {"choices": []})[:-2],  # and in the middle of one
    }
    with OpenAIServer(material.model, faults.get) as server:
        config = exam(material, tmp_path, endpoint=server.endpoint, prompts=3, samples=4)
        (row,) = run(config)
    assert (row["prompts"], row["samples"], row["errors"]) == (3, 4, 0)
    assert server.requests == 12 + len(faults)


def test_a_server_that_is_gone_is_waited_for_and_gone_on_with(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_ATTEMPTS", 3)
    unavailable = http_response(503, {"error": "going away"})
    with OpenAIServer(material.model, lambda n: None if n <= 20 else unavailable) as server:
        config = exam(material, tmp_path, endpoint=server.endpoint, prompts=5, samples=8)
        with pytest.raises(
            Unavailable,
            match=r"answered 503: .*going away.*; run the same command later to continue",
        ):
            run(config)
        requests_before = server.requests
        assert requests_before > 20
        server.fault = lambda n: None
        server.requests_by_seed.clear()
        (row,) = run(config)
        assert len(server.requests_by_seed) == 40 - 20
        assert (row["prompts"], row["samples"]) == (5, 8)
        server.requests_by_seed.clear()
        assert run(config) == [row]  # all answers are stored
        larger_config = exam(material, tmp_path, endpoint=server.endpoint, prompts=5, samples=9)
        assert run(larger_config)[0]["samples"] == 9
        assert len(server.requests_by_seed) == 5


def completion(content: object = "a text", tokens: object = 7) -> bytes:
    """Return an answer whose text, or number of tokens, is of another type."""
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    return http_response(200, {"choices": [choice], "usage": {"completion_tokens": tokens}})


@pytest.mark.parametrize(
    ("answer", "category", "message"),
    [
        (http_response(401, {"error": "no key"}), Unauthenticated, r"set the key in \$OPENAI_API"),
        (http_response(403, {"error": "not you"}), Forbidden, "answered 403"),
        (
            http_response(404, {"error": "no model x"}),
            NotFound,
            "MODEL: .*answered 404.*no model x",
        ),
        (http_response(400, {"error": "no chat template"}), InvalidInput, "use --api completions"),
        (http_response(200, {"object": "list"}), InvalidInput, "returned no completion"),
        (http_response(200, {"choices": []}), InvalidInput, "returned no completion"),
        (completion(content=["a", "b"]), InvalidInput, "returned no completion"),
        (completion(content=True), InvalidInput, "returned no completion"),
        (completion(tokens="7"), InvalidInput, "returned no completion"),
        (completion(tokens=1.5), InvalidInput, "returned no completion"),
    ],
)
def test_faults_that_stay_end_it(
    material: Material, tmp_path: Path, answer: bytes, category: type[DistillError], message: str
) -> None:
    with OpenAIServer(material.model, lambda number: answer) as server:
        config = exam(material, tmp_path, endpoint=server.endpoint, api="chat")
        with pytest.raises(category, match=message):
            run(config)
    # Evaluation stops after three prompts that the server refuses.
    assert server.requests <= (3 if category is InvalidInput else 1) * config.in_flight


def test_a_port_that_cannot_be_is_a_sentence(material: Material, tmp_path: Path) -> None:
    config = exam(material, tmp_path, endpoint="http://127.0.0.1:80800/v1")
    with pytest.raises(InvalidInput, match="there is no port 80800") as raised:
        run(config)
    assert raised.value.field == "--endpoint"


def test_a_refused_prompt_is_counted_and_asked_again(
    material: Material, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example by a server whose context is too short, until it is restarted."""
    refusal = http_response(400, {"error": "the context is 8 tokens"})
    shape = {"prompts": 3, "samples": 4, "in_flight": 1}
    with OpenAIServer(material.model, {1: refusal, 6: refusal}.get) as server:
        config = exam(material, tmp_path, endpoint=server.endpoint, **shape)
        (row,) = run(config)
        assert server.requests == 2 + 4, "a refused prompt is not asked for its other answers"
        assert (row["prompts"], row["samples"], row["refused"], row["errors"]) == (3, 4, 8, 8)
        assert "refused 2 prompts" in caplog.text
        assert "the context is 8 tokens" in caplog.text
        assert row["pass@1"]["mean"] <= 1 / 3
        (complete_row,) = run(config)
        assert (complete_row["refused"], complete_row["errors"], server.requests) == (0, 0, 6 + 8)
        assert set(server.requests_by_seed.values()) == {1, 2}
    (undisturbed_row,) = run_served(material, tmp_path / "undisturbed", **shape)
    assert complete_row == undisturbed_row


def run_served(material: Material, out: Path, **shape: int) -> list[dict[str, Any]]:
    with OpenAIServer(material.model) as server:
        return run(exam(material, out, endpoint=server.endpoint, **shape))


def test_an_answer_that_drips_is_given_up(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_ATTEMPTS", 1)
    with serve_drips(b"HTTP/1.1 200 OK\r\n\r\n{") as url:
        config = exam(material, tmp_path, endpoint=url, patience_seconds=0.2)
        with pytest.raises(TimedOut, match=r"timed out: .* within 0\.2 s; raise --patience"):
            run(config)


def test_the_key_is_the_environment_s(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.API_KEY, "sk-secret")
    with OpenAIServer(material.model) as server:
        run(exam(material, tmp_path, endpoint=server.endpoint, prompts=1, samples=1))
    assert server.authorizations == {"Bearer sk-secret"}
    file_contents = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"sk-secret" in data for data in file_contents)


@pytest.mark.slow
def test_killed_and_gone_on_with(material: Material, tmp_path: Path) -> None:
    """After kill -9 of the command, answers are on disk and are not requested again."""
    for number in range(REPEATS):
        kill_and_continue(material, tmp_path / str(number), after=20 + 37 * number % 200)


def kill_and_continue(material: Material, out: Path, *, after: int) -> None:
    prompts, samples, in_flight = 20, 16, 4
    with OpenAIServer(material.model) as server:
        command = [
            *(sys.executable, "-m", "clients", "--json", "eval", "tiny", "--out", str(out)),
            *("--endpoint", server.endpoint, "--api", "completions"),
            *("--in-flight", str(in_flight), "--data", str(material.prompts)),
            *("--reward", "exact_match", "--prompts", str(prompts)),
            *("--samples", str(samples), "--max-tokens", "2"),
        ]
        first = subprocess.Popen(command)
        while server.requests < after:
            assert first.poll() is None, "it was done before it was killed"
            time.sleep(0.001)
        first.send_signal(signal.SIGKILL)
        first.wait()
        wait_for_the_lock(out / "tiny" / "answers.jsonl")
        _, *lines = whole_lines(out / "tiny" / "answers.jsonl")
        on_disk = [row for line in lines for row in json.loads(line)]
        assert len(on_disk) >= server.requests - 2 * in_flight
        asked_before = server.requests_by_seed.copy()
        server.requests_by_seed.clear()
        second_run = subprocess.run(command, capture_output=True, text=True, check=True)
        stored_seeds = {derive_seed(0, row["prompt"], row["sample"]) for row in on_disk}
        assert stored_seeds.isdisjoint(server.requests_by_seed), "asked for again"
        assert len(stored_seeds) + len(server.requests_by_seed) == prompts * samples
        assert set(server.requests_by_seed.values()) == set(asked_before.values()) == {1}
        (row,) = json.loads(second_run.stdout)["models"]
        assert (row["prompts"], row["samples"]) == (prompts, samples)


def whole_lines(journal: Path) -> list[bytes]:
    return [line for line in journal.read_bytes().splitlines(True) if line.endswith(b"\n")]


def wait_for_the_lock(lock: Path) -> None:
    """Wait until the killed command's program has ended, too."""
    import fcntl

    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_an_endpoint_needs_no_torch(material: Material) -> None:
    code = (
        "import sys, student_trainer.exam.__main__, student_trainer.exam.endpoint\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_conversations(material: Material, tmp_path: Path) -> None:
    """Messages, tools and template arguments are sent to the endpoint, the last answer is not."""
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"m": talk, "tools": [{"type": "function"}]}) + "\n")
    data = {"path": str(path), "messages_column": "m", "system": "9"}
    data |= {"template_arguments": {"thinking": False}}
    config = exam(material, tmp_path, endpoint="http://x/v1", api="chat", data=data)
    (question,) = load_questions(config)
    assert (question.text, question.reference) == ("1+1=", "2")
    body = endpoint.ModelEndpoint(config, "tiny").build_body(question, 0)
    assert body["messages"] == [{"role": "system", "content": "9"}, talk[0]]
    assert body["tools"] == [{"type": "function"}]
    assert body["chat_template_kwargs"] == {"thinking": False}


@pytest.mark.parametrize(
    ("data", "changes", "says"),
    [
        ({"system": "9"}, {"api": "completions"}, "text completions have no chat template"),
        ({"messages_column": "m"}, {"api": "completions"}, "use --api chat"),
        ({"chat_template": False}, {"api": "chat"}, "use --api completions"),
        ({"weight_column": "w"}, {"api": "chat"}, "only training uses this key"),
        ({"mix": [{"path": "b", "share": 0.5}]}, {"api": "chat"}, "only training uses this key"),
        ({"chat_template": False, "system": "9"}, {"endpoint": None}, "remove one of the two keys"),
    ],
)
def test_keys_that_exclude_each_other(
    material: Material, tmp_path: Path, data: Any, changes: Any, says: str
) -> None:
    table = {"path": str(material.prompts), **data}
    with pytest.raises(InvalidInput, match=says):
        exam(material, tmp_path, data=table, **{"endpoint": "http://x/v1", **changes})
