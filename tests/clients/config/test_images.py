"""Jobs whose prompts have images: supported combinations, and requirements of the teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clients.config.capture import CaptureJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.data.images import image_file
from clients.data.records import images_of
from clients.preflight.teachers import check_teachers
from protos.errors import InvalidInput
from tests.clients.preflight.test_teachers import INFO

COMMON: dict[str, Any] = {
    "student": {"model": "m"},
    "data": {"path": "d.jsonl", "image_column": "image"},
}
RL: dict[str, Any] = {"method": {"type": "rl"}, "reward": {"type": "regex", "pattern": "1"}}
FSDP = {"train": {"processes": 2, "sharding": "fsdp2"}}


def make_job(kind: type[Any], *changes: dict[str, Any]) -> Any:
    values: dict[str, Any] = {name: dict(table) for name, table in COMMON.items()}
    for change in changes:
        for name, table in change.items():
            values[name] = values.get(name, {}) | table
    return kind.model_validate(values)


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        (OnPolicyJob, [{"rollouts": {"engine": "vllm"}}], "rollouts.engine"),
        (OnPolicyJob, [{"rollouts": {"lag": 1}}], "rollouts.lag"),
        (OnPolicyJob, [{"rollouts": {"address": "r:1"}}], "rollouts.address"),
        (OnPolicyJob, [{"teacher": {"tokenizer": "auto"}}], "teacher.tokenizer"),
        (OnPolicyJob, [{"teacher": {"context": "{answer}"}}], "teacher.context"),
        (
            OnPolicyJob,
            [{"teacher": {"template_arguments": {"thinking": True}}}],
            "teacher.template_arguments",
        ),
        (OnPolicyJob, [{"student": {"compile": True}}], "student.compile"),
        (OnPolicyJob, [FSDP], "train.sharding"),
        (OnPolicyJob, [{"data": {"chat_template": False}}], "data.image_column"),
        (RLJob, [RL, FSDP], "train.sharding"),
        (RLJob, [RL, {"anchor": {"context": "{answer}"}}], "anchor.context"),
        (RLJob, [RL, {"environment": {"retriever": "p.jsonl"}}], "environment"),
        (RLJob, [RL, {"rollouts": {"engine": "vllm"}}], "rollouts.engine"),
        (SFTJob, [{"method": {"type": "sft"}}], "data.image_column"),
    ],
)
def test_what_does_not_work_with_images(
    kind: type[Any], changes: list[dict[str, Any]], key: str
) -> None:
    with pytest.raises(ValidationError) as error:
        make_job(kind, *changes)
    assert [".".join(map(str, problem["loc"])) for problem in error.value.errors()] == [key]


def test_a_capture_with_images_needs_a_service() -> None:
    def make_capture(**teacher: str) -> CaptureJob:
        data = {"path": "d.jsonl", "image_column": "image"}
        values = {"data": data, "teacher": teacher, "method": {"type": "capture"}}
        return CaptureJob.model_validate(values)

    assert make_capture(address="t:1").data.prompt_format.image_column == "image"
    with pytest.raises(ValidationError, match="images are scored by a running service"):
        make_capture(model="m")


@pytest.mark.parametrize("job", [make_job(OnPolicyJob), make_job(RLJob, RL, {"teacher": {}})])
def test_a_teacher_without_images_is_refused(job: Any) -> None:
    info = replace(INFO, max_length=1 << 20)
    with pytest.raises(InvalidInput, match="the teacher reads no images") as error:
        check_teachers(job, {"": info})
    assert error.value.field == "data.image_column"
    check_teachers(job, {"": replace(info, takes_images=True)})


def test_one_of_several_teachers_must_read_images() -> None:
    values = COMMON | {"teachers": {"a": "a:1", "b": "b:1"}}
    job = OnPolicyJob.model_validate(values)
    with pytest.raises(InvalidInput, match="no teacher reads images"):
        check_teachers(job, {"a": INFO, "b": INFO})
    check_teachers(job, {"a": INFO, "b": replace(INFO, takes_images=True)})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ([], ()),
        ("1.png", ("1.png",)),
        (["1.png", b"2"], ("1.png", b"2")),
        ({"bytes": b"1", "path": "1.png"}, (b"1",)),
        ([{"bytes": None, "path": "1.png"}], ("1.png",)),
    ],
)
def test_images_of_a_record(value: object, expected: tuple[str | bytes, ...]) -> None:
    assert images_of({"image": value}, "image", "row 1") == expected


@pytest.mark.parametrize("value", ["data:image/png;base64," + "A" * 5000, ["https://x.org/1.png"]])
def test_addresses_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="web addresses are not supported") as caught:
        images_of({"image": value}, "image", "row 1")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["none.png", "x" * 5000])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInput,
        match=r"row 1 names the image .*, which is not a"
        " file",
    ) as caught:
        image_file(tmp_path, name, "row 1")
    assert caught.value.field == "data.image_column"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [3, [None], "", [{"bytes": None, "path": None}]])
def test_what_is_no_image(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"row 1 has .* in column 'image', not an image"):
        images_of({"image": value}, "image", "row 1")
