"""Checkpoints of N processes, continued by M, have the bytes that one process writes."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.atomic_directory import is_intact
from student_trainer.parallel.collectives import make_accelerator
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.checkpoints.resharding import run_processes, write_expected
from tests.student_trainer.saving import LIMIT

# The tied embeddings have 13 rows, so one of 8 processes has none. (4, 2): four processes in
# tensor-parallel groups of two.
CHAINS = {
    "fsdp2": (False, "fsdp2", (8, 4, 1, 2)),
    "fsdp2-lora": (True, "fsdp2", (4, 2, 1, 2)),
    "ddp": (False, "none", (3, 1, 2)),
    "tensor-parallel": (False, "fsdp2", ((4, 2), 1, (6, 2), 3, (2, 2))),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    return tiny.save(tiny.model(seed=2, layers=2), tiny.tokenizer(), path)


def files(path: Path) -> dict[str, object]:
    return {
        str(file.relative_to(path)): read_content(file)
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }


def read_content(file: Path) -> object:
    if file.name == "adapter_config.json":  # peft writes a set, in any order
        adapter_config = json.loads(file.read_text())
        return adapter_config | {"target_modules": sorted(adapter_config["target_modules"])}
    return file.read_bytes()


SLOW_CHAINS = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2-lora", "tensor-parallel")
]


@pytest.mark.parametrize("chain", ["fsdp2", *SLOW_CHAINS])
def test_other_numbers_of_processes(base: Path, tmp_path: Path, chain: str) -> None:
    """Each element of the chain reads the last checkpoint, makes an update, and writes the next."""
    adapted, sharding, worlds = CHAINS[chain]
    write_expected(tmp_path / "expected", base, adapted, len(worlds))
    for update, link in enumerate(worlds, 1):
        world, size = (link, 1) if isinstance(link, int) else link
        checkpoint_path = run_processes(
            world, tmp_path / "run", base, adapted, sharding, update, size
        )
        assert files(checkpoint_path) == files(tmp_path / "expected" / checkpoint_path.name), (
            world,
            update,
        )
        assert not [file for file in checkpoint_path.parent.iterdir() if file.name.startswith(".")]
        manifest_files = json.loads((checkpoint_path / "manifest.json").read_text())["files"]
        digests = manifest_files["optimizer.safetensors"]
        assert (1 if isinstance(digests, str) else len(digests)) == world
        # However many processes share the work, all of it is verified.
        for readers in (1, 2, 3):
            assert all(is_intact(checkpoint_path, reader, readers) for reader in range(readers))
        damaged = tmp_path / "harmed"
        shutil.copytree(checkpoint_path, damaged)
        weights = damaged / "optimizer.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
        assert [is_intact(damaged, reader, 3) for reader in range(3)].count(False) == 1
        shutil.rmtree(damaged)


def report_choice(root: Path, out: Path) -> None:
    """Record which checkpoint this process resumes from, and which files it reads to verify it."""
    accelerator = make_accelerator(LIMIT)
    opened: list[str] = []
    sys.addaudithook(lambda name, values: opened.append(str(values[0])) if name == "open" else None)
    intact = partial(checkpoint.intact_for_all, accelerator)
    newest = checkpoint.newest_checkpoint(root, intact=intact)
    assert newest is not None
    read_names = [Path(file).name for file in opened if newest[1].name in file]
    report = {"step": newest[0], "read": [name for name in read_names if name != "manifest.json"]}
    (out / f"rank-{accelerator.process_index}.json").write_text(json.dumps(report))


def test_processes_verify_shares_and_agree(base: Path, tmp_path: Path) -> None:
    """Damage seen by one process counts for both; together they read every part once."""
    root = tmp_path / "run"
    for update in (1, 2):
        run_processes(2, root, base, False, "fsdp2", update)
    damaged = root / "step-000002" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    assert [is_intact(damaged.parent, reader, 2) for reader in range(2)].count(False) == 1
    assert Forks(2, tmp_path / "group", report_choice, root, tmp_path).wait() == [0, 0]
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["step"] for report in reports] == [1, 1]
    files = json.loads((root / "step-000001" / "manifest.json").read_text())["files"]
    parts = {
        Path(name).name: 1 if isinstance(digests, str) else 2 for name, digests in files.items()
    }
    assert Counter(reports[0]["read"] + reports[1]["read"]) == parts


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_checkpoint_of_an_earlier_version_is_continued(
    base: Path, tmp_path: Path, world: int
) -> None:
    write_expected(tmp_path / "expected", base, False, 3)
    checkpoint_before = tmp_path / "run" / "step-000002"
    shutil.copytree(tmp_path / "expected" / checkpoint_before.name, checkpoint_before)
    assert is_intact(checkpoint_before)
    checkpoint_path = run_processes(world, tmp_path / "run", base, False, "fsdp2", 3)
    assert files(checkpoint_path) == files(tmp_path / "expected" / checkpoint_path.name)
