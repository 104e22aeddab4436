"""Import contracts, and the cost of imports."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "accelerate", "peft", "safetensors", "datasets", "pyarrow")
SECONDS_FOR_HELP = 0.5


def modules_of(*packages: str) -> list[str]:
    paths = (path for package in packages for path in sorted((ROOT / package).rglob("*.py")))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def packages_loaded_by(code: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(process.stdout.splitlines()[-1].split())


def test_import_contracts_hold() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    process = subprocess.run([command, "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_light_packages_load_no_torch() -> None:
    # These modules run in Ray's workers and import Ray, which may not be installed.
    ray_modules = ("distill_server.runners.ray.driver", "distill_server.runners.ray.rank")
    modules = [
        module
        for module in modules_of("protos", "clients", "distill_server")
        if module not in ray_modules
    ]
    loaded_packages = packages_loaded_by("".join(f"import {module}\n" for module in modules))
    # pyarrow belongs to [teacher] and [train]; the store imports it only when it is used.
    assert loaded_packages & set(HEAVY) == set()


def test_a_teacher_without_a_model_loads_no_torch() -> None:
    """The fake engine starts in a third of the time that it takes with torch."""
    modules = ("teacher_service.program", "teacher_service.engines.fake")
    loaded_packages = packages_loaded_by("".join(f"import {module}\n" for module in modules))
    assert loaded_packages & {"torch", "transformers", "accelerate", "peft"} == set()


def test_the_job_model_is_light() -> None:
    assert (
        packages_loaded_by("import clients.config.on_policy") & {*HEAVY, "grpc", "numpy", "rich"}
        == set()
    )


def test_help_loads_nothing_heavy() -> None:
    loaded_packages = packages_loaded_by(
        "from clients.cli.app import main\nassert main(['--help']) == 0"
    )
    assert loaded_packages & {*HEAVY, "grpc", "numpy", "pydantic", "rich", "yaml"} == set()


def test_help_is_instant() -> None:
    times = []
    for _ in range(3):
        start_time = seconds_of_children()
        subprocess.run([sys.executable, "-m", "clients", "--help"], check=True, capture_output=True)
        times.append(seconds_of_children() - start_time)
    assert min(times) < SECONDS_FOR_HELP


def seconds_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("package", ["clients", "distill_server", "teacher_service"])
def test_python_m_works(package: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", package, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    assert "Usage" in process.stdout or "usage" in process.stdout
