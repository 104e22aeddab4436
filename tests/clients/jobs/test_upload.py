"""Which local files a job uploads, and which files cannot be uploaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clients.config.kinds import AnyJob, parse_job
from clients.jobs.upload import local_files, paths_of_server
from clients.store.manifest import Manifest, write_manifest
from protos.errors import InvalidInput


def make_job(**values: Any) -> AnyJob:
    common = {"student": {"model": "Qwen/Qwen3-0.6B"}, "data": {"path": "openai/gsm8k"}}
    return parse_job(json.dumps({**common, **values}))


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_files(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}\n")
    return path


def files_by_key(config: AnyJob) -> dict[str, list[str]]:
    return {local.key: list(local.files) for local in local_files(config)}


def test_what_exists_here_is_sent_and_nothing_else(working_directory: Path) -> None:
    write_files(
        working_directory, "train.jsonl", "student/config.json", "student/model.safetensors"
    )
    config = make_job(
        student={"model": "student"},
        data={"path": "train.jsonl", "eval_path": "/srv/of/the/server.jsonl"},
    )
    files = local_files(config)
    assert files_by_key(config) == {
        "student.model": ["student/config.json", "student/model.safetensors"],
        "data.path": ["train.jsonl"],
    }
    assert files[0].place == working_directory / "student"
    assert files[0].files["student/config.json"] == working_directory / "student" / "config.json"
    assert files_by_key(make_job()) == {}, "hub ids"
    mixed = {"path": "openai/gsm8k", "mix": [{"path": "./train.jsonl", "share": 0.5}]}
    assert files_by_key(make_job(data=mixed)) == {"data.mix.0.path": ["train.jsonl"]}


def test_of_a_model_what_programs_read(working_directory: Path) -> None:
    needed_names = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors"]
    needed_names += ["additional_chat_templates/tool_use.jinja"]
    other_names = ["pytorch_model.bin", "optimizer.pt", ".git/config", "checkpoint-5/config.json"]
    anchor_names = ["anchor/config.json", "anchor/model.safetensors"]
    write_files(
        working_directory / "student",
        *needed_names,
        *other_names,
        *anchor_names,
        "code.py",
        ".hidden.json",
        "anchor/optimizer.pt",
    )
    sent_names = files_by_key(make_job(student={"model": "student"}))["student.model"]
    expected_names = sorted([*needed_names, *anchor_names])
    assert sent_names == [f"student/{name}" for name in expected_names]


def test_a_device_is_not_sent(working_directory: Path) -> None:
    with pytest.raises(InvalidInput, match="neither a regular file nor a directory") as caught:
        files_by_key(make_job(data={"path": "/dev/zero"}))
    assert caught.value.field == "data.path"


def test_a_model_of_links_as_in_the_cache_of_the_hub(working_directory: Path) -> None:
    write_files(working_directory / "blobs", "1", "2")
    (working_directory / "snapshot").mkdir()
    (working_directory / "snapshot" / "config.json").symlink_to("../blobs/1")
    (working_directory / "snapshot" / "model.safetensors").symlink_to("../blobs/2")
    (working_directory / "named").symlink_to("snapshot")
    sent_names = files_by_key(make_job(student={"model": "named"}))["student.model"]
    assert sent_names == ["named/config.json", "named/model.safetensors"]


def test_a_data_set_directory_with_all_below_it(working_directory: Path) -> None:
    names = ["data/0.arrow", "dataset_info.json", "state.json"]
    write_files(working_directory / "saved", *names, ".cache/x")
    sent_names = [f"saved/{name}" for name in names]
    assert files_by_key(make_job(data={"path": "saved"})) == {"data.path": sent_names}
    write_files(working_directory / "splits", "dataset_dict.json", "train/state.json")
    sent_names = ["splits/dataset_dict.json", "splits/train/state.json"]
    assert files_by_key(make_job(data={"path": "splits"})) == {"data.path": sent_names}


def test_a_directory_that_is_no_data_set_or_model_is_not_sent(working_directory: Path) -> None:
    """Such as `data.path = "."` in a directory with tokens, logs and models."""
    write_files(working_directory, "train.jsonl", "token", "manifest.json", "state.json")
    mix = [{"path": ".", "share": 0.5}]
    for key, data in {
        "data.path": {"path": "."},
        "data.eval_path": {"path": "train.jsonl", "eval_path": "."},
        "data.mix.0.path": {"path": "train.jsonl", "mix": mix},
    }.items():
        assert refusal_of(make_job(data=data)) == (
            f"{key}: {working_directory} is neither a store nor a saved data set, so it is not"
            f" sent; give a file or a pattern such as {working_directory}/*.jsonl"
        )
    assert refusal_of(make_job(student={"model": "."})) == (
        f"student.model: {working_directory} has neither config.json nor adapter_config.json, so"
        " it is not sent; name the directory of a model, or a hub id"
    )
    tokenizer = {"address": "localhost:50052", "tokenizer": "."}
    assert refusal_of(make_job(teacher=tokenizer)).startswith(
        f"teacher.tokenizer: {working_directory} has neither config.json nor tokenizer_config.json"
    )
    write_files(working_directory, "photos/a.PNG", "photos/b.jpeg")
    images = {"method": {"type": "offline"}, "data": {"path": "a/b", "image_folder": "."}}
    (local,) = local_files(make_job(**images))
    assert [file.name for file in local.files.values()] == ["a.PNG", "b.jpeg"]
    write_manifest(working_directory, Manifest({}, []))
    assert len(local_files(make_job(data={"path": "."}))) == 1


def refusal_of(config: AnyJob) -> str:
    with pytest.raises(InvalidInput) as caught:
        local_files(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_sent_is_told_in_one_sentence(working_directory: Path) -> None:
    folder = write_files(working_directory / "saved", "state.json", "dataset_info.json")
    os.mkfifo(folder / "pipe")
    config = make_job(data={"path": "saved"})
    assert refusal_of(config).startswith(f"data.path: {folder}/pipe is not a regular file")
    (folder / "pipe").unlink()
    (folder / "link").symlink_to(working_directory)
    assert refusal_of(config).startswith(f"data.path: {folder}/link is not a regular file")
    (folder / "link").unlink()
    write_files(folder, "a\nb")
    assert "cannot be sent under this name; rename the file" in refusal_of(config)
    (folder / "a\nb").unlink()
    (folder / os.fsdecode(b"\xff")).write_text("")
    assert "cannot be sent under this name" in refusal_of(config)
    (working_directory / "empty").mkdir()
    assert refusal_of(make_job(student={"model": "empty"})).startswith("student.model: ")
    write_files(working_directory, "reward.py")
    rewarded = {
        "method": {"type": "rl"},
        "reward": {"type": "python", "file": "reward.py"},
    }
    assert refusal_of(make_job(**rewarded)).startswith(
        "reward.file: cannot be uploaded: a server does not run the code"
    )


def test_too_many_files(working_directory: Path) -> None:
    names = ["dataset_dict.json", *(f"{n}" for n in range(10_000))]
    write_files(working_directory / "saved", *names)
    assert "has 10001 files; at most 10000 are sent" in refusal_of(make_job(data={"path": "saved"}))


def test_images_by_path_are_refused_and_bytes_are_sent(working_directory: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    data = {"image_column": "image", "path": "train.jsonl"}
    (working_directory / "train.jsonl").write_text('{"prompt": "a", "image": "cat.png"}\n')
    assert refusal_of(make_job(data=data)).startswith(
        "data.path: the records of train.jsonl name images"
    )
    table = pa.table({"prompt": ["a"], "image": [b"\x89PNG"]})
    pyarrow.parquet.write_table(table, working_directory / "train.parquet")
    assert files_by_key(make_job(data={**data, "path": "train.parquet"})) == {
        "data.path": ["train.parquet"]
    }


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trian.jsonl", "did you mean train.jsonl?"),
        ("data/trian", "did you mean data/train?"),
        ("./nothing", "write an absolute path for a file on the server"),
        ("~/train.jsonl", "write an absolute path for a file on the server"),
    ],
)
def test_a_relative_path_that_is_not_here_is_a_typo(
    working_directory: Path, name: str, hint: str
) -> None:
    write_files(working_directory, "train.jsonl", "data/train/dataset_info.json")
    with pytest.raises(InvalidInput, match="does not exist on this machine") as caught:
        files_by_key(make_job(data={"path": name}))
    assert (caught.value.field, caught.value.hint) == ("data.path", hint)


def test_an_absolute_path_that_is_not_here_may_be_of_the_server(working_directory: Path) -> None:
    write_files(working_directory, "train.jsonl")
    config = make_job(
        data={"path": f"{working_directory}/trian.jsonl", "eval_path": "/srv/eval.jsonl"}
    )
    assert files_by_key(config) == {}
    assert paths_of_server(config) == [
        ("data.path", f"{working_directory}/trian.jsonl", f"{working_directory}/train.jsonl"),
        ("data.eval_path", "/srv/eval.jsonl", ""),
    ]
