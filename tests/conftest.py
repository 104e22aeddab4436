"""The environment of every test, set before any test imports torch, Triton or gRPC."""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any

import pytest

import protos  # noqa: F401  # so that gRPC leaves forked processes alone
from tests.forks import fork_from, forking_address

# One thread per test worker: workers share the processors, and idle OpenMP threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU, Triton interprets kernels in Python; it reads the variable at its import.
if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Caches of other libraries stay where they are; each test has its own cache of records.
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("HF_HOME", str(_USER_CACHE / "huggingface"))
os.environ.setdefault("MPLCONFIGDIR", str(_USER_CACHE / "matplotlib"))
_test_numbers = count()

# Folders whose tests take seconds each, the longest first.
_LONG_FOLDERS = (
    *("distill_server/teachers", "end_to_end", "faults", "student_trainer/parallel"),
    *("teacher_service/capture", "clients/teacher", "student_trainer/methods", "distill_server"),
    *("student_trainer/rollout_service", "clients/cli", "security", "benchmarks"),
)

_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
_running_a_test = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--no-processes`, which `make test-fast` uses."""
    help_text = "skip every test at the moment it starts a process"
    parser.addoption("--no-processes", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-processes"):
        sys.addaudithook(_refuse_processes)
    if (address := getattr(config, "workerinput", {}).get("fork_server")) is not None:
        fork_from(address)
    gc.disable()  # collection makes no garbage; the search for some took 40% of its time


def pytest_collection_finish() -> None:
    """Leave the millions of objects of imports and collection out of all later searches."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # for Hypothesis, which is then imported and asks who refers to its generators


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all workers of pytest-xdist fork their processes from one, which has the imports."""
    if not node.config.getoption("--no-processes"):
        node.workerinput["fork_server"] = forking_address()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every worker begin with long tests, so that none runs one alone at the end.

    `--dist worksteal` gives each worker an equal run of consecutive items. The modules of long
    folders are dealt to these runs in turn, and short tests fill the runs up.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    long_modules = [module for module in modules if _folder_rank(module[0].path) is not None]
    long_modules.sort(key=lambda module: _folder_rank(module[0].path) or 0)
    short_items = (
        item for module in modules if _folder_rank(module[0].path) is None for item in module
    )
    order: list[pytest.Item] = []
    for worker in range(workers):
        size = (len(items) - len(order)) // (workers - worker)
        long_items = [item for module in long_modules[worker::workers] for item in module]
        order += long_items
        order += islice(short_items, max(0, size - len(long_items)))
    items[:] = [*order, *short_items]


def _folder_rank(path: Path) -> int | None:
    folder = path.parent.relative_to(Path(__file__).parent).as_posix()
    ranks = (i for i, name in enumerate(_LONG_FOLDERS) if f"{folder}/".startswith(f"{name}/"))
    return next(ranks, None)


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


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def own_cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of another test must not be checked already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches / str(next(_test_numbers))))
