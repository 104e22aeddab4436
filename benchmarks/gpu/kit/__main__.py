"""Makes the kit: an archive with the source, packages, and `run-gpu`.

    python -m benchmarks.gpu.kit [--out FILE]          or: make gpu-kit

The archive has the files that git knows, except pictures and measurements, and the packages of
packages.txt, unpacked: the machine needs Python 3.12 with PyTorch, and nothing is installed there.
An archive above 60 MiB is refused. The packages come from the package index, by uv.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.gpu.kit import run

ROOT = Path(__file__).parents[3]
FOLDER = "distill-gpu-kit"
LIMIT_MIB = 60
PYTHON = ".".join(map(str, run.PYTHON))
PLATFORM = f"{run.PROCESSOR}-manylinux_2_28"
LEFT_OUT = (".png", ".svg", ".ipynb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "gpu-kit.tar.gz")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "packages"
        fetch_packages(packages)
        with tarfile.open(out, "w:gz") as archive:
            for path in list_source():
                archive.add(ROOT / path, f"{FOLDER}/source/{path}")
            archive.add(packages, f"{FOLDER}/packages")
            archive.add(Path(__file__).with_name("run.py"), f"{FOLDER}/run-gpu", filter=executable)
    size = out.stat().st_size / 2**20
    if size > LIMIT_MIB:
        out.unlink()
        sys.exit(f"the kit has {size:.1f} MiB, and {LIMIT_MIB} are allowed: shorten packages.txt")
    print(f"{out}: {size:.1f} MiB")


def list_source() -> list[str]:
    """Return the paths of the files that git knows, relative to the root."""
    command = ["git", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [
        path
        for path in listing.stdout.split("\0")
        if path and not path.endswith(LEFT_OUT) and not path.startswith("benchmarks/results/")
    ]


def fetch_packages(target: Path) -> None:
    requirements = Path(__file__).with_name("packages.txt")
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM]
    subprocess.run([*command, "--target", target, "--requirement", requirements], check=True)


def executable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mode = 0o755
    return entry


if __name__ == "__main__":
    main()
