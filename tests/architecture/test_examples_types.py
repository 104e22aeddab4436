"""Type checkers accept the Python of the documentation and of users, outside of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, ROOT, blocks_in

SNIPPETS = "user_snippets.py"
# Values that an example gets from the text around it.
GIVEN = {
    "losses": "student_logits: torch.Tensor, teacher_logits: torch.Tensor, token_ids: torch.Tensor",
    "rollouts": "addresses: list[str], vocab_size: int, order: Order",
}
IMPORTS = "import torch\nfrom student_trainer.rollout_client.order import Order\n"
# Without torch and transformers, which take a minute: pyright reads them.
MYPY = """[mypy]
strict = true
disallow_subclassing_any = false
[mypy-torch.*,transformers.*]
follow_imports = skip
"""
# The type of AutoModelForCausalLM does not have the method.
IGNORED = 'Cannot access attribute "generate" for class "_BaseModelWithGenerate"'


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A directory with the examples of all documents, of examples/ and of users as files."""
    for document in DOCUMENTS:
        for block in blocks_in((ROOT / document).read_text(), document):
            if block.kind == "python":
                name = f"{document.replace('/', '_').removesuffix('.md')}_{block.line}.py"
                text = block.body
                if given := GIVEN.get(block.test):
                    body = textwrap.indent(text, "    ")
                    text = f"{IMPORTS}\n\ndef example({given}) -> None:\n{body}"
                (tmp_path / name).write_text(text)
    for script in (*(ROOT / "examples").glob("*.py"), Path(__file__).with_name(SNIPPETS)):
        (tmp_path / script.name).write_text(script.read_text())
    return tmp_path


def run_checker(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    names = sorted(path.name for path in directory.glob("*.py"))
    assert len(names) > 6
    return subprocess.run([*command, *names], capture_output=True, text=True, cwd=directory)


def test_mypy(examples: Path) -> None:
    (examples / "mypy.ini").write_text(MYPY)
    cache = ROOT / ".mypy_cache" / "examples"
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache)]
    process = run_checker(command, examples)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright: pip install pyright")
def test_pyright(examples: Path) -> None:
    process = run_checker(["pyright", "--pythonpath", sys.executable], examples)
    errors = [line for line in process.stdout.splitlines() if " - error: " in line]
    assert [line for line in errors if IGNORED not in line] == [], process.stdout
    assert "0 informations" in process.stdout, process.stdout + process.stderr
