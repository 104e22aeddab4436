"""Generated code is up to date, and the wheel has the intended files."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = {"clients", "distill_server", "protos", "student_trainer", "teacher_service"}
PROTOS = ("protos/teacher.proto", "protos/distill.proto", "protos/rollouts.proto")


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    """Run the command of `make protos` with another output directory."""
    binaries = Path(sys.executable).parent
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I."),
            *(
                f"--{kind}_out={tmp_path}"
                for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
            ),
            f"--plugin=protoc-gen-mypy={binaries / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={binaries / 'protoc-gen-mypy_grpc'}",
            *PROTOS,
        ],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    generated = {path.name: path.read_bytes() for path in (tmp_path / "protos").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "protos").glob("*_pb2*.py*")}
    assert sorted(generated) == sorted(committed)
    outdated = [name for name in generated if generated[name] != committed[name]]
    assert outdated == [], "run `make protos` and commit"


def test_makefile_generates_the_same_protos() -> None:
    assert " ".join(PROTOS) in (ROOT / "Makefile").read_text()
    assert sorted(PROTOS) == sorted(f"protos/{path.name}" for path in ROOT.glob("protos/*.proto"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The file names in the wheel, which is built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_editable_install_names_a_directory(tmp_path: Path) -> None:
    """Type checkers and editors read directories, but do not run import hooks."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", tmp_path]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name).decode() for name in archive.namelist()}
    (lines,) = (text for name, text in contents.items() if name.endswith(".pth"))
    assert lines.splitlines() == [str(ROOT)]
    assert not any(name.endswith(".py") for name in contents)
    # Such a package would hide the directory of the same name in the project of a user.
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == PACKAGES


def test_the_wheel_holds_five_packages(wheel: set[str]) -> None:
    top_level_names = {name.split("/")[0] for name in wheel}
    assert {name for name in top_level_names if not name.endswith(".dist-info")} == PACKAGES


def test_the_wheel_holds_every_module(wheel: set[str]) -> None:
    """A rule in .gitignore that matches a package folder would exclude it from the wheel."""
    modules = {
        str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    }
    assert modules <= wheel


def test_the_wheel_ships_its_license(wheel: set[str]) -> None:
    (license_file,) = (name for name in wheel if name.endswith(".dist-info/licenses/LICENSE"))
    assert license_file
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_project_has_what_every_project_has() -> None:
    required_files = ["LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"]
    assert [name for name in required_files if not (ROOT / name).is_file()] == []
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    (workflow,) = (ROOT / ".github/workflows").glob("*.yml")
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    assert {"run": "bash .ci/run"} in [step for job in jobs.values() for step in job["steps"]]


def test_the_wheel_ships_what_is_not_python(wheel: set[str]) -> None:
    shipped = {"clients/cli/demos/demo_job.toml", "clients/html/report.css"}
    shipped |= {f"clients/html/{name}.css" for name in ("preview", "notebook")}
    shipped |= {f"{package}/py.typed" for package in PACKAGES}
    models = [path for path in ROOT.glob("clients/cli/demos/models/*/*") if path.is_file()]
    assert models
    shipped |= {str(path.relative_to(ROOT)) for path in models}
    assert shipped | {"protos/teacher.proto", "protos/teacher_pb2.pyi"} <= wheel
    pages = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("distill_server/*/static/**/*")
        if path.is_file()
    }
    assert pages
    assert pages <= wheel
