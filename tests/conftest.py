"""The environment of every test, set before any test imports torch, Triton or gRPC."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import protos  # noqa: F401  # so that gRPC leaves forked processes alone

# One thread per test worker: workers share the processors, and idle OpenMP threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU, Triton interprets kernels in Python; it reads the variable at its import.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
_running_a_test = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--no-processes`, which `make test-fast` uses."""
    help_text = "skip every test at the moment it starts a process"
    parser.addoption("--no-processes", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-processes"):
        sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    global _running_a_test
    _running_a_test = True
    try:
        return (yield)
    finally:
        _running_a_test = False


def _refuse_processes(event: str, _: object) -> None:
    # The skipped test leaves its files open; `make test-fast` ignores those warnings.
    if _running_a_test and event in _PROCESS_EVENTS:
        pytest.skip("starts a process")


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork Python processes that the test starts by `subprocess`: see tests/forked_python.py."""
    from tests.forked_python import ForkedPython

    monkeypatch.setattr(subprocess, "Popen", ForkedPython)


_tie_weights: list[object] = []


@pytest.fixture(autouse=True)
def _restore_tie_weights() -> None:
    """Undo what transformers leaves behind when two threads of a test load models at once.

    `from_pretrained` replaces `PreTrainedModel.tie_weights` while it loads and puts back what it
    found, which is the replacement if another load had begun before.
    """
    module = sys.modules.get("transformers.modeling_utils")
    tie_weights = getattr(getattr(module, "PreTrainedModel", None), "tie_weights", None)
    if tie_weights is None:
        return
    if tie_weights.__name__ == "tie_weights":
        _tie_weights[:] = [tie_weights]
    elif _tie_weights:
        module.PreTrainedModel.tie_weights = _tie_weights[0]  # type: ignore[union-attr]
