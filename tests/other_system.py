"""Runs this project's modules as on macOS or Windows, on a machine with Linux.

Modules of this project see another `sys.platform`, and modules without the names that typeshed (the
description of the standard library in mypy) does not list for that system. All other modules, which
know where they run, see the real ones. In addition:

Windows  opens no directory, syncs no file that is open for reading, takes no descriptor in
         os.utime; renames over nothing, and renames and deletes no open file; has `msvcrt.locking`.
         A text file or a pipe without an encoding is an error: it would not be UTF-8.
macOS    has no /proc, /sys and /dev/shm, and no `prctl`.
"""

from __future__ import annotations

import ast
import builtins
import errno
import fcntl
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VARIABLE = "DISTILL_TEST_SYSTEM"
OURS = ("clients", "protos", "distill_server", "teacher_service", "student_trainer")
LINUX_ONLY = ("/proc", "/sys", "/dev/shm")


def environment(system: str, directory: Path) -> dict[str, str]:
    """Return variables with which Python processes run as on `system`: "darwin" or "win32"."""
    (directory / "sitecustomize.py").write_text(
        "from tests.other_system import simulate\nsimulate()\n"
    )
    path = os.pathsep.join([str(directory), str(Path(__file__).parents[1])])
    variables = {**os.environ, VARIABLE: system, "PYTHONPATH": path}
    if system == "win32":
        variables |= {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONIOENCODING": "cp1252"}
    return variables


def simulate() -> None:
    system = os.environ[VARIABLE]
    overrides: dict[str, dict[str, Any]] = {"sys": {"platform": system}}
    if system == "win32":
        overrides["os"] = {"name": "nt", "open": _open, "fsync": _fsync, "utime": _utime}
        overrides["ctypes"] = {"CDLL": _refuse_prctl}
        _hold_open_files()
        warnings.simplefilter("ignore", EncodingWarning)
        pattern = rf"({'|'.join(OURS)})\b"
        warnings.filterwarnings("error", category=EncodingWarning, module=pattern)
    else:
        overrides["ctypes"] = {"CDLL": _refuse_prctl}
        _hide_paths()
    _import_as_on(system, overrides)


def _import_as_on(system: str, overrides: dict[str, dict[str, Any]]) -> None:
    real_import = builtins.__import__
    proxies: dict[str, types.ModuleType] = {"msvcrt": _msvcrt()} if system == "win32" else {}

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        importer = str((globals or {}).get("__name__", "")).partition(".")[0]
        if name == "msvcrt" and importer in OURS:  # other modules recognise Windows by it
            return proxies[name]
        module = real_import(name, globals, locals, fromlist, level)
        if level or importer not in OURS or name.partition(".")[0] not in sys.stdlib_module_names:
            return module
        if name == "os.path" and not fromlist:
            name = "os"
        if "." in name:
            return module
        own = names_on(name, "linux")
        hidden = own - names_on(name, system)
        if own and hidden == own:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if not hidden and name not in overrides:
            return module
        return proxies.setdefault(name, _Proxy(module, hidden, overrides.get(name, {})))

    builtins.__import__ = import_


class _Proxy(types.ModuleType):
    """A module without the names `hidden`, and with the values `values`."""

    def __init__(self, module: types.ModuleType, hidden: set[str], values: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__["_parts"] = module, hidden
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        module, hidden = self.__dict__["_parts"]
        if name in hidden:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return getattr(module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_parts"][0], name, value)


@cache
def names_on(module: str, platform: str) -> set[str]:
    """Return the names that typeshed lists for a module of the standard library on a platform."""
    spec = find_spec("mypy")
    assert spec is not None
    assert spec.origin is not None
    stubs = Path(spec.origin).with_name("typeshed") / "stdlib"
    files = (stubs / f"{module}.pyi", stubs / module / "__init__.pyi")
    stub = next((file for file in files if file.exists()), None)
    if stub is None:
        return set()
    names = _names_in(ast.parse(stub.read_text("utf-8")).body, platform)
    return {name for name in names if not name.startswith("_")}


def _names_in(body: Iterable[ast.stmt], platform: str) -> Iterable[str]:
    system = types.SimpleNamespace(platform=platform, version_info=sys.version_info)
    for node in body:
        match node:
            case ast.If(test=test):
                code = compile(ast.Expression(test), "stub", "eval")
                branch = node.body if eval(code, {"sys": system}) else node.orelse
                yield from _names_in(branch, platform)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.ImportFrom(names=aliases):  # `as` the same name marks a public name
                yield from (alias.name for alias in aliases if alias.asname == alias.name)


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, mode)


def _fsync(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(descriptor)


def _utime(path: Any, *times: Any, **options: Any) -> None:
    if isinstance(path, int):
        raise TypeError("utime: path should be string, bytes or os.PathLike, not int")
    os.utime(path, *times, **options)


def _refuse_prctl(name: str | None, *_: Any) -> None:
    raise TypeError(f"CDLL({name!r}) has no prctl")


def _msvcrt() -> types.ModuleType:
    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (count, os.lseek(descriptor, 0, os.SEEK_CUR)) == (1, 0), "the same byte for all"
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            code = errno.EDEADLOCK if mode == module.LK_LOCK else errno.EACCES
            raise OSError(code, os.strerror(code)) from None

    module: Any = types.ModuleType("msvcrt")
    module.locking, module.LK_LOCK, module.LK_NBLCK = locking, 1, 2
    return module


def _hold_open_files() -> None:
    def require_closed(path: Any) -> None:
        name = os.path.abspath(os.fspath(path))
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                continue
            if target == name or target.startswith(f"{name}/"):
                raise PermissionError(errno.EACCES, "another process uses the file", name)

    def guarded(function: Callable[..., None], *, replaces: bool = True) -> Callable[..., None]:
        def call(path: Any, *others: Any, **options: Any) -> None:
            if options.get("dir_fd") is None:
                require_closed(path)
            if others and os.path.lexists(others[0]) and (not replaces or os.path.isdir(others[0])):
                raise FileExistsError(errno.EEXIST, "File exists", str(others[0]))
            function(path, *others, **options)

        return call

    os.rename = guarded(os.rename, replaces=False)
    os.replace, os.unlink, os.remove = map(guarded, (os.replace, os.unlink, os.remove))


def _hide_paths() -> None:
    def require_visible(path: Any) -> None:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if any(name == place or name.startswith(f"{place}/") for place in LINUX_ONLY):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            require_visible(arguments[0])

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *others: Any, **options: Any) -> Any:
            require_visible(path)
            return function(path, *others, **options)

        return call

    sys.addaudithook(hook)
    os.stat, os.lstat, os.readlink = map(guarded, (os.stat, os.lstat, os.readlink))
