"""Images of deploy/images, built and run with buildah on one machine without Docker.

The base is a Debian with Python 3.11, tagged with the name in the Dockerfile's FROM.
Containers have their own files and user, and share the network and processes of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.deploy.dockerfile import DOCKERFILE
from tests.deploy.files import ROOT

BASE = "docker.io/library/python:3.11-slim"
SUITE = "bookworm"
PACKAGES = "python3.11,python3-venv,ca-certificates"
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def missing_requirement() -> str:
    """Return why images cannot be built on this machine; "" if they can."""
    if "DISTILL_BUILD_IMAGES" not in os.environ:
        return "make test-deploy builds images"
    if os.geteuid():
        return "mmdebstrap and buildah's chroot need root"
    absent = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    return f"needs {absent[0]}: make test-deploy" if absent else ""


def debian(path: Path, *packages: str) -> None:
    """Make a minimal Debian with Python: a directory, or an archive if `path` ends with .tar."""
    names = ",".join((PACKAGES, *packages))
    _run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={names}", SUITE, str(path))


def _run(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, f"{command}: {process.stdout[-2000:]}{process.stderr[-4000:]}"
    return process.stdout


class Images:
    """An image store in an empty directory. It takes 8 GB, so it must be closed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = directory / "index"
        self._buildah = ["buildah", "--root", f"{directory}/store", "--runroot", f"{directory}/run"]

    def make_base(self) -> None:
        """Build the base image and a package index with the CPU build of PyTorch."""
        archive = self._directory / "base.tar"
        debian(archive)
        name = self.call("from", "scratch").strip()
        self.call("add", "--quiet", name, str(archive), "/")
        archive.unlink()
        # The machine may reach the package index with its own certificate authorities.
        self.call("add", "--quiet", name, _AUTHORITIES, _AUTHORITIES)
        self.call("config", "--env", f"PIP_CERT={_AUTHORITIES}", name)
        self.call("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", name)
        self.call("commit", "--quiet", "--rm", name, BASE)
        wheels = self._index / "torch"
        wheels.mkdir(parents=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        download += ["--retries", "0", "--extra-index-url", _CPU_INDEX, "-c", "constraints.txt"]
        _run(*download, "--dest", str(wheels), "torch")
        (wheel,) = wheels.iterdir()
        link = f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>'
        (wheels / "index.html").write_text(link)

    def build(self, target: str) -> str:
        """Build a target without a compiler and return the name of the image."""
        options = ["--isolation", "chroot", "--format", "docker", "--pull-never", "--layers"]
        options += ["--volume", f"{self._index}:/index:ro", "--build-arg", "PACKAGES="]
        options += ["--build-arg", "TORCH_INDEX=file:///index", "--file", str(DOCKERFILE)]
        image = f"localhost/distill-{target}:test"
        self.call("build", *options, "--target", target, "--tag", image, str(ROOT))
        return image

    def settings(self, image: str) -> dict[str, Any]:
        """Return the image's configuration in Docker's format."""
        inspection: dict[str, Any] = json.loads(self.call("inspect", "--type", "image", image))
        config: dict[str, Any] = inspection["Docker"]["config"]
        return config

    def container(self, image: str) -> Container:
        """Return a new container of the image."""
        name = self.call("from", "--pull-never", image).strip()
        return Container(self._buildah, name, Path(self.call("mount", name).strip()))

    def call(self, *words: str) -> str:
        """Run a buildah command and return its standard output."""
        return _run(*self._buildah, *words)

    def close(self) -> None:
        """Delete all containers and images."""
        self.call("rm", "--all")
        _run("rm", "--recursive", "--force", str(self._directory))  # shutil.rmtree takes minutes


class Container:
    """A container; `root` is its root directory."""

    def __init__(self, buildah: list[str], name: str, root: Path) -> None:
        self._buildah, self.name, self.root = buildah, name, root
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str) -> str:
        """Run a command as the user of the image and return its standard output."""
        return _run(*self._command(command, {}, ()))

    def start(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] = {},
        volumes: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a command as the user of the image; `close` kills it."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(command, environment, volumes),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill the started commands and their children."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for member in [*parent.children(recursive=True), parent]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
            process.wait(20)
        self._processes.clear()

    def _command(
        self, command: Sequence[str], environment: Mapping[str, str], volumes: Sequence[str]
    ) -> list[str]:
        options = ["--isolation", "chroot", "--network", "host"]
        options += [word for volume in volumes for word in ("--volume", volume)]
        options += [word for pair in environment.items() for word in ("--env", "=".join(pair))]
        return [*self._buildah, "run", *options, self.name, "--", *command]
