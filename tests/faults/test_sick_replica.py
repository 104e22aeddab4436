"""A replica that fails every batch: clients use other replicas, and its process exits."""

from __future__ import annotations

import re

import pytest

from clients.teacher.client import TeacherClient
from protos.errors import InternalFault, Unavailable
from tests.faults.sequences import VOCAB, WAIT, assert_equal, expected, fake, sequences
from tests.teacher_service.conftest import StartTeacher

SELF_TEST = 3  # batches


def test_a_thousand_queries_beside_a_replica_that_raises(start_teacher: StartTeacher) -> None:
    healthy, sick = start_teacher(*fake()), start_teacher(*fake(raise_after=SELF_TEST))
    queries = sequences(1000, 20, top_k=4)
    with TeacherClient([sick.address, healthy.address]) as client:
        answers = [client.submit(query) for query in queries]
        failed = sum(answer.exception(WAIT) is not None for answer in answers)
        assert failed == 0
        assert_equal(answers, expected(queries))
        assert sick.process.wait(WAIT) == 1
    log = sick.log.read_text()
    batches = len(re.findall(r"a batch of \d+ failed", log))
    print(f"{failed} of {len(queries)} failed; the sick replica ended after {batches} batches")
    assert batches == 3
    assert log.count("the engine failed 3 times in a row") == 1


def test_a_replica_falls_sick_in_the_middle(start_teacher: StartTeacher) -> None:
    healthy, sick = start_teacher(*fake()), start_teacher(*fake(raise_after=SELF_TEST + 2))
    queries = sequences(300, 20, top_k=4)
    with TeacherClient([sick.address, healthy.address], max_in_flight=8) as client:
        answers = [client.submit(query) for query in queries]
        assert_equal(answers, expected(queries))
        assert sick.process.wait(WAIT) == 1


def test_the_only_teacher_is_sick(start_teacher: StartTeacher) -> None:
    """The client waits as for any teacher that ended, and continues with the next one."""
    sick = start_teacher(*fake(raise_after=SELF_TEST))
    [query] = queries = sequences(1, 20, top_k=4)
    with TeacherClient(sick.address) as client:
        answer = client.submit(query)
        assert sick.process.wait(WAIT) == 1
        assert not answer.done()
        start_teacher(*fake(), port=sick.port)
        assert_equal([answer], expected(queries))
    with TeacherClient("127.0.0.1:1", patience_seconds=1) as client, pytest.raises(Unavailable):
        client.submit(query).result(WAIT)


def test_a_query_that_kills_its_batches_fails_and_the_teacher_stays(
    start_teacher: StartTeacher,
) -> None:
    teacher = start_teacher(*fake(crash_token=VOCAB - 1))
    good, bad = sequences(2, 20, top_k=4)
    good.token_ids[:] %= VOCAB - 1
    bad.token_ids[3] = VOCAB - 1
    with TeacherClient(teacher.address) as client:
        for _ in range(3):
            assert isinstance(client.submit(bad).exception(WAIT), InternalFault)
        assert_equal([client.submit(good)], expected([good]))
    assert teacher.process.poll() is None
