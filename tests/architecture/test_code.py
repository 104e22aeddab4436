"""Rules of the source that no linter of ours knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("clients", "distill_server", "protos", "student_trainer", "teacher_service")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# They run code that is hidden in data.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"torch.load", "eval", "exec", "os.system", "numpy.load", "np.load", "yaml.load"}


def sources(*folders: str) -> list[Path]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if "_pb2" not in path.name)


OURS = sources(*PACKAGES)
EVERYTHING = [*OURS, *sources("tests", "benchmarks")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_is_something_to_check() -> None:
    assert len(OURS) > 20


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_sizes(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for node in functions(path)
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_ascii(path: Path) -> None:
    lines = path.read_text().splitlines()
    odd = [f"{name_of(path)}:{n}" for n, line in enumerate(lines, 1) if not line.isascii()]
    assert odd == []


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_data_never_becomes_code(path: Path) -> None:
    bad = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                modules = [alias.name for alias in node.names]
            case ast.ImportFrom():
                modules = [node.module or ""]
            case _:
                modules = []
        if FORBIDDEN_MODULES & {module.split(".")[0] for module in modules}:
            bad.append(f"{name_of(path)}:{node.lineno}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            bad.append(f"{name_of(path)}:{node.lineno}")
    assert bad == []


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_models_never_bring_their_own_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
