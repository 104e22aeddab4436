"""Checkpoints of N processes, continued by M: the files of one process, byte for byte."""

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
from tests.student_trainer.checkpoints.resharding import expected, run
from tests.student_trainer.saving import LIMIT

# The tied embeddings have 13 rows: of 8 processes one has none. (4, 2): four processes, which
# divide the linear modules in groups of two.
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
        str(file.relative_to(path)): content(file)
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }


def content(file: Path) -> object:
    if file.name == "adapter_config.json":  # peft writes a set, in any order
        read = json.loads(file.read_text())
        return read | {"target_modules": sorted(read["target_modules"])}
    return file.read_bytes()


SLOW_CHAINS = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2-lora", "tensor-parallel")
]


@pytest.mark.parametrize("chain", ["fsdp2", "ddp", *SLOW_CHAINS])
def test_other_numbers_of_processes(base: Path, tmp_path: Path, chain: str) -> None:
    """Each link reads the checkpoint before, makes an update, and writes the next one."""
    adapted, sharding, worlds = CHAINS[chain]
    expected(tmp_path / "expected", base, adapted, len(worlds))
    for update, link in enumerate(worlds, 1):
        world, size = (link, 1) if isinstance(link, int) else link
        found = run(world, tmp_path / "run", base, adapted, sharding, update, size)
        assert files(found) == files(tmp_path / "expected" / found.name), (world, update)
        assert not [file for file in found.parent.iterdir() if file.name.startswith(".")]
        listed = json.loads((found / "manifest.json").read_text())["files"]
        digests = listed["optimizer.safetensors"]
        assert (1 if isinstance(digests, str) else len(digests)) == world
        # However many processes share the work, all of it is verified.
        for readers in (1, 2, 3):
            assert all(is_intact(found, reader, readers) for reader in range(readers))
        harmed = tmp_path / "harmed"
        shutil.copytree(found, harmed)
        weights = harmed / "optimizer.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
        assert [is_intact(harmed, reader, 3) for reader in range(3)].count(False) == 1
        shutil.rmtree(harmed)


def choose(root: Path, out: Path) -> None:
    """Say which checkpoint this process resumes from, and what it reads to verify it."""
    accelerator = make_accelerator(LIMIT)
    opened: list[str] = []
    sys.addaudithook(lambda name, values: opened.append(str(values[0])) if name == "open" else None)
    intact = partial(checkpoint.intact_for_all, accelerator)
    found = checkpoint.newest_checkpoint(root, intact=intact)
    assert found is not None
    read = [Path(file).name for file in opened if found[1].name in file]
    said = {"step": found[0], "read": [name for name in read if name != "manifest.json"]}
    (out / f"rank-{accelerator.process_index}.json").write_text(json.dumps(said))


def test_processes_verify_shares_and_agree(base: Path, tmp_path: Path) -> None:
    """A damage that one of them sees counts for both; together they read every part once."""
    root = tmp_path / "run"
    for update in (1, 2):
        run(2, root, base, False, "fsdp2", update)
    harmed = root / "step-000002" / "optimizer.safetensors"
    harmed.write_bytes(harmed.read_bytes()[:-1] + b"\x55")
    assert [is_intact(harmed.parent, reader, 2) for reader in range(2)].count(False) == 1
    assert Forks(2, tmp_path / "group", choose, root, tmp_path).wait() == [0, 0]
    said = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["step"] for one in said] == [1, 1]
    files = json.loads((root / "step-000001" / "manifest.json").read_text())["files"]
    parts = {Path(name).name: 1 if isinstance(of, str) else 2 for name, of in files.items()}
    assert Counter(said[0]["read"] + said[1]["read"]) == parts


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_an_earlier_version_is_continued(
    base: Path, tmp_path: Path, world: int
) -> None:
    expected(tmp_path / "expected", base, False, 3)
    before = tmp_path / "run" / "step-000002"
    shutil.copytree(tmp_path / "expected" / before.name, before)
    assert is_intact(before)
    found = run(world, tmp_path / "run", base, False, "fsdp2", 3)
    assert files(found) == files(tmp_path / "expected" / found.name)
