"""A job from a machine that shares no files with the server: uploaded, trained, pulled."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import clients
from clients.jobs.client import DistillClient
from clients.runs.directory import RunDirectory
from protos.errors import InvalidInput
from tests import small_disk
from tests.documents import blocks
from tests.end_to_end.processes import ENVIRONMENT, MakeServer, RealServer, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

SOURCE = Path(clients.__file__).parent.parent


class EmptyMachine:
    """A mount namespace with its own disks: it and the server cannot see each other's files.

    The name of its directory exists on both.
    """

    def __init__(self, path: Path, server_runs: Path) -> None:
        if reason := small_disk.why_not():
            pytest.skip(reason)
        path.mkdir()
        self.path, self.runs = path, server_runs

    def run(self, *lines: str) -> str:
        """Run shell commands; what is on its disk is lost at the end. Returns stdout."""
        directory, runs = shlex.quote(str(self.path)), shlex.quote(str(self.runs))
        script = ["set -e", f"mount -t tmpfs tmpfs {directory}", f"mount -t tmpfs tmpfs {runs}"]
        script += [f"cd {directory}", *lines]
        process = subprocess.run(
            ["unshare", "--mount", "sh", "-c", "\n".join(script)],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, "HOME": str(self.path), "PYTHONPATH": str(SOURCE)},
            timeout=300,
        )
        assert process.returncode == 0, process.stderr
        assert not any(self.path.iterdir()), "its files are its own"
        return process.stdout


def as_toml(config: dict[str, Any]) -> str:
    """Return the text of a job file."""

    def format_value(setting: Any) -> str:
        if isinstance(setting, dict):
            return (
                "{"
                + ", ".join(f"{key} = {format_value(nested)}" for key, nested in setting.items())
                + "}"
            )
        return json.dumps(setting)

    return "".join(f"{key} = {format_value(setting)}\n" for key, setting in config.items())


@pytest.mark.slow
def test_nothing_is_shared(
    material: Material,
    teacher: str,
    make_server: MakeServer,
    undisturbed: RunDirectory,
    tmp_path: Path,
) -> None:
    """The result has the bits of a run on the machine that has the files."""
    from tests.student_trainer.tiny import job

    server = make_server()
    machine = EmptyMachine(tmp_path / "empty", server.runs)
    (document,) = blocks("docs/operations.md", "upload")
    config = job(material, teacher).model_dump(mode="json", exclude_none=True)
    config["student"]["model"] = "student"
    config["data"]["path"] = str(machine.path / "train.jsonl")
    distill = f"{sys.executable} -m clients --server {server.address}"
    output = machine.run(
        f"cp -r {material.student} student",
        f"cp {material.prompts} train.jsonl",
        f"cat > job.toml <<'END'\n{as_toml(config)}END",
        # Without its files, the job cannot be queued.
        f"! {distill} submit job.toml 2> refused",
        "grep -q 'distill submit --upload' refused",
        f'test -z "$({distill} ls)"',
        "exec 3>&1 > /dev/null",
        *(line.replace(".venv/bin/distill", distill) for line in document.commands),
        "exec >&3",
        "sha256sum trained/model.safetensors",
        # Unchanged files are not sent again.
        f"{distill} submit job.toml --upload --set student.model=trained 2> told",
        "grep 'the server has' told",
    )
    assert output.split()[0] == weights(undisturbed)
    assert "data.path: the server has its" in output
    runs = [RunDirectory(path.parent) for path in server.runs.glob("*/job.json")]
    for run in runs:
        job_config = run.config()
        assert Path(job_config.student.model).is_relative_to(server.runs / ".uploads")
    shutil.rmtree(tmp_path / "empty")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings of moto
def test_files_in_an_object_storage(
    material: Material,
    teacher: str,
    undisturbed: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs that read from an object storage have the same bits; a missing file is reported."""
    from tests.student_trainer.tiny import job

    storage = pytest.importorskip("tests.object_storage")
    s3 = storage.S3Server()
    for file in material.student.iterdir():
        s3.write(f"models/student/{file.name}", file.read_bytes())
    s3.write("models/student/pytorch_model.bin", b"is not read")
    s3.write("data/train.jsonl", material.prompts.read_bytes())
    keys = tmp_path / "credentials"
    keys.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    variables = {
        "AWS_ENDPOINT_URL": s3.address,
        "AWS_SHARED_CREDENTIALS_FILE": str(keys),
        "AWS_EC2_METADATA_DISABLED": "true",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in variables.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    config = job(
        material,
        teacher,
        student__model=f"s3://{storage.BUCKET}/models/student",
        data__path=f"s3://{storage.BUCKET}/data/train.jsonl",
    )
    server = RealServer(tmp_path / "runs")
    server.start()
    try:
        with DistillClient(server.address) as client:
            assert client.submit(config).wait(200).reason == ""
            (path,) = (run.parent for run in server.runs.glob("*/job.json"))
            assert weights(RunDirectory(path)) == weights(undisturbed)
            copies = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
            assert "pytorch_model.bin" not in [path.name for path in copies]
            # Each attempt locks the cache, and reserves the space of the states of the records.
            copies = [p for p in copies if p.name != "lock" and not p.match("states-*")]
            times = {path: path.stat().st_mtime_ns for path in copies}
            assert client.submit(config).wait(200).reason == ""
            changed = {path.name for path, time in times.items() if path.stat().st_mtime_ns != time}
            assert changed == set()
            config_of_missing_file = config.model_copy(
                update={"data": config.data.model_copy(update={"path": "s3://rows/no.jsonl"})}
            )
            ended_job = client.submit(config_of_missing_file).wait(100)
            assert (
                ended_job.reason
                == "data.path: there is no file at s3://rows/no.jsonl; correct the URL"
            )
            config_of_wrong_url = config.model_copy(
                update={"data": config.data.model_copy(update={"path": "s3://rows"})}
            )
            with pytest.raises(InvalidInput, match="the URL is not s3://BUCKET/PREFIX"):
                client.submit(config_of_wrong_url)
    finally:
        server.clean_up()
        s3.stop()
