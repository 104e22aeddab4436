"""A reward function is code: found next to the job file, run locally, refused by servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.config.file import load_job
from clients.config.rl import RLJob
from clients.local.directory import with_absolute_reward
from distill_server.jobs.job_file import parse_config
from protos.errors import InvalidInput

JOB = """
student.model = "tiny"
data.path = "train.jsonl"
method.type = "rl"
reward = { type = "python", file = "mine/reward.py" }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_server_refuses_it(job: Path) -> None:
    document = load_job(job).config.model_dump_json()
    with pytest.raises(
        InvalidInput,
        match=r"^reward.file: a server does not run the code of a"
        " job",
    ):
        parse_config(document)


def test_it_is_found_beside_the_job_file(job: Path) -> None:
    (job.parent / "mine").mkdir()
    (job.parent / "mine" / "reward.py").touch()
    config = with_absolute_reward(job, load_job(job).config)
    assert isinstance(config, RLJob)
    assert config.reward is not None
    assert config.reward.file == str(job.parent / "mine" / "reward.py")


def test_it_must_be_there(job: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^reward.file: no such file: .*mine/reward.py; "):
        with_absolute_reward(job, load_job(job).config)
