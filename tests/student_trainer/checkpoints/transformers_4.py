"""Reads model directories in transformers 4: its log-probs of the ids 1 to 16, and its tokens.

    python -m tests.student_trainer.checkpoints.transformers_4 OUTPUT DIRECTORY...

Writes a safetensors file with `DIRECTORY/logits` and, if the directory has a tokenizer,
`DIRECTORY/ids` for each directory. Imports nothing of this program, which needs transformers 5.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

PACKAGES = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.2")
TEXT = "17+25=<|im_end|>42 <|tool|>"


def install() -> Path:
    """Return a directory with transformers 4 and what it needs; skip the test without PyPI.

    The directory stays for later runs. Torch and the rest come from this environment.
    """
    directory = Path(tempfile.gettempdir()) / f"distill-{PACKAGES[0]}-{os.getuid()}"
    if not directory.is_dir():
        with tempfile.TemporaryDirectory(dir=directory.parent) as partial:
            command = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
            process = subprocess.run(
                [sys.executable, "-m", *command, "--target", f"{partial}/packages", *PACKAGES],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if process.returncode:
                pytest.skip(f"{PACKAGES[0]} cannot be installed: {process.stderr.strip()[:200]}")
            (Path(partial) / "packages").rename(directory)
    return directory


def run(packages: Path, *arguments: str) -> None:
    """Run this module in transformers 4."""
    subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": str(packages)},
        check=True,
        timeout=600,
    )


def read(packages: Path, output: Path, directories: Sequence[Path]) -> Mapping[str, torch.Tensor]:
    """Return what `read_directory` returns in transformers 4, by name."""
    run(packages, str(output), *map(str, directories))
    return load_file(output)


def read_directory(directory: Path) -> dict[str, torch.Tensor]:
    """Return the logits [16, V] float32 of the ids 1 to 16, and the tokens of TEXT."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        results = {"logits": model(torch.arange(1, 17)[None]).logits[0].clone()}
    if (directory / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        results["ids"] = torch.tensor(tokenizer(TEXT)["input_ids"])
    return results


def main() -> None:
    """Read the arguments; see the module's docstring."""
    import transformers

    assert transformers.__version__.startswith("4.57")
    output, *directories = sys.argv[1:]
    results = {}
    for directory in directories:
        for name, tensor in read_directory(Path(directory)).items():
            results[f"{directory}/{name}"] = tensor
    save_file(results, output)


if __name__ == "__main__":
    main()
