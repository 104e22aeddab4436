"""The extras of this package (`train`, `teacher`, ...): which packages of one are missing, and the
command that installs them.

The list of packages is that of the installed distribution's metadata, so pyproject.toml is the only
place that names them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from protos.errors import InvalidInput

DISTRIBUTION = "distill-service"
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_NAME = re.compile(r"[\w.-]+")


def version() -> str:
    """The version of the installed distribution, "unknown" where only the source is there."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def missing_packages(extra: str) -> list[str]:
    """The packages of `extra` that are not installed, in alphabetical order.

    `extra` may be several, separated by commas, here and in the other functions.

    An empty list where the distribution itself is not installed (a bare source tree): nothing is
    known there, and the import that fails says more.
    """
    return [name for name in map(_name_of, _requirements(extra)) if not _installed(name)]


def install_command(extra: str) -> str:
    """The command that installs `extra`, from where this package was installed.

    A checkout or a wheel file is named by its path. Where neither is known the command names the
    packages of the extra themselves.
    """
    source = _source()
    if source is not None:
        return f"pip install '{source}[{extra}]'"
    packages = [f"'{package}'" for package in _requirements(extra)]
    return " ".join(["pip install", *packages]) if packages else f"pip install '.[{extra}]'"


def require_extra(extra: str, what: str, *, field: str = "") -> None:
    """Raises InvalidInput where a package of `extra` is missing; `what` needs it."""
    missing = missing_packages(extra)
    if missing:
        raise InvalidInput(
            f"{what} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'}"
            " not installed",
            field=field,
            hint=install_command(extra),
        )


def _requirements(extra: str) -> list[str]:
    """The requirements of `extra`, and of the extras of this package that it includes."""
    try:
        everything = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted = set(extra.split(","))
    found: dict[str, None] = {}  # in order, each once
    for requirement in everything:
        marker = _EXTRA.search(requirement)
        if marker is None or marker[1] not in wanted:
            continue
        included = re.match(rf"{DISTRIBUTION}\[([^]]*)\]", requirement)
        of_extra = _requirements(included[1]) if included else [requirement.partition(";")[0]]
        found |= dict.fromkeys(name.strip() for name in of_extra)
    return list(found)


def _name_of(requirement: str) -> str:
    name = _NAME.match(requirement)
    return name[0] if name else requirement


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _source() -> str | None:
    """The checkout or wheel file that this package was installed from (PEP 610), if it is there."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlsplit(json.loads(text)["url"]) if text else None
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return None
    if url is None or url.scheme != "file":
        return None
    path = unquote(url.path)
    return path if Path(path).exists() else None
