"""Groups of processes that cannot share the student are refused, with key and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clients.cli.app import main
from clients.config.file import load_job
from clients.config.tables.job import TrainingJob
from clients.preflight.parallel import check_tensor_parallel
from protos.errors import InvalidInput
from tests.clients.plan.test_memory import QWEN_7B  # 28 heads of queries, 4 of keys

GROUPS = ["processes = 8", 'sharding = "fsdp2"']


def job_file(tmp_path: Path, *lines: str, **sizes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | sizes))
    train = "\n".join(["[train]", *lines])
    path = tmp_path / "job.toml"
    path.write_text(f'student.model = "{tmp_path}"\ndata.path = "p.jsonl"\n{train}\n')
    return path


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([*GROUPS, "tensor_parallel = 3"], "train.tensor_parallel: must divide train.processes"),
        (["tensor_parallel = 2"], "train.tensor_parallel: must divide train.processes, which is 1"),
        ([GROUPS[0], "tensor_parallel = 2"], "train.tensor_parallel: needs sharding = 'fsdp2'"),
        ([*GROUPS, "tensor_parallel = 0"], "train.tensor_parallel: "),
        ([*GROUPS, "tensor_paralel = 2"], "did you mean 'tensor_parallel'?"),
        (
            [*GROUPS, "tensor_parallel = 2", "[student.lora]"],
            "train.tensor_parallel: cannot divide adapters",
        ),
    ],
)
def test_the_job_file_is_refused(lines: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_job(job_file(tmp_path, *lines))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("size", "sizes", "sentence"),
    [
        (8, {}, "8 processes cannot share the 28 heads of queries of the student evenly"),
        (8, {"num_attention_heads": 32}, "the 4 heads of keys and values"),
        (4, {"intermediate_size": 18942}, "the 18942 units of the MLP"),
        (8, {"text_config": {"num_attention_heads": 12}}, "the 12 heads of queries"),
    ],
)
def test_a_local_student_is_refused(
    size: int, sizes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    job = load_job(job_file(tmp_path, *GROUPS, f"tensor_parallel = {size}", **sizes)).config
    assert isinstance(job, TrainingJob)
    with pytest.raises(InvalidInput) as caught:
        check_tensor_parallel(job)
    assert sentence in str(caught.value)
    assert caught.value.field == "train.tensor_parallel"
    assert caught.value.hint == (
        "lower the value to 2" if "units" in sentence else "lower the value to 4"
    )


def test_groups_that_share_evenly(tmp_path: Path) -> None:
    for size in (1, 2, 4):
        job = load_job(job_file(tmp_path, *GROUPS, f"tensor_parallel = {size}")).config
        assert isinstance(job, TrainingJob)
        check_tensor_parallel(job)


def test_the_plan_knows_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The matrices of the layers are divided by 8, all other weights by 4."""
    file = str(job_file(tmp_path, *GROUPS, "tensor_parallel = 2"))
    assert main(["--json", "plan", file]) == 0
    weights = json.loads(capsys.readouterr().out)["bytes"]["learning"]["weights"]
    attention, mlp = 2 * 3584 * 3584 + 2 * 3584 * 512, 3 * 3584 * 18944
    biases = 3584 + 2 * 512
    divided_weights = 28 * (attention + mlp + biases)
    other_weights = 28 * 2 * 3584 + 3584 + 2 * 152064 * 3584
    assert weights == 4 * (divided_weights // 2 + other_weights) // 4
    assert main(["plan", file, "--gpus", "8"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.startswith(
        "7.62 billion weights, 7.62 billion trained, on 8 GPUs, FSDP2 with tensor parallelism in"
        " groups of 2;"
    )
    assert main(["plan", file, "--set", "train.tensor_parallel=8"]) == 2
    assert "train.tensor_parallel: 8 processes cannot share" in capsys.readouterr().err
