"""A digest of everything beyond messages that trainer and service must agree on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from protos import rollouts_pb2
from protos.errors import WrongState
from protos.rpc.transport import ROLLOUTS_PROTOCOL
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.snapshot import Probe, seal
from student_trainer.rollout_service.service import RolloutServicer
from student_trainer.rollouts.sample_step import sample_step
from student_trainer.rollouts.sampler import rollout_noise
from tests.student_trainer.rollout_service.scripted_service import ScriptedEngine, serve_on_thread

# Digest by protocol number.
DIGESTS = {
    1: "065b283165fb87f1f57e2d1fcc3a196bf624928d64240a04f72594ce67cb7ec2",
    2: "95483257a2afcf073cedc64a172f116d6d1656c8e23fa6b1379c40ac0b2493d3",  # pushes
    3: "7bc36c87357ad12d6b34d05c1fe8cb5067be18479f2dac843f09dda002f93af2",  # no pushes
    4: "b9b8a2ea12a5bb68408c1f8086b597caf75f22b945a7e41429fb32e647dd6724",  # end ids
}


def test_a_change_of_the_protocol_has_a_number(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    digest.update(rollouts_pb2.DESCRIPTOR.serialized_pb)
    digest.update(json.dumps(sample_tokens()).encode())
    digest.update(json.dumps(snapshot(tmp_path)).encode())
    assert DIGESTS[ROLLOUTS_PROTOCOL] == digest.hexdigest(), (
        "the messages, the sampled tokens or the files of a snapshot are others: raise"
        " ROLLOUTS_PROTOCOL in protos/rpc/transport.py, and add the digest"
    )


def sample_tokens() -> list[list[int]]:
    """Return tokens, head ids and draws of a seed and three rollout numbers."""
    logits = 4 * torch.sin(torch.arange(3 * 500, dtype=torch.float64).reshape(3, 500) ** 1.5)
    uniforms, draw_uniforms = (
        torch.stack([rollout_noise(number, 5, 4, draws=draws)[3] for number in (-2, 0, 10**6)])
        for draws in (False, True)
    )
    step = sample_step(
        logits.float(),
        top_k=6,
        temperature=0.8,
        uniforms=uniforms,
        draws=3,
        draw_uniforms=draw_uniforms,
    )
    assert step.draws is not None
    return [step.token_ids.tolist(), step.head_ids.tolist(), step.draws.ids.tolist()]


def snapshot(root: Path) -> list[object]:
    """Return file names, facts, and the files in the facts of a snapshot without weights."""
    probe = Probe(torch.tensor([[1, 2]]), torch.zeros(1, 1))
    seal(root, number=3, dtype="float32", probe=probe)
    facts = json.loads((root / "snapshot.json").read_text())
    return [sorted(path.name for path in root.iterdir()), sorted(facts), sorted(facts["files"])]


def test_a_service_of_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    service = "student_trainer.rollout_service.service"
    monkeypatch.setattr(f"{service}.ROLLOUTS_PROTOCOL", ROLLOUTS_PROTOCOL + 1)
    with (
        serve_on_thread(RolloutServicer(ScriptedEngine())) as address,
        EngineClient([address]) as client,
        pytest.raises(WrongState) as caught,
    ):
        client.info()
    message = f"it has protocol {ROLLOUTS_PROTOCOL + 1}, the job has {ROLLOUTS_PROTOCOL}"
    assert message in caught.value.message
    assert address in caught.value.message
    assert caught.value.field == "rollouts.address"
