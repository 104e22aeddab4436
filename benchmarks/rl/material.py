"""The material of the benchmark of reinforcement learning: sums, and a partly trained model.

The sums are those of the demo (`student_trainer.tools.addition`), tokenized as bytes. The
vocabulary has 257 tokens, so that a head of 32 is a small part of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from student_trainer.tools import addition
from student_trainer.tools.pretrain import main as pretrain

# One token per byte, and the end token.
VOCABULARY = 257


@dataclass(frozen=True)
class Warm:
    """The model before reinforcement learning: pretrained to `until_loss`, or for `steps` steps."""

    layers: int
    width: int
    steps: int
    until_loss: float


@dataclass(frozen=True)
class RlMaterial:
    """Paths of the data and the model. The sums of `held_out` are never trained on."""

    train: Path
    held_out: Path
    model: Path


def make_material(work: Path, warm: Warm) -> RlMaterial:
    """Make the data and the model in `work`, once per size."""
    digest = hashlib.sha256(json.dumps(asdict(warm)).encode()).hexdigest()
    home = (work / f"model-{digest[:12]}").absolute()
    material = RlMaterial(home / "train.jsonl", home / "heldout.jsonl", home / "model")
    if material.model.exists():
        return material
    addition.write(home, seed=0)
    partial = material.model.with_suffix(".part")
    arguments = ["--data", str(material.train), "--loss-on", "last", "--out", str(partial)]
    arguments += ["--tokenizer", "bpe", "--vocab-size", str(VOCABULARY)]
    arguments += ["--layers", str(warm.layers), "--width", str(warm.width)]
    arguments += ["--steps", str(warm.steps), "--until-loss", str(warm.until_loss)]
    pretrain([*arguments, "--learning-rate", "3e-3"])
    partial.rename(material.model)
    return material
