"""A client that pushes weights continues with the new weights; other clients get an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput, WrongState
from protos.rows.codec import RowBlock
from teacher_service.engines.hf import HfEngine
from tests.teacher_service.processes import TeacherProcess
from tests.teacher_service.serving.pushing import Arrays, arrays
from tests.teacher_service.tiny_model import save_tiny_model

WAIT = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[HfEngine]:
    folder = tmp_path_factory.mktemp("models")
    paths = [save_tiny_model(folder / str(seed), seed=seed) for seed in (0, 1)]
    return [HfEngine(str(path), batch_invariant=True) for path in paths]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherProcess]:
    """One teacher for all tests: it starts with the weights of seed 0, and each test pushes its
    own.
    """
    folder = tmp_path_factory.mktemp("teacher")
    model = save_tiny_model(folder / "model", seed=0)
    process = TeacherProcess(
        ["--model", str(model), "--batch-invariant", "--max-batch-tokens", "80", "--no-cache"],
        log=folder / "teacher.log",
    )
    yield process
    assert process.stop() == 0
    process.close()


def make_queries(count: int) -> list[ScoreQuery]:
    tokens = np.random.default_rng(1).integers(0, 90, (count, 40)).astype(np.int32)
    return [ScoreQuery(row, 1, top_k=8, f32=True) for row in tokens]


def has_same_logprobs(block: RowBlock, expected: object) -> bool:
    assert isinstance(expected, RowBlock)
    return block.head_logprobs.tobytes() == expected.head_logprobs.tobytes()


def test_after_a_push_every_row_is_of_the_new_weights(
    teacher: TeacherProcess, models: list[HfEngine]
) -> None:
    """Requests are in flight at every push."""
    sent_queries = make_queries(60)
    expected_blocks = [model.score(sent_queries) for model in models]
    tensors: list[Arrays] = [arrays(model) for model in models]
    with TeacherClient(teacher.address) as client:
        last_info = client.push_weights(tensors[0])
        first_version = last_info.version + 1
        for version in range(first_version, first_version + 4):
            answers = [client.submit(query) for query in sent_queries]
            answers[5].result(WAIT)
            was_done = [answer.done() for answer in answers]
            info = client.push_weights(tensors[(version - first_version + 1) % 2])
            assert info.version == version == client.info().version
            assert info.fingerprint == client.info().fingerprint != last_info.fingerprint
            last_info = info
            old_blocks, new_blocks = (
                expected_blocks[(version - first_version) % 2],
                expected_blocks[(version - first_version + 1) % 2],
            )
            for number, answer in enumerate(answers):
                block = answer.result(WAIT)
                is_new = has_same_logprobs(block, new_blocks[number])
                assert is_new or (was_done[number] or has_same_logprobs(block, old_blocks[number]))
            # Later queries and all queries that were unfinished when the push returned have new
            # rows.
            for number, answer in enumerate([client.submit(query) for query in sent_queries]):
                assert has_same_logprobs(answer.result(WAIT), new_blocks[number])


def test_rows_of_the_old_weights_never_come_after_a_push(
    teacher: TeacherProcess, models: list[HfEngine]
) -> None:
    sent_queries = make_queries(200)
    new_blocks = models[1].score(sent_queries)
    with TeacherClient(teacher.address) as client:
        client.push_weights(arrays(models[0]))
        answers = [client.submit(query) for query in sent_queries]
        answers[20].result(WAIT)
        client.push_weights(arrays(models[1]))
        unfinished = [number for number, answer in enumerate(answers) if not answer.done()]
        assert len(unfinished) > 20, "nothing was in flight"
        assert all(
            has_same_logprobs(answers[number].result(WAIT), new_blocks[number])
            for number in unfinished
        )


def test_another_client_is_told(teacher: TeacherProcess, models: list[HfEngine]) -> None:
    [query] = make_queries(1)
    with TeacherClient(teacher.address) as pusher, TeacherClient(teacher.address) as other_client:
        rows_before = other_client.submit(query).result(WAIT)
        version = other_client.info().version
        pusher.push_weights(arrays(models[1]))
        fault = other_client.submit(query).exception(WAIT)
        assert isinstance(fault, WrongState)
        assert f"version {version + 1}" in fault.message
        with pytest.raises(WrongState):
            other_client.push_weights(arrays(models[0]))
        # An average counts as an update after the last one of this client.
        pusher.push_weights(arrays(models[0]), tau=0.5)
        rows_after = pusher.submit(query).result(WAIT)
        assert not has_same_logprobs(rows_after, rows_before)
        assert pusher.info().version == version + 2
    with TeacherClient(teacher.address) as late_client:
        assert has_same_logprobs(late_client.submit(query).result(WAIT), rows_after)


def test_a_refused_push_reaches_its_caller_and_changes_nothing(
    teacher: TeacherProcess, models: list[HfEngine]
) -> None:
    [query] = make_queries(1)
    good_tensors = arrays(models[1])
    first_name = next(iter(good_tensors))
    float64_tensors = {**good_tensors, first_name: good_tensors[first_name].astype(np.float64)}
    incomplete_tensors = {name: good_tensors[name] for name in list(good_tensors)[1:]}
    nan_tensors = {**good_tensors, first_name: np.full_like(good_tensors[first_name], np.nan)}
    with TeacherClient(teacher.address) as client:
        rows_before, version = client.submit(query).result(WAIT), client.info().version
        for tensors in (float64_tensors, incomplete_tensors, nan_tensors):
            with pytest.raises(InvalidInput) as caught:
                client.push_weights(tensors)
            assert caught.value.field == first_name
        with pytest.raises(InvalidInput) as caught:
            client.push_weights(good_tensors, tau=1.5)
        assert caught.value.field == "tau"
        assert client.info().version == version
        assert has_same_logprobs(client.submit(query).result(WAIT), rows_before)


def test_a_push_that_is_cut_off_changes_nothing(
    teacher: TeacherProcess, models: list[HfEngine]
) -> None:
    """The pushing client dies half-way; the next push succeeds."""
    is_half_way = threading.Event()

    class Endless(dict[str, np.ndarray]):
        reads = 0

        def __getitem__(self, name: str) -> np.ndarray:
            self.reads += 1
            if self.reads > len(self) + 5:
                is_half_way.set()
                time.sleep(3)
            return super().__getitem__(name)

    pusher = TeacherClient(teacher.address)
    version = pusher.info().version
    faults: list[BaseException] = []

    def push_weights() -> None:
        try:
            pusher.push_weights(Endless(arrays(models[1])))
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=push_weights)
    thread.start()
    assert is_half_way.wait(WAIT)
    pusher._lanes[0]._channel.close()
    thread.join()
    pusher.close()
    assert len(faults) == 1
    with TeacherClient(teacher.address) as client:
        assert client.info().version == version
        assert client.push_weights(arrays(models[1])).version == version + 1
