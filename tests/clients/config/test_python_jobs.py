"""Jobs that are written in Python: the errors of a job file, and sweeps."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clients
from clients import DataConfig, OnPolicyConfig, OnPolicyJob, StudentConfig, TrainConfig
from clients.config.file import JobSource, load_job, load_jobs, sweep_job
from clients.config.kinds import kind_of
from protos.errors import DistillError, InvalidInput

HEAD = 'student.model = "m"\ndata.path = "d.jsonl"\n'
WRONG = [
    "max_step = 3",
    "max_steps = 0",
    'max_steps = "3"',
    "max_steps = true",
    "lr = 1e-5",
    "train.lr = 1e-5",
    "train.learning_rat = 1e-5",
    "train.learning_rate = nan",
    "train.learning_rate = -1.0",
    "train.processes = 3\ntrain.tensor_parallel = 2",
    "train = 3",
    "student.revison = 'x'",
    "student.lora = true",
    "student.lora.rank = 0",
    "teacher.top_k = 0\nteacher.topk = 5",
    "teacher.address = []",
    "teacher.model = 't'\nteacher.address = 'h:1'",
    "teacher.engine = 'vllm'\nteacher.device = 'cpu'",
    "method.type = 'on-policy'",
    "method.type = 'sft'\nteacher.address = 'h:1'",
    "method.type = 'rl'",
    "method.type = 'rl'\nreward.type = 'regex'",
    "method.type = 'rl'\nreward.type = 'exact_match'\nreward.length.max_tokens = 5",
    "method.type = 'eval'\nmax_steps = 5",
    "method.type = 'capture'\nstudent.model = 'm'",
    "method.divergence = 'kl'\nmethod.temperature = 0.0",
    "data.colum = 'x'",
    "data.mix = 3",
    "data.mix = [{ path = 'a.jsonl', weigth = 2.0 }]",
    "data.eval_path = 'http://host/d.jsonl'",
    "eval.metric = 'exact'\ncheckpoint.keep = 1\nexport.dtype = 'int8'",
    "distill.x = 1",
    "epochs = 2.0\nmax_steps = 5",
    "labels = { day = 2026-01-01, n = 3 }",
    "after = [1]",
    "sweep = { seed = [] }",
    "sweep = [{ seed = 1, 'labels.a' = 'x' }, {}]",
]


def message_of(source: Path | JobSource) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_jobs(source)
    return str(caught.value)


@pytest.mark.parametrize("lines", WRONG, ids=[*map(str, range(len(WRONG)))])
def test_the_message_is_that_of_a_file(lines: str, tmp_path: Path) -> None:
    text = HEAD + lines if "student.model" not in lines else lines
    file = tmp_path / "job.toml"
    file.write_text(text)
    expected = re.sub(rf"{re.escape(str(file))}(:\d+)?: ", "", message_of(file))
    values = tomllib.loads(text)
    assert message_of(values) == expected
    if not re.search("(?m)^(sweep|data.eval_path)", lines):  # reads of a whole file
        with pytest.raises(InvalidInput) as caught:
            kind_of(values)(**values)
        assert str(caught.value) == expected
    if set(values) - {"student", "data"} == {"train"} and isinstance(values["train"], dict):
        with pytest.raises(InvalidInput) as caught:
            TrainConfig(**values["train"])
        assert str(caught.value) == expected


def test_a_class_gives_the_job_of_a_dict(tmp_path: Path) -> None:
    job = OnPolicyJob(
        student=StudentConfig(model="m"),
        data=DataConfig(path="d.jsonl"),
        method=OnPolicyConfig(temperature=1),
        labels={"team": "math"},
    )
    values: dict[str, Any] = {
        "student": {"model": Path("m")},
        "data": {"path": Path("d.jsonl")},
        "method": {"temperature": np.float32(1)},
        "labels": {"team": "math"},
        "max_steps": np.int64(500),
    }
    assert load_job(values).config == job == load_job(job).config
    # The keys that are computed from models and data stay open.
    assert load_job(job).config.model_dump_json() == job.model_dump_json()
    assert "max_new_tokens" not in job.model_dump_json()
    assert load_job({**values, "labels": {"day": date(2026, 1, 2)}}).config.labels == {
        "day": "2026-01-02"
    }
    with pytest.raises(InvalidInput, match=r"^student.model: must be text, .* of the class object"):
        load_job({"student": {"model": object()}})
    with pytest.raises(InvalidInput, match=r"a job is a path, a dict .* of the class int"):
        load_job(3)  # type: ignore[arg-type]
    nested: dict[str, Any] = {}
    nested["train"] = nested
    with pytest.raises(InvalidInput, match="nested too deeply"):
        load_job(nested)


def test_dotted_keys_of_a_dict() -> None:
    wrong = {**tomllib.loads(HEAD), "train.learning_rate": 1e-5, "student.lora.rank": 8}
    with pytest.raises(InvalidInput) as caught:
        load_job(wrong)
    assert str(caught.value) == (
        "2 problems\n"
        "  train.learning_rate: unknown key; write it as a nested table:"
        ' "train": {"learning_rate": ...}\n'
        "  student.lora.rank: unknown key; write it as a nested table:"
        ' "student": {"lora": {"rank": ...}}'
    )


def test_a_table_alone_names_the_keys_of_a_job() -> None:
    for make, message in (
        (lambda: StudentConfig(), "student.model: missing; "),  # type: ignore[call-arg]
        (lambda: clients.LoraConfig(rang=3), "student.lora.rang: unknown key; did you mean 'rank'"),  # type: ignore[call-arg]
        (lambda: clients.TrackerConfig(projekt="x"), "projekt: unknown key; did you mean 'pro"),  # type: ignore[call-arg]
        (lambda: clients.MixConfig(path=3), "2 problems\n  path: must be a valid string"),  # type: ignore
    ):
        with pytest.raises(DistillError) as caught:
            make()
        assert str(caught.value).startswith(message)


def test_a_changed_copy_is_checked_when_it_is_used() -> None:
    job = OnPolicyJob(student=StudentConfig(model="m"), data=DataConfig(path="d.jsonl"))
    wrong = job.model_copy(
        update={
            "max_step": 3,
            "train": job.train.model_copy(update={"learning_rate": "fast"}),
            "eval": {"every": 0},
        }
    )
    assert message_of(wrong) == (
        "3 problems\n"
        "  train.learning_rate: must be a valid number (got 'fast')\n"
        "  eval.every: must be greater than or equal to 1 (got 0)\n"
        "  max_step: unknown key; did you mean 'max_steps'?"
    )
    assert load_job(job.model_copy(update={"max_steps": 7})).config.max_steps == 7


def test_a_sweep_is_a_base_and_changes(tmp_path: Path) -> None:
    base = OnPolicyJob(
        name="s", student=StudentConfig(model="m"), data=DataConfig(path="d.jsonl"), seed=5
    )
    changes = [
        {"train.learning_rate": rate, "method": {"temperature": temperature}}
        for rate, temperature in ((1e-5, 1.0), (3e-5, 0.5))
    ]
    jobs = [file.config for file in sweep_job(base, changes)]
    assert [job.name for job in jobs] == [
        "s-learning_rate=1e-05-temperature=1.0",
        "s-learning_rate=3e-05-temperature=0.5",
    ]
    assert jobs[1].labels == {
        "sweep": "s", "train.learning_rate": "3e-05", "method.temperature": "0.5"
    }  # fmt: skip
    assert [job.method.temperature for job in jobs if isinstance(job, OnPolicyJob)] == [1.0, 0.5]
    assert {job.seed for job in jobs} == {5}
    # The same of a file, and the combinations of lists.
    file = tmp_path / "job.toml"
    file.write_text(
        f'{HEAD}name = "s"\nseed = 5\n[[sweep]]\ntrain.learning_rate = 1e-5\n'
        "method.temperature = 1.0\n[[sweep]]\ntrain.learning_rate = 3e-5\n"
        "method.temperature = 0.5\n"
    )
    assert [read.config for read in load_jobs(file)] == jobs
    lists = {"train.learning_rate": [1e-5, 3e-5], "method.temperature": [1.0, 0.5]}
    product = [read.config for read in load_jobs({**tomllib.loads(HEAD), "sweep": lists})]
    assert len(product) == 4
    # A dict may lack a key that all changes have; an empty table turns its feature on.
    [lora] = sweep_job({"data": {"path": "d"}}, [{"student.model": "m", "student.lora": {}}])
    assert isinstance(lora.config, OnPolicyJob)
    assert lora.config.student.lora == clients.LoraConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "sweep: must be a table of keys with lists of values"),
        ([{}], "sweep.0: must be a table of keys and values, such as { seed = 2 }"),
        ([{"seed": 1, "train": {}, "train.warmup_steps": 3}], "sweep.train.warmup_steps: train "),
        ([{"name": "x"}], "sweep.name: the sweep sets the names and labels"),
        ([{"seed": 1}, {"seed": 1}], "name: another job of the file is 'distill-seed=1'"),
        ([{"sede": 1}], "sede: unknown key; did you mean 'seed'?"),
        ([{"seed": n} for n in range(101)], "sweep: has 101 combinations; a sweep has at most 100"),
    ],
)
def test_wrong_changes(changes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        sweep_job(tomllib.loads(HEAD), changes)
    assert str(caught.value).startswith(message)
