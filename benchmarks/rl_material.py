"""What the benchmark of reinforcement learning begins with: sums, and a model that half knows them.

The sums are those of the demo (`student_trainer.tools.addition`), read and written in bytes: a
vocabulary of 257 tokens, of which a head of 32 is the smaller part.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from student_trainer.tools import addition
from student_trainer.tools.pretrain import main as pretrain

# A byte each, and the end.
VOCABULARY = 257


@dataclass(frozen=True)
class Warm:
    """The model before any reward: made until `until_loss`, or for `steps` steps."""

    layers: int
    width: int
    steps: int
    until_loss: float


@dataclass(frozen=True)
class Material:
    """Files and directories. No sum of `held_out` is learned, neither with a reward nor before."""

    train: Path
    held_out: Path
    model: Path


def make_material(work: Path, warm: Warm) -> Material:
    """Made once for each size, in `work`."""
    digest = hashlib.sha256(json.dumps(asdict(warm)).encode()).hexdigest()
    home = (work / f"model-{digest[:12]}").absolute()
    made = Material(home / "train.jsonl", home / "heldout.jsonl", home / "model")
    if made.model.exists():
        return made
    addition.write(home, seed=0)
    partial = made.model.with_suffix(".part")
    arguments = ["--data", str(made.train), "--loss-on", "last", "--out", str(partial)]
    arguments += ["--tokenizer", "bpe", "--vocab-size", str(VOCABULARY)]
    arguments += ["--layers", str(warm.layers), "--width", str(warm.width)]
    arguments += ["--steps", str(warm.steps), "--until-loss", str(warm.until_loss)]
    pretrain([*arguments, "--learning-rate", "3e-3"])
    partial.rename(made.model)
    return made
