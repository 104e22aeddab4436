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
FORBIDDEN_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"),
}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("torch.load", "numpy.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
}
FORBIDDEN_KEYWORDS = {("shell", True), ("allow_pickle", True), ("weights_only", False)}


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


def without_docstring(path: Path) -> Iterator[str]:
    """The public classes and functions of a module, and the public methods of those classes."""
    waiting: list[tuple[str, ast.Module | ast.ClassDef]] = [("", ast.parse(path.read_text()))]
    while waiting:
        outer, body = waiting.pop()
        for node in body.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_"):
                if ast.get_docstring(node) is None:
                    yield f"{name_of(path)}:{node.lineno} {outer}{node.name}"
                if isinstance(node, ast.ClassDef):
                    waiting.append((f"{outer}{node.name}.", node))


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_every_public_definition_has_a_docstring(path: Path) -> None:
    assert list(without_docstring(path)) == []
    assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_ascii(path: Path) -> None:
    lines = path.read_text().splitlines()
    odd = [f"{name_of(path)}:{n}" for n, line in enumerate(lines, 1) if not line.isascii()]
    assert odd == []


def code_from_data(tree: ast.AST) -> list[int]:
    """The lines that open a pickle, start a shell, or evaluate text, under whatever name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names |= {alias.asname or alias.name: alias.name for alias in node.names}
            case ast.ImportFrom():
                module = node.module or ""
                names |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
    return [node.lineno for node in ast.walk(tree) if _is_forbidden(node, names)]


def _is_forbidden(node: ast.AST, names: dict[str, str]) -> bool:
    match node:
        case ast.Import():
            modules = {alias.name.split(".")[0] for alias in node.names}
            return bool(FORBIDDEN_MODULES & modules)
        case ast.ImportFrom():
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            top = (node.module or "").split(".")[0]
            return top in FORBIDDEN_MODULES or bool(FORBIDDEN_CALLS & found)
        case ast.Call():
            first, dot, rest = ast.unparse(node.func).partition(".")
            return f"{names.get(first, first)}{dot}{rest}" in FORBIDDEN_CALLS
        case ast.keyword(arg=str(name), value=ast.Constant(value=bool(value))):
            return (name, value) in FORBIDDEN_KEYWORDS
    return False


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_data_never_becomes_code(path: Path) -> None:
    lines = code_from_data(ast.parse(path.read_text()))
    assert [f"{name_of(path)}:{line}" for line in lines] == []


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_models_never_bring_their_own_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
