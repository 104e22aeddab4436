"""A teacher dies in the middle of its answers, and is restarted or not."""

from __future__ import annotations

import random
import signal
import time

import pytest

from clients.teacher.client import TeacherClient
from protos.errors import Unavailable
from tests.faults.conftest import REPEATS
from tests.faults.history import History, record
from tests.faults.sequences import WAIT, assert_equal, expected, fake, sequences
from tests.teacher_service.conftest import StartTeacher


@pytest.mark.timeout(60 + 15 * REPEATS)
def test_killed_in_its_answers_and_started_again(
    start_teacher: StartTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is missing, nothing comes twice, and the first row comes soon after the restart.

    Every other time a failpoint kills it between two messages of one sequence; else it is killed
    after a number of answers.
    """
    queries = sequences(4, 10_000) + sequences(102, 100, seed=1)
    rows = expected(queries)
    random_ = random.Random(0)
    teacher = start_teacher(*fake())
    positions = resumed = 0
    waits = []
    for repeat in range(REPEATS):
        history = record(monkeypatch)
        failpoint = f"chunk-sent:kill:{random_.randint(2, 15)}" if repeat % 2 else ""
        if failpoint:
            teacher.kill()
            teacher = start_teacher(*fake(), port=teacher.port, failpoint=failpoint)
        with TeacherClient(teacher.address) as client:
            answers = [client.submit(query) for query in queries]
            if not failpoint:  # killed in the callback, before the client reads on
                answer = answers[random_.randrange(len(queries) // 2)]
                answer.add_done_callback(lambda _, dying=teacher: dying.send(signal.SIGKILL))
            teacher.process.wait(WAIT)
            assert not all(answer.done() for answer in answers), "it was killed too late"
            teacher = start_teacher(*fake(), port=teacher.port)
            ready = time.monotonic()
            assert_equal(answers, rows)
        positions += history.check(queries)
        resumed += history.count_resumed()
        waits.append(history.wait_for_row(after=ready) - ready)
        monkeypatch.undo()
    assert positions == REPEATS * sum(query.rows for query in queries)
    assert positions >= 50_000 * REPEATS
    assert resumed, "no sequence was ever cut in two"
    assert max(waits) < 5
    print(
        f"{REPEATS} kills: {positions} positions, 0 missing, 0 twice, {resumed} sequences resumed;"
        f" first row {max(waits):.2f} s after ready at most"
    )


def test_down_for_a_while(start_teacher: StartTeacher, history: History) -> None:
    """The client sends nothing to a teacher that is down, and hardly anything twice."""
    queries = sequences(600, 200, top_k=4)
    arguments = [*fake(latency_ms=2), "--max-batch-tokens", "800"]
    teacher = start_teacher(*arguments)
    with TeacherClient(teacher.address, max_in_flight=32) as client:
        answers = [client.submit(query) for query in queries]
        answers[200].result(WAIT)
        teacher.kill()
        time.sleep(5)
        teacher = start_teacher(*arguments, port=teacher.port)
        assert_equal(answers, expected(queries))
    history.check(queries)
    assert history.amplification(queries) <= 1.1
    print(f"rows asked for over rows wanted: {history.amplification(queries):.3f}")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_down_for_good(start_teacher: StartTeacher, signum: signal.Signals) -> None:
    """The client gives up within 10% of its patience, whether the teacher is dead or frozen."""
    patience = 4.0
    teacher = start_teacher(*fake(latency_ms=50), "--max-batch-tokens", "400")
    with TeacherClient(teacher.address, patience_seconds=patience) as client:
        answers = [client.submit(query) for query in sequences(30, 200)]
        answers[0].result(WAIT)
        teacher.send(signum)
        stop_time = time.monotonic()
        fault = answers[-1].exception(WAIT)
        waited = time.monotonic() - stop_time
    assert isinstance(fault, Unavailable)
    assert 0.9 * patience <= waited <= 1.1 * patience
    assert all(answer.done() for answer in answers)
    print(f"{signum.name}: given up after {waited:.2f} s of {patience} s")


@pytest.mark.timeout(60 + 5 * REPEATS)
def test_another_takes_over_at_once(start_teacher: StartTeacher, history: History) -> None:
    """One of two teachers is killed repeatedly: no query waits for it, and nothing is lost."""
    queries = sequences(40, 500, top_k=8)
    rows = expected(queries)
    arguments = [*fake(latency_ms=10), "--max-batch-tokens", "2000"]
    teachers = [start_teacher(*arguments) for _ in range(2)]
    random_ = random.Random(0)
    pauses = []
    with TeacherClient([t.address for t in teachers], max_in_flight=8) as client:
        for repeat in range(REPEATS):
            history.forget()
            answers = [client.submit(query) for query in queries]
            answers[random_.randrange(15)].result(WAIT)
            teachers[repeat % 2].kill()
            kill_time = time.monotonic()
            pauses.append(history.wait_for_row(after=kill_time) - kill_time)
            assert_equal(answers, rows)
            history.check(queries)
            port = teachers[repeat % 2].port
            teachers[repeat % 2] = start_teacher(*arguments, port=port)
    assert max(pauses) < 3  # milliseconds, unless the machine is very busy
    print(f"{REPEATS} kills of one of two: next row {max(pauses) * 1e3:.0f} ms later at most")
