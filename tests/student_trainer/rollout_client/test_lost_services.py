"""The loss of a trainer's own rollout services ends the orders of all its processes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
import torch.distributed

from protos.errors import Unavailable
from student_trainer.parallel.collectives import make_accelerator, raise_on_all_ranks
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.failed_orders import fail_when_lost
from student_trainer.rollout_client.local_services import RolloutServices
from tests.forks import Forks
from tests.student_trainer.rollout_service.material import order
from tests.student_trainer.saving import LIMIT

# A service that gets ready and then ends. Nothing listens at its address.
NOBODY = "127.0.0.1:1"
DYING = (
    f"import sys; print('rollout service listening on {NOBODY}', flush=True);"
    " sys.exit('error: no memory')"
)


def _sample_until_lost(out: Path) -> None:
    """Sample as a step does: every process orders its share, and errors are raised on all."""
    rank = torch.distributed.get_rank()
    accelerator = make_accelerator(LIMIT)
    services = RolloutServices([NOBODY], "token")
    if rank == 0:
        services.start([([sys.executable, "-c", DYING], {})])
    with EngineClient([NOBODY], rank=rank, patience_seconds=3600) as client:
        fail_when_lost(services, client, out / "logs" / "lost.json", main=rank == 0)
        try:
            raise_on_all_ranks(accelerator, lambda: dict(client.sample(order(out))))
        except Unavailable as error:
            (out / f"{rank}.txt").write_text(str(error))
    services.stop()


def test_every_rank_ends_with_the_same_error(tmp_path: Path) -> None:
    """The error comes long before the patience of the other ranks ends."""
    assert Forks(2, tmp_path / "group", _sample_until_lost, tmp_path).wait() == [0, 0]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert "the rollout service has ended 4 times" in first
    assert "no memory" in first


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loss-watch"]


def test_the_watch_ends_with_the_client(tmp_path: Path) -> None:
    with EngineClient([NOBODY]) as client:
        services = RolloutServices([NOBODY], "")
        fail_when_lost(services, client, tmp_path / "lost.json", main=False)
        [watch] = watches()
    watch.join(30)
    assert not watches()
