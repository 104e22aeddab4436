"""Make the models that `distill demo` and `distill demo-rl` start from, and their checksums.

    python -m benchmarks.evidence.demo_models [--out clients/cli/demos/models]

The teacher (0.24 M weights) learns sums of two numbers below 100 until it gets all unseen ones
right. The student (0.11 M) learns them too, and then noise on its weights leaves few right answers,
as a coarse quantisation would: it learns again in a minute, on every processor. Takes three
minutes on a CPU. Another processor or version of torch makes other models: measure both demos
again then, and write their figures.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from clients.cli.demos.demo import MODELS
from clients.config.tables.data import DataConfig
from student_trainer.tools import addition
from student_trainer.tools.accuracy import accuracy
from student_trainer.tools.pretrain import main as pretrain

TEACHER = ["--layers", "2", "--width", "96", "--until-loss", "0.01"]
STUDENT = ["--layers", "2", "--width", "64", "--until-loss", "0.02"]
NOISE_STEP = 0.05  # of the standard deviation of a matrix
MOST_RIGHT = 0.3  # of the student's answers, after the noise
SUMS = "SHA256SUMS"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODELS, help="replaced")
    options = parser.parse_args(arguments)
    shutil.rmtree(options.out, ignore_errors=True)
    with TemporaryDirectory() as data:
        addition.write(Path(data), seed=0)
        common = ["--data", f"{data}/train.jsonl", "--loss-on", "last", "--steps", "2000"]
        teacher, student = options.out / "teacher", options.out / "student"
        pretrain([*common, *TEACHER, "--tokenizer", "characters", "--out", str(teacher)])
        pretrain([*common, *STUDENT, "--tokenizer", str(teacher), "--out", str(student)])
        held_out = Path(data) / "heldout.jsonl"
        print(f"teacher: {measure_accuracy(teacher, held_out):.1%} right")
        add_noise(student, held_out)
    (options.out / SUMS).write_text(format_checksums(options.out))


def add_noise(student: Path, held_out: Path) -> None:
    """Add Gaussian noise to the matrices of the student until at most MOST_RIGHT are right."""
    model = AutoModelForCausalLM.from_pretrained(student)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    scale, share = 0.0, 1.0
    while share > MOST_RIGHT:
        scale += NOISE_STEP
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight.data = weights[name] + scale * weights[name].std() * noise
        model.save_pretrained(student)
        share = measure_accuracy(student, held_out)
        print(f"student with noise of {scale:.2f}: {share:.1%} right", flush=True)


def measure_accuracy(model: Path, held_out: Path) -> float:
    """Return the share of right greedy answers to the held-out sums."""
    data = DataConfig(path=str(held_out), eval_path=str(held_out))
    return accuracy(str(model), data, prompts=addition.HELD_OUT, max_new_tokens=4)


def format_checksums(models: Path) -> str:
    """Return the lines of `sha256sum` for all files below `models`."""
    paths = sorted(path for path in models.glob("*/*") if path.is_file())
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(models)}\n"
        for path in paths
    )


if __name__ == "__main__":
    main()
