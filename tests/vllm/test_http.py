"""The HTTP front beside vLLM's own server: the same answers, and TRL's trainer learns the same."""

from __future__ import annotations

import asyncio
import collections
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from protos.rpc.ports import free_ports
from tests.teacher_service.http.asking import FAKE, Site, tokens
from tests.teacher_service.processes import TeacherProcess
from tests.vllm.model import VOCAB_SIZE, save_model

HERE = Path(__file__).parent
# ms-swift needs other versions of transformers and TRL than this environment has.
SWIFT = os.environ.get("DISTILL_SWIFT_PYTHON", "")
MISSING = [name for name in ("vllm", "trl") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"make test-vllm has {MISSING}"),
    pytest.mark.filterwarnings("default"),  # TRL's of vLLM 0.32, which it has not tested
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]
# TRL's documentation asks for these two of a teacher's server.
FOR_TRL = ["--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def vllm_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of vLLM's own server of the model."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "512", *FOR_TRL]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--enforce-eager"], stdout=output, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                assert answer.status == 200
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)


@pytest.fixture(scope="module")
def teacher_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a teacher of the same model, run by transformers."""
    options = ["--engine", "hf", "--model", str(model), "--dtype", "float32", "--device", "cpu"]
    log = tmp_path_factory.mktemp("ours") / "log"
    teacher = TeacherProcess([*options, "--http-port", "0", "--no-cache"], log=log, launched=True)
    try:
        yield Site(teacher).url
    finally:
        teacher.close()


def fetch(url: str, path: str, fields: Any = None) -> Any:
    data = None if fields is None else json.dumps(fields).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
        return json.load(answer)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


@pytest.mark.parametrize("k", [0, 1, 8])
def test_the_answers_of_vllm(teacher_url: str, vllm_url: str, k: int) -> None:
    """Field by field; a token beyond the k has its true rank there, and k + 1 here."""
    answers = []
    for url in (teacher_url, vllm_url):
        name = fetch(url, "/v1/models")["data"][0]["id"]
        fields = {"model": name, "prompt": prompts(2, 40, 300), "max_tokens": 1}
        answers.append(fetch(url, "/v1/completions", {**fields, "prompt_logprobs": k}))
    teacher_answer, vllm_answer = answers
    assert teacher_answer.keys() <= vllm_answer.keys()
    for teacher_choice, vllm_choice in zip(
        teacher_answer["choices"], vllm_answer["choices"], strict=True
    ):
        assert teacher_choice.keys() <= vllm_choice.keys()
        for field in ("index", "finish_reason", "logprobs", "stop_reason"):
            assert teacher_choice[field] == vllm_choice[field]
        rows = zip(
            teacher_choice["prompt_logprobs"][1:], vllm_choice["prompt_logprobs"][1:], strict=True
        )
        assert teacher_choice["prompt_logprobs"][0] is vllm_choice["prompt_logprobs"][0] is None
        for row, expected in rows:
            # In the same order as well: the token of the prompt is the first.
            assert [*row] == [*expected]
            for token, entry in row.items():
                assert entry["logprob"] == pytest.approx(expected[token]["logprob"], abs=1e-4)
                assert entry["rank"] == min(expected[token]["rank"], max(k, 1) + 1)


def test_the_models_page_of_vllm(teacher_url: str, vllm_url: str, model: Path) -> None:
    teacher_page, vllm_page = (fetch(url, "/v1/models") for url in (teacher_url, vllm_url))
    assert teacher_page["object"] == vllm_page["object"]
    assert teacher_page["data"][0]["id"] == vllm_page["data"][0]["id"] == str(model)
    assert teacher_page["data"][0].keys() <= vllm_page["data"][0].keys()


@pytest.mark.parametrize("k", [1, 8])
def test_the_client_of_trl_reads_the_same(teacher_url: str, vllm_url: str, k: int) -> None:
    from trl.generation.vllm_client import VLLMClient

    sequences = prompts(30, 300, 7)
    answers = [
        VLLMClient(base_url=url, connection_timeout=60.0).get_sequence_logprobs(
            sequences, [10, 250, 1], top_logprobs=k
        )
        for url in (teacher_url, vllm_url)
    ]
    for field in ("logprob_token_ids", "actual_token_ids"):
        assert answers[0][field] == answers[1][field]
    for field in ("logprobs", "actual_logprobs"):
        for teacher_values, vllm_values in zip(answers[0][field], answers[1][field], strict=True):
            np.testing.assert_allclose(teacher_values, vllm_values, atol=1e-4)


def test_the_async_client_of_trl_reads_the_same(teacher_url: str, vllm_url: str) -> None:
    """The requests of its rollout worker, which trains with GPUs only."""
    import aiohttp
    from accelerate import PartialState
    from trl.experimental.async_distillation import async_rollout_worker

    PartialState(cpu=True)  # its log needs one

    async def scored(url: str) -> Any:
        async with aiohttp.ClientSession() as session:
            worker: Any = object.__new__(async_rollout_worker._AsyncRolloutLoop)
            worker.session, worker._counters = session, collections.Counter()
            worker.teacher_top_k, worker.teacher_temperature = 8, 1.0
            worker.teacher_server_urls, worker.request_timeout = {"default": url}, 60
            worker.teacher_model_names = {}
            await worker._resolve_teacher_model_names()
            name = worker.teacher_model_names["default"]
            return await worker._score_with_teacher(*prompts(20, 60), url, name)

    answers = [asyncio.run(scored(url)) for url in (teacher_url, vllm_url)]
    assert answers[0][0] == answers[1][0]
    assert len(answers[0][0]) == 60
    for teacher_values, vllm_values in zip(answers[0][1], answers[1][1], strict=True):
        np.testing.assert_allclose(teacher_values, vllm_values, atol=1e-4)


def test_the_client_of_trl_sends_the_token_of_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.generation.vllm_client import VLLMClient

    token = "r" * 43
    monkeypatch.setenv("DISTILL_TOKENS", f"read {token}")
    teacher = TeacherProcess([*FAKE, "--no-cache"], log=tmp_path / "log", launched=True)
    try:
        url = Site(teacher).url
        client = VLLMClient(base_url=url.replace("//", f"//any:{token}@"))
        assert (
            len(client.get_sequence_logprobs([tokens(30)], [10], top_logprobs=3)["logprobs"]) == 1
        )
        with pytest.raises(Exception, match="401"):
            VLLMClient(base_url=url)
    finally:
        teacher.close()


@pytest.mark.parametrize(("k", "beta"), [(8, 0.0), (1, 1.0)])
def test_the_trainer_of_trl_learns_the_same(
    teacher_url: str, vllm_url: str, k: int, beta: float, tmp_path: Path
) -> None:
    """TRL's ServerDistillationTrainer, unchanged, with forward KL of top-8 and reverse KL."""
    student = save_model(tmp_path / "student", layers=1, std=0.1)
    module = [sys.executable, "-m", "tests.vllm.trl_job"]
    assert_equal_losses(module, student, (teacher_url, vllm_url), k, str(beta))


@pytest.mark.skipif(not SWIFT, reason="$DISTILL_SWIFT_PYTHON names no Python with ms-swift 4.2")
def test_gkd_of_ms_swift_learns_the_same(teacher_url: str, vllm_url: str, tmp_path: Path) -> None:
    """ms-swift's GKD, unchanged, with the JSD of top-8."""
    student = save_model(tmp_path / "student", layers=1, std=0.1)
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.pad_token = tokenizer.eos_token = "~"
    tokenizer.save_pretrained(student)
    assert_equal_losses([SWIFT, str(HERE / "swift_job.py")], student, (teacher_url, vllm_url), 8)


def assert_equal_losses(
    command: list[str], student: Path, urls: tuple[str, str], k: int, *options: str
) -> None:
    losses = []
    for name, url in zip(("ours", "theirs"), urls, strict=True):
        out = student.with_name(f"{name}.json")
        process = subprocess.run(
            [*command, str(student), url, str(out), str(k), *options],
            env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"},
            cwd=HERE.parents[1],
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        losses.append(json.loads(out.read_text()))
    print(f"k = {k} {options}: {losses}")
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
