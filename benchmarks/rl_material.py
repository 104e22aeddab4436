"""What the benchmark of reinforcement learning begins with: sums, and a model that half knows them.

Sums of two numbers below 100, as in `student_trainer.tasks.addition`, but every digit of an answer
has 20 spellings (5, 5a, 5b, ...), each one token, which all decode to the digit. An answer is right
whichever it is spelled with. So the vocabulary (203 tokens) is much larger than a head of 32, and a
good policy has more than one good token at every place, as language models do.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from student_trainer.pretrain import END
from student_trainer.pretrain import main as pretrain
from student_trainer.tasks import addition

SPELLINGS = ("", *"abcdefghijklmnopqrs")
# Of each exercise, spelled anew, in what the model is made from.
COPIES = 4


@dataclass(frozen=True)
class Warm:
    """The model before any reward."""

    layers: int
    width: int
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Material:
    """Files and directories. Nobody has learned from `held_out`."""

    train: Path
    held_out: Path
    model: Path


def make_material(work: Path, warm: Warm) -> Material:
    """Made once for each size, in `work`."""
    digest = hashlib.sha256(json.dumps([asdict(warm), SPELLINGS, COPIES]).encode()).hexdigest()
    home = (work / f"model-{digest[:12]}").absolute()
    made = Material(home / "train.jsonl", home / "heldout.jsonl", home / "model")
    if made.model.exists():
        return made
    addition.write(home, seed=0)
    make_tokenizer().save_pretrained(home / "tokenizer")
    exercises = [json.loads(line) for line in made.train.read_text().splitlines()]
    rng = random.Random(0)
    spelled = [one | {"answer": spell(one["answer"], rng)} for one in exercises * COPIES]
    (home / "spelled.jsonl").write_text("".join(json.dumps(one) + "\n" for one in spelled))
    arguments = ["--data", str(home / "spelled.jsonl"), "--loss-on", "last"]
    arguments += [
        "--tokenizer",
        str(home / "tokenizer"),
        "--learning-rate",
        str(warm.learning_rate),
    ]
    arguments += ["--layers", str(warm.layers), "--width", str(warm.width)]
    partial = made.model.with_suffix(".part")
    pretrain([*arguments, "--steps", str(warm.steps), "--out", str(partial)])
    partial.rename(made.model)
    return made


def spell(digits: str, rng: random.Random) -> str:
    return "".join(digit + rng.choice(SPELLINGS) for digit in digits)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A digit with or without its letter is one token; letters are gone from what is decoded."""
    digits = [digit + letter for digit in "0123456789" for letter in SPELLINGS]
    vocab = {token: number for number, token in enumerate([END, "+", "=", *digits])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token=END))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9][a-z]?|."), "isolated")
    inner.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("[a-z]"), "")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)
