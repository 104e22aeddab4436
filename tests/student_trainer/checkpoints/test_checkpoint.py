"""Checkpoints are complete and intact, or they are ignored."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from protos.errors import Corrupt, NotFound
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.atomic_directory import is_intact, write_atomically
from student_trainer.checkpoints.export import export_model
from tests.student_trainer import tiny
from tests.student_trainer.saving import save_checkpoint


@pytest.fixture(scope="module")
def training_state() -> tuple[Any, torch.optim.Optimizer]:
    """A model, and an optimizer whose state has moments."""
    model = tiny.model(seed=6).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        step_once(model, optimizer, step)
    return model, optimizer


def step_once(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(root: Path, step: int, training_state: tuple[Any, torch.optim.Optimizer]) -> Path:
    model, optimizer = training_state
    save_checkpoint(root, step, model=model, tokenizer=tiny.tokenizer(), optimizer=optimizer)
    return checkpoint.checkpoint_path(root, step)


@pytest.fixture
def root(tmp_path: Path, training_state: tuple[Any, torch.optim.Optimizer]) -> Path:
    for step in (5, 10):
        save(tmp_path, step, training_state)
    return tmp_path


def test_a_round_trip_goes_on_bit_by_bit(
    tmp_path: Path, training_state: tuple[Any, torch.optim.Optimizer]
) -> None:
    model, optimizer = training_state
    path = save(tmp_path, 3, training_state)
    loaded = type(model).from_pretrained(path / "model").train()
    moments = torch.optim.AdamW(loaded.parameters(), lr=1e-2, weight_decay=0.1)
    checkpoint.load_optimizer(path, loaded, moments)
    assert len(moments.state) == len(optimizer.state) > 0
    for parameter, loaded_parameter in zip(model.parameters(), loaded.parameters(), strict=True):
        assert optimizer.state[parameter].keys() == moments.state[loaded_parameter].keys()
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(value, moments.state[loaded_parameter][kind]), kind
    for step in range(3, 6):
        step_once(loaded, moments, step)
        step_once(model, optimizer, step)
    for parameter, loaded_parameter in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(parameter, loaded_parameter)


def test_the_newest_is_taken(root: Path) -> None:
    assert checkpoint.newest_checkpoint(root) == (10, root / "step-000010")
    assert checkpoint.newest_checkpoint(root, 5) == (5, root / "step-000005")
    assert checkpoint.newest_checkpoint(root / "nothing") is None


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def damage_bytes(data: bytes, harm: str, name: str) -> bytes:
    offset = len(data) // 2
    if name == "manifest.json":  # change a digit of one of its digests
        offset = data.index(b'": "') + 6
    match harm:
        case "flip":
            return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
        case "cut":
            return data[:-3]  # of the manifest: its last bracket
        case "grow":
            return data + b"\0"
    return data


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "grow"])
def test_a_harmed_file_is_found_whichever_it_is(root: Path, tmp_path: Path, harm: str) -> None:
    directory = root / "step-000010"
    names = [str(file.relative_to(directory)) for file in files(directory)]
    expected = {"manifest.json", "optimizer.safetensors", "state.json", "model/model.safetensors"}
    assert expected <= set(names)
    for name in names:
        shutil.copytree(directory, tmp_path / "kept")
        file = directory / name
        file.write_bytes(damage_bytes(file.read_bytes(), harm, name))
        if harm == "remove":
            file.unlink()
        assert not is_intact(directory), name
        assert checkpoint.newest_checkpoint(root) == (5, root / "step-000005")
        shutil.rmtree(directory)
        (tmp_path / "kept").rename(directory)
    assert is_intact(directory)


def test_every_byte_of_a_small_file_counts(root: Path) -> None:
    file = root / "step-000010" / "state.json"
    content = file.read_bytes()
    for offset in range(len(content)):
        for bit in range(8):
            data = bytearray(content)
            data[offset] ^= 1 << bit
            file.write_bytes(data)
            assert not is_intact(file.parent)
    file.write_bytes(content)
    assert is_intact(file.parent)


def test_a_checkpoint_that_is_asked_for_must_be_good(root: Path) -> None:
    (root / "step-000005" / "state.json").write_text("{}")
    for step in (5, 7):
        with pytest.raises(NotFound, match=f"no intact checkpoint of step {step}") as caught:
            checkpoint.newest_checkpoint(root, step)
        assert caught.value.hint == "steps with a checkpoint: 5, 10"
    (root / "step-000010" / "manifest.json").unlink()
    # An error, not a restart from step 0: the user may still repair the checkpoint.
    with pytest.raises(Corrupt, match=r"every checkpoint in .* is incomplete or damaged"):
        checkpoint.newest_checkpoint(root)


class Crash(BaseException):
    """An error that no `except Exception` catches."""


@pytest.mark.parametrize("crash_at", [0, 1, 2, 3])
def test_a_crash_leaves_nothing_that_counts(tmp_path: Path, crash_at: int) -> None:
    """Stops after each file. Real kills are tested in tests/end_to_end."""

    def write(partial: Path) -> None:
        for number in range(3):
            if number == crash_at:
                raise Crash
            (partial / f"file-{number}").write_text(str(number))

    path = checkpoint.checkpoint_path(tmp_path, 4)
    if crash_at < 3:
        with pytest.raises(Crash):
            write_atomically(path, write)
        assert checkpoint.newest_checkpoint(tmp_path) is None
        assert not path.exists()
        crash_at = 3  # the next attempt succeeds, over the partial files
    write_atomically(path, write)
    assert checkpoint.newest_checkpoint(tmp_path) == (4, path)
    assert [file.name for file in files(path)] == ["file-0", "file-1", "file-2", "manifest.json"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_rewritten_checkpoint_replaces_the_old_one(tmp_path: Path) -> None:
    path = checkpoint.checkpoint_path(tmp_path, 4)
    for name in ("old", "new"):
        write_atomically(path, lambda partial, name=name: (partial / name).touch())
    assert [file.name for file in files(path)] == ["manifest.json", "new"]


def test_leftovers_of_every_attempt_go(tmp_path: Path) -> None:
    """An export has one name for all attempts; earlier versions had one name for partial files."""
    for name in (".export.tmp", ".export.1.tmp", ".other.1.tmp"):
        (tmp_path / name / "model").mkdir(parents=True)
    write_atomically(tmp_path / "export", lambda partial: (partial / "file").touch())
    assert {path.name for path in tmp_path.iterdir()} == {"export", ".other.1.tmp"}


def test_old_ones_and_leftovers_go(tmp_path: Path) -> None:
    # Step 1,000,000 has one digit more; sorted by name it would come before step 2.
    for step in (2, 9, 11, 1_000_000):
        path = checkpoint.checkpoint_path(tmp_path, step)
        write_atomically(path, lambda partial: (partial / "file").touch())
    (tmp_path / ".step-000012.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    checkpoint.delete_old(tmp_path, 2, best=2)
    newest = {"step-000011", "step-1000000"}
    assert {p.name for p in tmp_path.iterdir()} == {"step-000002", *newest, "notes"}
    checkpoint.delete_old(tmp_path, 2, best=11)
    assert {p.name for p in tmp_path.iterdir()} == {*newest, "notes"}
    checkpoint.delete_after(tmp_path, 11)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000011", "notes"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_export_has_the_dtype_of_the_job(tmp_path: Path, dtype: torch.dtype) -> None:
    """Files and config.json have the dtype; the model in memory keeps its weights and config."""
    model = tiny.model(seed=6)
    weights_before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config_before = copy.deepcopy(model.config.to_dict())
    export = tmp_path / "export"
    export_model(export, model=model, tokenizer=tiny.tokenizer(), dtype=dtype)
    stored = load_file(export / "model.safetensors")
    assert stored
    for name, weight in stored.items():
        assert torch.equal(weight, weights_before[name].to(dtype))
        assert weight.dtype == dtype
    loaded = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert all(
        torch.equal(weight, weights_before[name]) for name, weight in model.state_dict().items()
    )
    assert model.config.to_dict() == config_before
