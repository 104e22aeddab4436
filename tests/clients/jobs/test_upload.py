"""Which files of this machine a job names, and what of them cannot be sent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clients.config.kinds import AnyJob, parse_job
from clients.jobs.upload import local_files, paths_of_server
from protos.errors import InvalidInput


def job(**values: Any) -> AnyJob:
    common = {"student": {"model": "Qwen/Qwen3-0.6B"}, "data": {"path": "openai/gsm8k"}}
    return parse_job(json.dumps({**common, **values}))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}\n")
    return path


def sent(config: AnyJob) -> dict[str, list[str]]:
    return {local.key: list(local.files) for local in local_files(config)}


def test_what_exists_here_is_sent_and_nothing_else(here: Path) -> None:
    made(here, "train.jsonl", "student/config.json", "student/model.safetensors")
    config = job(
        student={"model": "student"},
        data={"path": "train.jsonl", "eval_path": "/srv/of/the/server.jsonl"},
    )
    files = local_files(config)
    assert sent(config) == {
        "student.model": ["student/config.json", "student/model.safetensors"],
        "data.path": ["train.jsonl"],
    }
    assert files[0].place == here / "student"
    assert files[0].files["student/config.json"] == here / "student" / "config.json"
    assert sent(job()) == {}, "hub ids"
    mixed = {"path": "openai/gsm8k", "mix": [{"path": "./train.jsonl", "share": 0.5}]}
    assert sent(job(data=mixed)) == {"data.mix.0.path": ["train.jsonl"]}


def test_of_a_model_what_programs_read(here: Path) -> None:
    kept = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors"]
    left = ["pytorch_model.bin", "optimizer.pt", ".git/config", "checkpoint-5/config.json"]
    anchor = ["anchor/config.json", "anchor/model.safetensors"]
    made(here / "student", *kept, *left, *anchor, "code.py", ".hidden.json", "anchor/optimizer.pt")
    found = sent(job(student={"model": "student"}))["student.model"]
    assert found == [f"student/{name}" for name in (*kept, *anchor)]


def test_a_device_is_not_sent(here: Path) -> None:
    with pytest.raises(InvalidInput, match="neither a regular file nor a directory") as caught:
        sent(job(data={"path": "/dev/zero"}))
    assert caught.value.field == "data.path"


def test_a_model_of_links_as_in_the_cache_of_the_hub(here: Path) -> None:
    made(here / "blobs", "1", "2")
    (here / "snapshot").mkdir()
    (here / "snapshot" / "config.json").symlink_to("../blobs/1")
    (here / "snapshot" / "model.safetensors").symlink_to("../blobs/2")
    (here / "named").symlink_to("snapshot")
    found = sent(job(student={"model": "named"}))["student.model"]
    assert found == ["named/config.json", "named/model.safetensors"]


def test_a_data_set_directory_with_all_below_it(here: Path) -> None:
    made(here / "saved", "state.json", "data/0.arrow", ".cache/x")
    found = ["saved/data/0.arrow", "saved/state.json"]
    assert sent(job(data={"path": "saved"})) == {"data.path": found}


def refused(config: AnyJob) -> str:
    with pytest.raises(InvalidInput) as caught:
        local_files(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_sent_is_told_in_one_sentence(here: Path) -> None:
    folder = made(here / "saved", "state.json")
    os.mkfifo(folder / "pipe")
    config = job(data={"path": "saved"})
    assert refused(config).startswith(f"data.path: {folder}/pipe is no regular file")
    (folder / "pipe").unlink()
    (folder / "link").symlink_to(here)
    assert refused(config).startswith(f"data.path: {folder}/link is no regular file")
    (folder / "link").unlink()
    made(folder, "a\nb")
    assert "cannot be sent under this name; rename it" in refused(config)
    (folder / "a\nb").unlink()
    (folder / os.fsdecode(b"\xff")).write_text("")
    assert "cannot be sent under this name" in refused(config)
    (here / "empty").mkdir()
    assert refused(job(student={"model": "empty"})).startswith("student.model: ")
    made(here, "reward.py")
    rewarded = {
        "method": {"type": "rl"},
        "reward": {"type": "python", "file": "reward.py"},
    }
    assert refused(job(**rewarded)).startswith("reward.file: is not sent: a server runs no code")


def test_too_many_files(here: Path) -> None:
    made(here / "saved", *(f"{n}" for n in range(10_001)))
    assert "has 10001 files; at most 10000 are sent" in refused(job(data={"path": "saved"}))


def test_images_by_path_are_refused_and_bytes_are_sent(here: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    data = {"image_column": "image", "path": "train.jsonl"}
    (here / "train.jsonl").write_text('{"prompt": "a", "image": "cat.png"}\n')
    assert refused(job(data=data)).startswith("data.path: the records of train.jsonl name images")
    table = pa.table({"prompt": ["a"], "image": [b"\x89PNG"]})
    pyarrow.parquet.write_table(table, here / "train.parquet")
    assert sent(job(data={**data, "path": "train.parquet"})) == {"data.path": ["train.parquet"]}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trian.jsonl", "did you mean train.jsonl?"),
        ("data/trian", "did you mean data/train?"),
        ("./nothing", "a path of the server is absolute"),
        ("~/train.jsonl", "a path of the server is absolute"),
    ],
)
def test_a_relative_path_that_is_not_here_is_a_typo(here: Path, name: str, hint: str) -> None:
    made(here, "train.jsonl", "data/train/dataset_info.json")
    with pytest.raises(InvalidInput, match="does not exist on this machine") as caught:
        sent(job(data={"path": name}))
    assert (caught.value.field, caught.value.hint) == ("data.path", hint)


def test_an_absolute_path_that_is_not_here_may_be_of_the_server(here: Path) -> None:
    made(here, "train.jsonl")
    config = job(data={"path": f"{here}/trian.jsonl", "eval_path": "/srv/eval.jsonl"})
    assert sent(config) == {}
    assert paths_of_server(config) == [
        ("data.path", f"{here}/trian.jsonl", f"{here}/train.jsonl"),
        ("data.eval_path", "/srv/eval.jsonl", ""),
    ]
