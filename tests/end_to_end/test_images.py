"""Pairs of vision-language models: on-policy, from rewards and offline, in real processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish, kill_after_checkpoint, trainer
from tests.end_to_end.processes import metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

KINDS = (pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl")
STEPS = 3
CHANGES: dict[str, Any] = {
    "max_steps": STEPS,
    "eval__every": STEPS,
    "eval__prompts": 4,
    "checkpoint__every": STEPS,
    "method__max_prompt_tokens": 64,
    "train__tokens_per_micro_batch": 160,
    "train__weight_decay": 0.0,
    "teacher__logprob_format": "f32",
    "data__image_column": "image",
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Material:
    """Models of one kind, and prompts with one image, two images or (every fourth) none."""
    from tests import tiny_vision
    from tests.student_trainer.tiny import Material

    root = tmp_path_factory.mktemp(request.param)
    (root / "images").mkdir()
    for number in range(6):
        size = (16 + 8 * (number % 3), 24)
        (root / "images" / f"{number}.png").write_bytes(tiny_vision.image(number, *size))
    names = [f"images/{number}.png" for number in range(6)]
    images_of_records = [names[0], [names[1], names[2]], names[3], None]
    records = [
        {
            "prompt": f"{number % 10}+{number % 7}=",
            "answer": "1",
            "image": images_of_records[number % 4],
        }
        for number in range(40)
    ]
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    teacher = tiny_vision.save(root / "teacher", request.param, seed=1)
    student = tiny_vision.save(root / "student", request.param, seed=2)
    return Material(prompts, teacher, student)


@pytest.fixture(scope="module")
def teacher_address(pair: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ["--model", str(pair.teacher), "--batch-invariant", "--device", "cpu"]
    log = tmp_path_factory.mktemp("teacher") / "teacher.log"
    process = ForkedTeacher([*arguments, "--no-cache"], log=log)
    yield process.address
    process.close()


def changed_weights(run: RunDirectory, pair: Material) -> set[str]:
    """Return the names of the weights that training changed."""
    from safetensors.torch import load_file

    old_weights, new_weights = (
        load_file(path / "model.safetensors") for path in (pair.student, run.export)
    )
    assert old_weights.keys() == new_weights.keys()
    return {
        name for name in old_weights if not bool((old_weights[name] == new_weights[name]).all())
    }


def assert_learned(run: RunDirectory, pair: Material) -> None:
    lines = [line for line in metrics_of(run) if "loss" in line]
    assert [line["step"] for line in lines][-1] == STEPS
    names = changed_weights(run, pair)
    assert any("visual" in name for name in names), "the part that sees learns too"
    assert any("visual" not in name for name in names)
    assert (run.export / "preprocessor_config.json").is_file()


def test_on_policy(pair: Material, teacher_address: str, tmp_path: Path) -> None:
    """Training changes the weights, and two processes have the same curve as one."""
    from tests.end_to_end.test_two_processes import assert_close
    from tests.student_trainer.tiny import job

    run = finish(new_run(tmp_path / "one", job(pair, teacher_address, **CHANGES)))
    assert_learned(run, pair)
    config = job(pair, teacher_address, **CHANGES, train__processes=2)
    assert_close(metrics_of(finish(new_run(tmp_path / "two", config))), metrics_of(run))


@pytest.mark.slow
def test_a_killed_run_goes_on(pair: Material, teacher_address: str, tmp_path: Path) -> None:
    """A vision-language run resumes from its checkpoint to the weights of an unkilled run."""
    from tests.student_trainer.tiny import job

    config = job(pair, teacher_address, **CHANGES | {"max_steps": 4, "checkpoint__every": 1})
    run = new_run(tmp_path / "killed", config)
    kill_after_checkpoint(run, 2)
    finish(run, 2)
    assert weights(run) == weights(finish(new_run(tmp_path / "whole", config)))


def test_teachers_of_text_and_of_images(
    pair: Material, teacher_address: str, tmp_path: Path
) -> None:
    """Records name their teacher; a teacher that reads no images gets only text."""
    import shutil

    from tests.student_trainer.tiny import Material, job

    blind_teacher = tmp_path / "blind"
    shutil.copytree(pair.teacher, blind_teacher)
    (blind_teacher / "preprocessor_config.json").unlink()
    records = [json.loads(line) for line in pair.prompts.read_text().splitlines()]
    named_records = [
        record | {"teacher": "sees" if record["image"] else "reads"} for record in records
    ]
    prompts = pair.prompts.with_name("named.jsonl")
    material = Material(prompts, pair.teacher, pair.student)
    process = ForkedTeacher(
        ["--model", str(blind_teacher), "--no-cache", "--device", "cpu"],
        log=tmp_path / "teacher.log",
    )
    try:
        teachers = {"sees": teacher_address, "reads": process.address}
        config = job(material, **CHANGES, teachers=teachers)
        prompts.write_text("".join(json.dumps(record) + "\n" for record in named_records))
        assert_learned(finish(new_run(tmp_path / "run", config)), pair)
        named_records[3]["image"] = named_records[0]["image"]
        prompts.write_text("".join(json.dumps(record) + "\n" for record in named_records))
        refused_run = new_run(tmp_path / "refused", config)
        assert_refused(
            refused_run, "row 4 of .* has images, but its teacher 'reads' does not read images"
        )
    finally:
        process.close()


@pytest.mark.slow
def test_a_teacher_that_is_the_student(pair: Material, tmp_path: Path) -> None:
    """The KL of a model to itself is zero: trainer and teacher read the same images."""
    from tests.student_trainer.tiny import job

    arguments = ["--model", str(pair.student), "--no-cache", "--device", "cpu"]
    process = ForkedTeacher(arguments, log=tmp_path / "teacher.log")
    try:
        config = job(pair, process.address, **CHANGES | {"max_steps": 1, "eval__every": 1})
        run = finish(new_run(tmp_path / "run", config))
    finally:
        process.close()
    first_line = next(line for line in metrics_of(run) if "kl/teacher" in line)
    assert abs(first_line["kl/teacher"]) < 1e-4


@pytest.mark.slow
def test_rl(pair: Material, teacher_address: str, tmp_path: Path) -> None:
    """RL with a reward, an EMA anchor and a teacher that reads images."""
    from tests.student_trainer.tiny import rl_job

    teacher = {"teacher__address": teacher_address}
    config = rl_job(pair, **CHANGES, **teacher, train__learning_rate=1e-3)
    run = finish(new_run(tmp_path / "run", config))
    assert_learned(run, pair)
    line = next(line for line in metrics_of(run) if "reward/mean" in line)
    assert 0 <= line["reward/mean"] <= 1
    # The anchor starts equal to the student; its KL is measured with images, too.
    assert "kl/anchor" in line


@pytest.mark.slow
def test_a_store_and_its_offline_job(pair: Material, teacher_address: str, tmp_path: Path) -> None:
    """A capture stores references to images; the offline job reads them and detects changes."""
    import numpy as np

    from clients.config.capture import CaptureJob
    from clients.store.dataset import LogitDataset
    from tests import tiny_vision
    from tests.student_trainer.tiny import offline_job
    from tests.teacher_service.capture.material import capture_here

    values = {
        "data": {
            "path": str(pair.prompts),
            "image_column": "image",
            "tokenizer": str(pair.teacher),
        },
        "teacher": {"address": teacher_address, "top_k": 8, "logprob_format": "f32"},
        "method": {"type": "capture", "max_tokens": 32},
    }
    verdict, store = capture_here(tmp_path / "capture", CaptureJob.model_validate(values))
    assert verdict == "succeeded"
    data = LogitDataset(store)
    assert len(data) == 40
    model = tiny_vision.model(pair.teacher.parent.name.rstrip("0123456789"), seed=1)
    for index in range(4):
        entry, block = data.decoded(index)
        ids = np.frombuffer(entry.token_ids, "<i4")
        names = [name for name, _ in json.loads(entry.images or b"[]")]
        images = [(pair.prompts.parent / name).read_bytes() for name in names]
        assert len(images) == (1, 2, 1, 0)[index]
        logits = tiny_vision.plain_logits(model, ids.tolist(), images)
        expected_logprobs = logits.log_softmax(-1)[-1 - len(block) : -1].numpy()
        expected_token_logprobs = expected_logprobs[np.arange(len(block)), ids[entry.start :]]
        np.testing.assert_allclose(block.token_logprobs, expected_token_logprobs, atol=1e-5)
    changes: dict[str, Any] = {
        "max_steps": STEPS,
        "eval__every": STEPS,
        "eval__prompts": 4,
        "checkpoint__every": STEPS,
        "train__tokens_per_micro_batch": 160,
    }
    run = finish(new_run(tmp_path / "run", offline_job(pair, store, **changes)))
    assert_learned(run, pair)
    other_folder = tmp_path / "other"
    (other_folder / "images").mkdir(parents=True)
    for number in range(6):
        (other_folder / "images" / f"{number}.png").write_bytes(tiny_vision.image(50 + number))
    config = offline_job(pair, store, **changes, data__image_folder=str(other_folder))
    assert_refused(new_run(tmp_path / "refused", config), "are not those that were captured")


def assert_refused(run: RunDirectory, message: str) -> None:
    with trainer(run, 1) as process:
        assert process.wait() != 0
    assert re.search(message, process.log)
