"""Which folders of tests a change touches: `make test-touched`."""

from __future__ import annotations

import pytest

from tests.touched import touched_folders


@pytest.mark.parametrize(
    ("changed", "folders"),
    [
        (["student_trainer/losses/topk.py"], ["tests/student_trainer/losses"]),
        (["teacher_service/program.py"], ["tests/teacher_service"]),
        (["tests/faults/proxy.py", "docs/faults.md", "README.md"], ["tests/faults"]),
        (["clients/data/records.py", "clients/__init__.py"], ["tests/clients"]),
        (["protos/teacher.proto", "benchmarks/results/loss.json"], ["tests/protos"]),
        (["distill_server/dashboard/static/app.js"], ["tests/distill_server/dashboard"]),
        (["tests/conftest.py", "clients/data/records.py"], ["tests"]),
        (["docs/your-data.md"], ["tests/end_to_end/test_walk_through.py"]),
        (["Makefile", "mkdocs.yml", "docs/jobs.md"], []),
    ],
)
def test_touched_folders(changed: list[str], folders: list[str]) -> None:
    assert touched_folders(changed) == folders
