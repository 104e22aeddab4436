"""The record of an attempt's source code in the run directory."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from clients.runs.directory import RunDirectory
from student_trainer.run import provenance
from student_trainer.run.provenance import MAX_DIFF_BYTES, source_code, write_environment

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false")
    completed = subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "package").mkdir(parents=True)
    (root / "package" / "code.py").write_text("one = 1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def read_environment(run: RunDirectory) -> dict[str, str]:
    write_environment(run, attempt=1, processes=1)
    variables: dict[str, str] = json.loads((run.path / "environment.json").read_text())
    return variables


def test_commit_and_changes(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_ROOT", checkout)
    run = RunDirectory(tmp_path)
    commit = git(checkout, "rev-parse", "HEAD")
    assert read_environment(run)["commit"] == commit
    assert not run.code_diff.exists()
    (checkout / "package" / "code.py").write_text("one = 2\n")
    assert read_environment(run)["commit"] == f"{commit}, and code.diff"
    diff = run.code_diff.read_text()
    assert "-one = 1\n+one = 2\n" in diff
    # The diff is complete: with the commit it gives the code.
    git(checkout, "checkout", "-q", ".")
    subprocess.run(["git", "-C", str(checkout), "apply"], input=diff, text=True, check=True)
    assert (checkout / "package" / "code.py").read_text() == "one = 2\n"
    git(checkout, "commit", "-q", "-a", "-m", "second")
    assert read_environment(run)["commit"] == git(checkout, "rev-parse", "HEAD") != commit
    assert not run.code_diff.exists()


def test_no_checkout_of_its_own(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment in another project's checkout, a repository without a commit, or no git."""
    assert source_code(checkout / "package") is None
    assert source_code(tmp_path) is None
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert source_code(tmp_path / "empty") is None
    assert source_code(tmp_path / "nowhere") is None
    monkeypatch.setattr(provenance, "_ROOT", checkout / "package")
    assert "commit" not in read_environment(RunDirectory(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_code(checkout) is None


def test_neither_a_caller_s_repository_nor_its_taste(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A git hook sets variables about its own repository."""
    commit = git(checkout, "rev-parse", "HEAD")
    git(checkout, "config", "diff.noprefix", "true")
    (checkout / "package" / "code.py").write_text("one = 2\n")
    other_repository = tmp_path / "other"
    other_repository.mkdir()
    git(other_repository, "init", "-q")
    git(other_repository, "commit", "-q", "--allow-empty", "-m", "another")
    monkeypatch.setenv("GIT_DIR", str(other_repository / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other_repository / ".git" / "index"))
    source = source_code(checkout)
    assert source is not None
    assert source.commit == commit
    assert source.diff.startswith("diff --git a/package/code.py b/package/code.py\n")


def test_a_diff_is_bounded_and_runs_nothing(checkout: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    git(checkout, "config", "diff.external", f"touch {canary}")
    git(checkout, "config", "core.fsmonitor", f"touch {canary};:")
    (checkout / "package" / "code.py").write_text("line\n" * MAX_DIFF_BYTES)
    source = source_code(checkout)
    assert source is not None
    assert source.diff.endswith("\n... cut\n")
    assert len(source.diff) < MAX_DIFF_BYTES + 100
    assert not canary.exists()
