"""Rollout services that a runner places on a cluster: real services on fake machines.

The test replaces Ray and decides which node has room. A second machine is a network namespace.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.config.tables.rollouts import RolloutsConfig
from clients.runs.directory import RunDirectory
from clients.runs.launch import rollouts_command, trainer_command
from clients.runs.started_services import PlacedAddress, read_placed
from distill_server.runners.ray.engines import EngineProcess, Engines, LostActor
from distill_server.runners.ray.places import ActorPlace
from protos.errors import Unavailable
from protos.rpc.ports import free_ports
from tests.distill_server.conftest import eventually
from tests.end_to_end.processes import ENVIRONMENT, metrics_of, new_run, weights
from tests.namespaces import Namespace, namespace

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS, LAG = 24, 2
PATIENCE = 300.0


@dataclass
class Node:
    """A machine of the cluster: whether it is up, and the actors on it."""

    name: str
    address: str
    prefix: Sequence[str] = ()
    up: bool = True
    actors: list[FakeActor] = field(default_factory=list)

    def lose(self) -> None:
        """Fail as a machine that loses its power."""
        self.up = False
        for actor in self.actors:
            actor.lost = True
            actor.close()


class FakeActor:
    """The interface of the Ray actor `Rank`, without Ray."""

    def __init__(self, node: Node) -> None:
        self.node, self.lost = node, False
        self.process: subprocess.Popen[bytes] | None = None

    def place(self) -> ActorPlace | None:
        if not self.node.up:
            return None
        self.node.actors.append(self)
        [port] = free_ports(1)
        return ActorPlace(self.node.name, self.node.address, (), port)

    def start(
        self,
        directory: Path,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        variables: Mapping[str, str],
        folder: str,
    ) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self.node.prefix, sys.executable, *arguments],
                stdout=output,
                stderr=output,
                env={**environment, **variables},
                cwd=folder,
            )

    def code(self) -> int | None:
        if self.lost:
            raise LostActor("the node died")
        assert self.process is not None
        return self.process.poll()

    def stop(self, directory: Path) -> None:
        self.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)


class Trainer:
    """Runs the real trainer with placed services, as the driver of an attempt does."""

    def __init__(self, run: RunDirectory, nodes: Sequence[Node]) -> None:
        config: Any = run.config()
        directory = run.logs(1)
        directory.mkdir(parents=True)
        rollouts: RolloutsConfig = config.rollouts
        arguments = rollouts_command(config.student, rollouts)[1:]
        process = EngineProcess(arguments, ENVIRONMENT, str(run.path), 1)
        self.engines = Engines(process, len(nodes), directory, lambda n: FakeActor(nodes[n]))
        assert self.engines.start({"here"})
        self._log = run.log_file(1)
        processes = config.train.processes
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                trainer_command(run.path, attempt=1, processes=processes),
                stdout=log,
                stderr=log,
                env={**ENVIRONMENT, **self.engines.variables},
            )
        self.run, self.file = run, directory / "rollout-services.json"

    def log(self) -> str:
        return self._log.read_text()

    def until(self, condition: Any) -> None:
        """Update the services, as the driver does, until the condition is true."""

        def holds() -> bool:
            self.engines.update()
            assert self._process.poll() in (None, 0), self.log()
            return bool(condition())

        eventually(holds, PATIENCE, 0.05)

    def step(self) -> int:
        return max((line["step"] for line in metrics_of(self.run)), default=0)

    def finish(self) -> None:
        self.until(lambda: self._process.poll() == 0)

    def close(self) -> None:
        self.engines.stop()
        self._process.kill()
        self._process.wait(20)


@contextmanager
def trainer(run: RunDirectory, *nodes: Node) -> Iterator[Trainer]:
    new_trainer = Trainer(run, nodes)
    try:
        yield new_trainer
    finally:
        new_trainer.close()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    from tests.student_trainer.tiny import Material, save_material

    root = tmp_path_factory.mktemp("material")
    save_material(root)
    return Material.at(root)


@pytest.fixture
def other_machine() -> Iterator[Namespace]:
    with namespace() as new_namespace:
        yield new_namespace


def job_of(material: Material) -> Any:
    from tests.student_trainer.tiny import rl_job

    changes: dict[str, Any] = {"rollouts__gpus": 2, "rollouts__lag": LAG, "train__processes": 2}
    return rl_job(material, max_steps=STEPS, **changes)


def curve_of(run: RunDirectory) -> list[dict[str, Any]]:
    from tests.student_trainer.tiny import curve

    return curve(metrics_of(run))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_is_lost_and_comes_back(
    material: Material, other_machine: Namespace, tmp_path: Path
) -> None:
    """Two processes and a service on one machine; a service on another, which loses its link."""
    run, expected = (new_run(tmp_path / name, job_of(material)) for name in ("run", "expected"))
    near_node = Node("here", other_machine.here)
    far_node = Node("there", other_machine.there, other_machine.command())
    with trainer(run, near_node, far_node) as disturbed:
        disturbed.until(lambda: disturbed.step() >= 2)
        disturbed.until(lambda: all(service.address for service in read_placed(disturbed.file)[0]))
        other_machine.set_link("down")
        far_node.lose()
        disturbed.until(lambda: not read_placed(disturbed.file)[0][1].address)
        lost_step = disturbed.step()
        # The other service samples.
        disturbed.until(lambda: disturbed.step() >= lost_step + LAG + 1)
        near_node.lose()
        disturbed.until(
            lambda: not any(service.address for service in read_placed(disturbed.file)[0])
        )
        other_machine.set_link("up")
        far_node.up = True
        return_step = disturbed.step()
        assert return_step < STEPS - 2 * LAG
        # The service that is back samples.
        disturbed.until(lambda: disturbed.step() >= return_step + LAG + 1)
        assert [bool(service.address) for service in read_placed(disturbed.file)[0]] == [
            False,
            True,
        ]
        near_node.up = True
        disturbed.finish()
        assert "the order is sent again" in disturbed.log()
        service_log = (run.logs(1) / "rollouts-1.log").read_text()
        assert "runner: this service is lost (the node died)" in service_log
    nodes = (
        Node("here", other_machine.here),
        Node("there", other_machine.there, other_machine.command()),
    )
    with trainer(expected, *nodes) as undisturbed:
        undisturbed.finish()
        assert "the order is sent again" not in undisturbed.log()
    assert [line["step"] for line in curve_of(run)] == [*range(len(curve_of(run)))]
    assert curve_of(run) == curve_of(expected)
    assert weights(run) == weights(expected)
    assert not (run.path / "weights").exists()


def start_scripted(tmp_path: Path, node: Node, script: str) -> Engines:
    process = EngineProcess(["-c", script], ENVIRONMENT, str(tmp_path), 1)
    return Engines(process, 1, tmp_path, lambda n: FakeActor(node))


def test_a_service_that_never_starts_is_told_with_its_reason(tmp_path: Path) -> None:
    node = Node("here", "127.0.0.1")
    engines = start_scripted(
        tmp_path, node, "import sys; sys.exit('error: --model: no such model')"
    )
    file = tmp_path / "rollout-services.json"
    assert engines.start({"here"})
    eventually(lambda: engines.update() or read_placed(file)[0][0].problem)
    assert read_placed(file)[0][0].problem == "--model: no such model"
    assert len(node.actors) == 2, "a first failure may be that of a port"
    message = "service number 0 of this job does not run: --model: no such model"
    with pytest.raises(Unavailable, match=message):
        PlacedAddress(file, 0).locate()
    engines.stop()


def test_a_service_that_always_dies_is_given_up(tmp_path: Path) -> None:
    node = Node("here", "127.0.0.1")
    script = "print('rollout service listening on 1', flush=True); import time; time.sleep(1000)"
    engines = start_scripted(tmp_path, node, script)
    file = tmp_path / "rollout-services.json"
    assert engines.start({"here"})

    def is_settled() -> bool:
        engines.update()
        [service] = read_placed(file)[0]
        return bool(service.address or service.problem)

    for _ in range(4):
        eventually(is_settled)
        [service] = read_placed(file)[0]
        assert service.address, service.problem
        process = node.actors[-1].process
        assert process is not None
        process.kill()
        process.wait()
        eventually(lambda was=service: engines.update() or read_placed(file)[0][0] != was)
    eventually(is_settled)
    assert read_placed(file)[0][0].problem == "the service ended with exit code -9"
    assert len(node.actors) == 4
    engines.stop()


def test_services_of_other_nodes_are_told_to_others(tmp_path: Path) -> None:
    """Snapshots stay in memory only if all share a machine; else addresses are no loopback."""
    script = "print('rollout service listening on 1', flush=True); import time; time.sleep(1000)"
    for nodes, one_machine, host in (({"here"}, True, "127.0.0.1"), ({"x"}, False, "10.0.0.7")):
        root = tmp_path / host
        root.mkdir()
        engines = start_scripted(root, Node("here", "10.0.0.7"), script)
        try:
            assert engines.start(nodes)
            file = root / "rollout-services.json"
            eventually(lambda e=engines, f=file: e.update() or read_placed(f)[0][0].address)
            [service], shared = read_placed(file)
            assert (service.address.rpartition(":")[0], shared) == (host, one_machine)
            assert PlacedAddress(file, 0).locate() == service.address
        finally:
            engines.stop()
