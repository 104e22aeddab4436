"""The programs, extras and files that the Dockerfile names exist; test_images.py builds images."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.deploy.dockerfile import DOCKERFILE, TARGETS
from tests.deploy.files import PROJECT, ROOT, VERSION, WHEEL

CONTEXT_PATHS = [
    line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
]


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_runs_a_program_of_ours_as_another_user_than_root(name: str) -> None:
    target = TARGETS[name]
    (program,) = target.entrypoint
    assert program in PROJECT["scripts"]
    assert target.user == "10001:10001"


@pytest.mark.parametrize("name", TARGETS)
def test_the_extras_exist(name: str) -> None:
    installs = TARGETS[name].installs
    (extras,) = re.findall(r'"\.\[([^\]]+)\]"', installs)
    offered = set(PROJECT["optional-dependencies"])
    assert set(extras.replace("${TEACHER_EXTRA}", "teacher,vllm").split(",")) <= offered
    assert "sbom.json" in installs


def test_the_version_is_ours() -> None:
    assert re.findall(r'image\.version="(.*)"', DOCKERFILE.read_text()) == [VERSION]


def test_what_is_sent_to_the_builder_is_what_the_package_is_made_of() -> None:
    """The build context has every file of the wheel and no other tracked file."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line for line in lines if line and line[0] not in "#!"] == ["*", "**/__pycache__"]
    assert [name for name in CONTEXT_PATHS if not (ROOT / name).exists()] == []
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    context_files = {path for path in tracked if path.split("/")[0] in CONTEXT_PATHS}
    assert {path.split("/")[0] for path in context_files} == set(CONTEXT_PATHS)
    build_inputs = {
        PROJECT["readme"],
        *(name.split("/")[0] for name in PROJECT["license-files"]),
        "pyproject.toml",
        "constraints.txt",
    }
    assert set(CONTEXT_PATHS) == build_inputs | set(WHEEL["packages"])
