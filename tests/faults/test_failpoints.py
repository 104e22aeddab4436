"""Every failpoint is reached by a test, and the files after the crash are valid.

test_server_failpoints.py has those of the server, test_trainer_failpoints.py the trainer's.
"""

from __future__ import annotations

import ast
import json
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from clients.store.store import LogitStore, StoredRows
from clients.teacher.client import TeacherClient
from protos.rpc import failpoints
from tests.architecture.sources import PRODUCT, python_files
from tests.faults.dying import NEW, OLD
from tests.faults.history import History
from tests.faults.sequences import WAIT, assert_equal, expected, fake, sequences
from tests.forked_python import run_forked
from tests.teacher_service.conftest import StartTeacher

# In the order in which they are reached; on the second hit, the file is the manifest.
STORE = [
    "file-written:kill",
    "file-synced:kill",
    "file-renamed:kill",
    "shard-written:kill",
    "file-written:kill:2",
    "file-synced:kill:2",
    "file-renamed:kill:2",
    "shard-named:kill",
    "shard-unnamed:kill",
]
SAVES = [
    "checkpoint-begun:kill",
    "checkpoint-copied:kill",
    "checkpoint-writing:kill",
    "checkpoint-part-written:kill",
    "checkpoint-filled:kill",
    "checkpoint-listed:kill",
    "checkpoint-sealed:kill",
    "checkpoint-replaced:kill",
    "checkpoint-renamed:kill",
    "checkpoint-filled:kill:2",
    "checkpoint-renamed:kill:2",
    "old-checkpoint-deleted:kill",
]
TEACHER = ["request-read:kill:20", "batch-scored:kill:2", "chunk-sent:kill:30"]
PUSHES = ["weights-received:raise", "weights-applied:raise"]


def test_every_failpoint_is_tested() -> None:
    """Each name is in the source once and is armed in a test."""
    counts: Counter[str] = Counter()
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("failpoint"):
                (name,) = node.args
                assert isinstance(name, ast.Constant)
                counts[name.value] += 1
    assert max(counts.values()) == 1, "a name in two places"
    assert len(counts) >= 25
    # Tests arm a failpoint as "name:kill" or by its name alone.
    armed = {
        node.value.partition(":")[0]
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(counts) <= armed


def test_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints._Armed("here:raise:2"))
    failpoints.failpoint("elsewhere")
    failpoints.failpoint("here")
    with pytest.raises(OSError, match="failpoint here"):
        failpoints.failpoint("here")
    failpoints.failpoint("here")
    failpoints.arm("here:explode")
    with pytest.raises(ValueError, match="unknown action 'explode'"):
        failpoints.failpoint("here")


def run_dying_children(kind: str, root: Path, specs: list[str]) -> None:
    process = run_forked([sys.executable, "-m", "tests.faults.dying", kind, str(root), *specs])
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == dict.fromkeys(specs, -signal.SIGKILL)


def test_stores(tmp_path: Path) -> None:
    """Shards in the manifest are readable, others are removed, and the next write succeeds."""
    old = StoredRows(OLD, b"\1\0\0\0", 1, b"rows")
    for spec in STORE:
        with LogitStore(tmp_path / spec, write=True) as store:
            store.append([old])
    run_dying_children("store", tmp_path, STORE)
    for spec in STORE:
        is_named = STORE.index(spec) >= STORE.index("file-renamed:kill:2")
        is_dropped = spec == "shard-unnamed:kill"
        with LogitStore(tmp_path / spec, write=True) as store:
            assert (OLD in store, NEW in store) == (not is_dropped, is_named), spec
            store.verify()
            store.append([StoredRows(b"later".ljust(32), b"\1\0\0\0", 1, b"rows")])
        assert not list((tmp_path / spec).glob("*.tmp")), spec
        assert len(list((tmp_path / spec).glob("*.arrow"))) == 2 + is_named - is_dropped, spec


def test_saves(tmp_path: Path) -> None:
    """There is always an intact checkpoint, and the next save removes leftovers."""
    from student_trainer.checkpoints import checkpoint
    from tests.faults.tiny_checkpoint import save

    for step in (1, 2):
        save(tmp_path / "before", step)
    for spec in SAVES:
        shutil.copytree(tmp_path / "before", tmp_path / spec)
    run_dying_children("checkpoint", tmp_path, SAVES)
    newest_steps = {}
    for spec in SAVES:
        newest_checkpoint = checkpoint.newest_checkpoint(tmp_path / spec)
        assert newest_checkpoint is not None, spec
        newest_steps[spec] = newest_checkpoint[0]
        save(tmp_path / spec, 4)
        checkpoint.delete_old(tmp_path / spec, 2)
        steps = sorted(path.name for path in (tmp_path / spec).iterdir())
        assert steps[1:] == ["step-000004"], spec
        assert len(steps) == 2, spec
    # While step 2 is replaced, only step 1 is visible.
    assert newest_steps == {
        spec: 1 if "replaced" in spec else 3 if spec in SAVES[-2:] else 2 for spec in SAVES
    }


@pytest.mark.parametrize("spec", TEACHER)
def test_teachers(start_teacher: StartTeacher, history: History, spec: str) -> None:
    queries = sequences(60, 200, top_k=4)
    arguments = [*fake(), "--max-batch-tokens", "4000"]
    teacher = start_teacher(*arguments, failpoint=spec)
    with TeacherClient(teacher.address) as client:
        answers = [client.submit(query) for query in queries]
        assert teacher.process.wait(WAIT) == -signal.SIGKILL
        assert not all(answer.done() for answer in answers)
        start_teacher(*arguments, port=teacher.port)
        assert_equal(answers, expected(queries))
    history.check(queries)


@pytest.mark.parametrize("spec", PUSHES)
def test_pushes(start_teacher: StartTeacher, tmp_path: Path, spec: str) -> None:
    """A fault before the update changes nothing; after the update, only the reply is lost."""
    from teacher_service.engines.hf import HfEngine
    from tests.teacher_service.serving.pushing import arrays
    from tests.teacher_service.tiny_model import save_tiny_model

    paths = [save_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    engines = [HfEngine(str(path), batch_invariant=True) for path in paths]
    teacher = start_teacher("--model", str(paths[0]), "--batch-invariant", failpoint=spec)
    query = sequences(1, 30, top_k=8)[0]
    with TeacherClient(teacher.address) as client:
        info_before = client.info()
        with pytest.raises(Exception, match="internal error"):
            client.push_weights(arrays(engines[1]))
    is_applied = spec.startswith("weights-applied")
    with TeacherClient(teacher.address) as client:
        info = client.info()
        assert info.version == is_applied
        assert (info.fingerprint == info_before.fingerprint) is not is_applied
        rows = client.submit(query).result(WAIT)
    (block,) = engines[is_applied].score([query])
    assert rows.head_logprobs.tobytes() == block.head_logprobs.tobytes()  # type: ignore[union-attr]
