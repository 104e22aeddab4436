"""Settings that libraries read by name, and ignore without a word if they do not know the name."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from functools import cache
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from tests.architecture.sources import PRODUCT

# The prefix of environment variables, and the packages of which one reads them. Slurm and
# torchrun set theirs for a process, and tests with a real Slurm read them.
_READERS = {
    "GRPC": ("grpc",),
    "HF": ("huggingface_hub",),
    "TOKENIZERS": ("tokenizers",),
    "WANDB": ("wandb",),
    "GLOO": ("torch.distributed", "torch.lib"),
    "AWS": ("botocore", "pyarrow"),
    "GOOGLE": ("pyarrow",),
    "CLOUD": ("pyarrow",),
    "VLLM": ("vllm",),
    "RAY": ("ray",),
}
_STRING = re.compile(r'"([^"\n]*)"')
_VARIABLE = re.compile(rf"({'|'.join(_READERS)})_[A-Z0-9_]*[A-Z0-9]")


@cache
def strings() -> frozenset[str]:
    """Return every string of the product's code that has one line and no quotes in it."""
    return frozenset(text for path in PRODUCT for text in _STRING.findall(path.read_text()))


def variables(prefix: str) -> set[str]:
    """Return the names of environment variables with the prefix that the product uses."""
    matches = map(_VARIABLE.fullmatch, strings())
    return {match[0] for match in matches if match and match[1] == prefix}


def unknown_names(names: set[str], packages: tuple[str, ...]) -> set[str]:
    """Return those of `names` that no file of the packages contains."""
    unknown = set(names)
    for package in packages:
        spec = importlib.util.find_spec(package.partition(".")[0])
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent.joinpath(*package.split(".")[1:])
        for path in sorted(folder.rglob("*"), key=lambda path: path.suffix != ".py"):
            if not unknown:
                break
            if path.suffix == ".py" or ".so" in path.suffixes:
                content = path.read_bytes()
                unknown -= {name for name in unknown if name.encode() in content}
    return unknown


@pytest.mark.parametrize("prefix", _READERS)
def test_the_installed_library_knows_every_variable(prefix: str) -> None:
    packages = _READERS[prefix]
    if importlib.util.find_spec(packages[0].partition(".")[0]) is None:
        pytest.skip(f"{packages[0]} is not installed")
    names = variables(prefix)
    assert names, f"no variable {prefix}_ is left: remove the prefix from this test"
    assert unknown_names(names, packages) == set()


def test_grpc_knows_every_option_of_channels_and_servers() -> None:
    names = {name for name in strings() if re.fullmatch(r"grpc\.[a-z0-9_.]+", name)}
    assert len(names) > 10
    (library,) = Path(cygrpc.__file__).parent.glob("cygrpc*.so")
    content = library.read_bytes()
    assert {name for name in names if f"{name}\0".encode() not in content} == set()


def test_sqlite_knows_every_pragma() -> None:
    names = {name for text in strings() for name in re.findall(r"PRAGMA (\w+)", text)}
    known_names = {name for (name,) in sqlite3.connect(":memory:").execute("PRAGMA pragma_list")}
    assert names
    assert names <= known_names
