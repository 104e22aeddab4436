"""Write a data set of sums: two numbers below 100, the answer's digits reversed: `12+34=` -> `64`.

Every pair is in exactly one of train.jsonl and heldout.jsonl (columns prompt, answer), so held-out
prompts were never used in training.

    python -m student_trainer.tools.addition OUT_DIR [--seed N]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

HELD_OUT = 1000


def examples() -> list[dict[str, str]]:
    """Return all 10,000 pairs of prompt and answer.

    The digits of an answer are reversed, so that a model can write a sum in the order of the
    carries.
    """
    return [
        {"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a in range(100) for b in range(100)
    ]


def write(out: Path, seed: int) -> None:
    """Write train.jsonl (9,000 pairs) and heldout.jsonl (1,000 pairs) to `out`.

    The seed splits them.
    """
    pairs = examples()
    random.Random(seed).shuffle(pairs)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", pairs[HELD_OUT:]), ("heldout", pairs[:HELD_OUT])):
        lines = (json.dumps(example) + "\n" for example in part)
        (out / f"{name}.jsonl").write_text("".join(lines))


def main() -> None:
    """Read the arguments and write the data set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="directory for the two files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split")
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
