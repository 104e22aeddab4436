"""The repr of a job: the keys that are set, and no defaults."""

from __future__ import annotations

from clients.config.kinds import parse_job
from clients.config.on_policy import OnPolicyJob

JOB = {
    "student": {"model": "org/model", "lora": {"rank": 8}},
    "teacher": {"address": "host:1"},
    "data": {"path": "a.jsonl"},
    "max_steps": 7,
}


def test_a_repr_has_the_keys_that_are_set() -> None:
    job = OnPolicyJob.model_validate(JOB)
    assert repr(job) == (
        "OnPolicyJob(student=StudentConfig(model='org/model', lora=LoraConfig(rank=8)),"
        " max_steps=7, data=DataConfig(path='a.jsonl'), teacher=OnPolicyTeacher(address='host:1'))"
    )
    # A run directory stores all keys; the defaults among them are no news.
    assert repr(parse_job(job.model_dump_json())) == repr(job)
