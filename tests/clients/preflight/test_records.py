"""The estimate of the disk and memory that records take."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.config.sft import SFTJob
from clients.data.records import DataSet
from clients.preflight.records import estimate_records
from clients.store import record_cache
from clients.store.record_cache import open_records


def job_of(path: Path) -> SFTJob:
    tables = {"student": {"model": "s"}, "data": {"path": str(path)}, "method": {"type": "sft"}}
    return SFTJob.model_validate(tables)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_it_is_close_to_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(record_cache, "_CLOCK_SECONDS", -10.0)  # files hashed when just written
    records = [{"prompt": f"{n**9}?" * 9, "answer": str(n**3)} for n in range(2000, 4000)]
    text = json.dumps(records) if suffix == ".json" else "\n".join(map(json.dumps, records))
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(text.encode(), 1) if suffix.endswith(".gz") else text.encode())
    estimate = estimate_records(job_of(path))
    assert estimate is not None
    copy = open_records(DataSet(str(path)), ["prompt", "answer"])
    assert copy.directory is not None
    size = (copy.directory / "records.arrow").stat().st_size
    bound = 3.0 if suffix.endswith(".gz") else 1.1
    for estimated, exact in ((estimate.records, 2000), (estimate.copy_bytes, size)):
        assert exact / bound < estimated < exact * bound
    second = estimate_records(job_of(path))
    assert second is not None
    assert (second.copy_bytes, second.records) == (0, estimate.records)
    assert str(second).endswith(f"their copy in {record_cache.records_directory()} exists")


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1", "answer": "2"}\n' * 1000)
    estimate = estimate_records(job_of(path))
    assert estimate is not None
    assert "made once" in str(estimate)
    full = replace(estimate, free_bytes=1000)
    assert full.memory_bytes == estimate.memory_bytes + estimate.copy_bytes
    assert "does not fit (1e-06 GB free): free space" in str(full)


def test_what_is_not_here_is_not_estimated(tmp_path: Path) -> None:
    assert estimate_records(job_of(tmp_path / "none.jsonl")) is None
    assert estimate_records(job_of(Path("org/data"))) is None


def test_the_plan_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config = {"model_type": "qwen2", **sizes, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "d.jsonl").write_text('{"prompt": "1"}\n' * 500)
    job = tmp_path / "job.toml"
    job.write_text(
        "epochs = 2.0\ntrain.prompts_per_step = 8\n"
        f'student.model = "{tmp_path}"\ndata.path = "{tmp_path}/d.jsonl"\n'
    )
    assert main(["plan", str(job)]) == 0
    data_line, steps_line = capsys.readouterr().out.splitlines()[-2:]
    assert data_line.startswith("Data: about 5"), data_line
    assert main(["--json", "plan", str(job)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["data"]["copy"] > 0
    size = plan["data"]["records"]
    assert plan["steps"] == math.ceil(2 * size / 8)
    assert steps_line.startswith(f"Steps: about {plan['steps']} for 2 epochs of {size} records")
