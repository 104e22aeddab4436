"""Models at URLs: a job gets every file that programs read, also those of subdirectories."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.store.copies import files_on_disk
from tests.student_trainer import tiny


def test_additional_chat_templates_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = pytest.importorskip("tests.object_storage")
    s3 = storage.S3Server()
    try:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        names = ["config.json", "additional_chat_templates/tool_use.jinja"]
        for name in (*names, "checkpoint-5/config.json", "optimizer.pt"):
            s3.write(f"models/student/{name}", name.encode())
        job: OnPolicyJob = tiny.job(
            tiny.Material.at(tmp_path), student__model=f"s3://{storage.BUCKET}/models/student"
        )
        directory = Path(files_on_disk(job).student.model)
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert {str(path.relative_to(directory)): path.read_text() for path in files} == {
            name: name for name in names
        }
        assert (tmp_path / "distill").stat().st_mode & 0o777 == 0o700
    finally:
        s3.stop()
