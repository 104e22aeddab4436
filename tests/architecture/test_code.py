"""Rules of the source that no linter checks: one test per rule, which lists every violation."""

from __future__ import annotations

import ast

from tests.architecture.sources import PRODUCT, python_files, relative_name

# These modules run code from data.
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


def test_sources_are_complete() -> None:
    assert len(PRODUCT) > 400


def test_ascii() -> None:
    violations = [
        f"{relative_name(path)}:{number}"
        for path in [*PRODUCT, *python_files("tests", "benchmarks")]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if not line.isascii()
    ]
    assert violations == []


def code_from_data(tree: ast.AST) -> list[int]:
    """Return the lines that load pickles, start a shell or evaluate text, under any import name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names |= {alias.asname or alias.name: alias.name for alias in node.names}
            case ast.ImportFrom():
                module = node.module or ""
                names |= {
                    alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names
                }
    return [node.lineno for node in ast.walk(tree) if _is_forbidden(node, names)]


def _is_forbidden(node: ast.AST, names: dict[str, str]) -> bool:
    match node:
        case ast.Import():
            modules = {alias.name.split(".")[0] for alias in node.names}
            return bool(FORBIDDEN_MODULES & modules)
        case ast.ImportFrom():
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            package = (node.module or "").split(".")[0]
            return package in FORBIDDEN_MODULES or bool(FORBIDDEN_CALLS & full_names)
        case ast.Call():
            root_name, dot, attributes = ast.unparse(node.func).partition(".")
            return f"{names.get(root_name, root_name)}{dot}{attributes}" in FORBIDDEN_CALLS
        case ast.keyword(arg=str(name), value=ast.Constant(value=bool(value))):
            return (name, value) in FORBIDDEN_KEYWORDS
    return False


def test_data_never_becomes_code() -> None:
    violations = [
        f"{relative_name(path)}:{line}"
        for path in PRODUCT
        for line in code_from_data(ast.parse(path.read_text()))
    ]
    assert violations == []


def test_models_never_bring_their_own_code() -> None:
    violations = [
        f"{relative_name(path)}:{node.value.lineno}"
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword)
        and node.arg == "trust_remote_code"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert violations == []
