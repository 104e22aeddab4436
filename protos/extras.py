"""The optional dependencies (extras) of this package: missing packages, and the install command.

The packages are read from the metadata of the installed distribution, so only pyproject.toml lists
them. An argument `extra` is the name of one extra ("train"), or of several, separated by commas.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote, urlsplit

from protos.errors import InvalidInput

DISTRIBUTION = "distill-service"
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_NAME = re.compile(r"[\w.-]+")


def version() -> str:
    """Return the version of the installed distribution; "unknown" in a bare source tree."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def missing_packages(extra: str) -> list[str]:
    """Return the packages of `extra` that are not installed, in the order of the metadata.

    In a bare source tree, the distribution itself is not installed, and its packages are not known.
    The list is then empty, and a failing import gives the better message.
    """
    return [name for name in map(_name_of, _requirements_of(extra)) if not _is_installed(name)]


def install_command(extra: str) -> str:
    """Return the pip command that installs `extra`.

    The command starts with the pip of this Python's environment. It names the checkout or the wheel
    file from which this package was installed, with `-e` for a checkout in editable mode. If this
    source is not known, the command names the packages of the extra.
    """
    source = _install_source()
    if source is not None:
        path, editable = source
        return f"{_pip_command()} install {'-e ' if editable else ''}'{path}[{extra}]'"
    packages = [f"'{package}'" for package in _requirements_of(extra)]
    return " ".join([_pip_command(), "install", *(packages or [f"'.[{extra}]'"])])


def require_extra(
    extra: str, purpose: str, *, field: str = "", only: Collection[str] | None = None
) -> None:
    """Raise InvalidInput if a package of `extra` is not installed.

    - `purpose`: subject of the message, such as "training"
    - `field`: the key that needs the extra
    - `only`: names of the packages to check; None: all packages of the extra
    """
    missing = [name for name in missing_packages(extra) if only is None or name in only]
    if missing:
        raise InvalidInput(
            f"{purpose} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'}"
            " not installed",
            field=field,
            hint=install_command(extra),
        )


def _requirements_of(extra: str) -> list[str]:
    """Return the requirements of `extra`. If it includes other extras, add their requirements."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    extras = set(extra.split(","))
    names: dict[str, None] = {}  # in order, each once
    for requirement in requirements:
        marker = _EXTRA.search(requirement)
        if marker is None or marker[1] not in extras:
            continue
        included = re.match(rf"{DISTRIBUTION}\[([^]]*)\]", requirement)
        of_extra = _requirements_of(included[1]) if included else [requirement.partition(";")[0]]
        names |= dict.fromkeys(name.strip() for name in of_extra)
    return list(names)


def _name_of(requirement: str) -> str:
    name = _NAME.match(requirement)
    return name[0] if name else requirement


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _pip_command() -> str:
    """Return "pip" if it is the pip of this Python, else the full path of this Python's pip."""
    own_pip = Path(sys.executable).with_name("pip")
    pip_on_path = shutil.which("pip")
    return (
        "pip"
        if pip_on_path is None or Path(pip_on_path) == own_pip or not own_pip.exists()
        else str(own_pip)
    )


def _install_source() -> tuple[str, bool] | None:
    """Return the source of the installation (PEP 610), and whether the installation is editable.

    The source is the path of a checkout or of a wheel file. Returns None if the source is not known
    or does not exist any more.
    """
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        direct_url = json.loads(text) if text else {}
        url = urlsplit(direct_url["url"])
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return None
    path = unquote(url.path)
    if url.scheme != "file" or not Path(path).exists():
        return None
    return path, bool(direct_url.get("dir_info", {}).get("editable"))
