"""A job that names an adapter of its teacher, before it is queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.jobs.job import JobState
from protos.errors import WrongState
from tests.distill_server.jobs.preflight_site import Teacher, checking_site, job, serve_teacher


def test_an_adapter_that_the_teacher_has(tmp_path: Path) -> None:
    with serve_teacher(Teacher()) as address, checking_site(tmp_path) as server:
        assert server.submit(job(tmp_path, address, teacher__adapter="math")) is JobState.QUEUED


def test_an_adapter_that_it_does_not_have(tmp_path: Path) -> None:
    """Also after a job with an existing adapter: the check is made for each adapter."""
    with serve_teacher(Teacher()) as address, checking_site(tmp_path) as server:
        server.submit(job(tmp_path, address, teacher__adapter="math"))
        with pytest.raises(WrongState) as exc_info:
            server.submit(job(tmp_path, address, teacher__adapter="code"))
    assert exc_info.value.field == "teacher.adapter"
    assert exc_info.value.message.endswith("has no adapter 'code'; its adapters are math")
    hint = "start the teacher with --adapter code=DIR, or choose an adapter of the teacher"
    assert exc_info.value.hint == hint
