"""What can be a student or a teacher: the table of docs/pairs.md, and each row for real."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from clients.config.tables.common import StudentConfig
from clients.data.models import check
from clients.data.models.check import CONVERT, Reader, check_model
from clients.teacher.query import ScoreQuery
from protos.errors import DistillError, InvalidInput
from tests.end_to_end.processes import ENVIRONMENT
from tests.model_directories import DIRECTORIES, logits_of, save_plain
from tests.teacher_service.adapters import save_merged

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

PAGE = Path(__file__).parents[2] / "docs" / "pairs.md"
READERS: dict[Reader, str] = {"trainer": "student", "hf": "hf", "vllm": "vllm"}
IDS = [1, 2, 3, 4, 5, 6, 7, 8]
# Packages that read a kind of directory, and that `make test` does not install.
PACKAGES = {
    "a GGUF file": "gguf",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "`tokenizer.model` without `tokenizer.json`": "sentencepiece",
}
# Nothing makes a student of these; only vLLM, or packages that need a GPU, read them as a teacher.
UNREADABLE = ("GPTQ", "AWQ")
# Two of three kinds that a process converts.
CONVERTED = ("`pytorch_model.bin`", "FP8, 128 x 128")
NAMES = pytest.mark.parametrize("name", DIRECTORIES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("plain") / "base")


@pytest.fixture
def make(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: DIRECTORIES[name](plain, tmp_path / "DIR")


def answer(path: Path, reader: Reader) -> tuple[str, str]:
    """Return what `check_model` answers: one word, and what it says: notes or the remedy."""
    try:
        notes = check_model(path, "student.model", reader)
    except InvalidInput as error:
        return "refused", error.hint
    return "works", "; ".join(notes)


def format_row(name: str, path: Path) -> str:
    """Return the line of a directory in the table. What all readers are told is there once."""
    answers = {reader: answer(path, reader) for reader in READERS}
    readers_by_text: dict[str, list[str]] = {}
    for reader, (_, text) in answers.items():
        readers_by_text.setdefault(text, []).append(READERS[reader])
    texts = [
        text if len(readers) == len(READERS) else f"{' and '.join(readers)}: {text}"
        for text, readers in readers_by_text.items()
        if text
    ]
    said = "; ".join(texts).replace(str(path), "DIR")
    said = re.sub(rf"{CONVERT} \S+ \S+(?=$|[,;])|pip install \"?[^\",;]+\"?", r"`\g<0>`", said)
    return f"| {name} | {' | '.join(word for word, _ in answers.values())} | {said} |"


def test_the_page_has_the_answers(
    make: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the packages that read other formats, as after `make setup`."""
    find_spec = check.find_spec
    absent = {*PACKAGES.values(), "optimum", "gptqmodel"}
    monkeypatch.setattr(check, "find_spec", lambda n: None if n in absent else find_spec(n))
    monkeypatch.setattr(check, "reads_sentencepiece", lambda: False)
    lines = [
        "| directory | student | teacher, hf | teacher, vllm | what the program says |",
        "|---|---|---|---|---|",
    ]
    for number, name in enumerate(DIRECTORIES):
        path = make(name).rename(tmp_path / f"directory-{number}")
        if (tmp_path / "exact").exists():
            (tmp_path / "exact").rename(tmp_path / f"exact-{number}")
        lines.append(format_row(name, path))
    table = "\n".join(lines)
    assert table in PAGE.read_text(), f"docs/pairs.md must have:\n{table}"


def make_usable(name: str, path: Path, error: InvalidInput) -> Path:
    """Do what the hint of a refusal says, and return the directory that is then used."""
    if "remove the entry auto_map" in error.hint:
        config = json.loads((path / "config.json").read_text())
        del config["auto_map"]
        (path / "config.json").write_text(json.dumps(config))
        return path
    if "move adapter_config.json" in error.hint:
        (path / "adapter_config.json").unlink()
        return path
    match = re.search(rf"{CONVERT} (.*)$", error.hint)
    if match is None:
        pytest.skip("nothing makes it usable")
    source, output = map(Path, shlex.split(match[1]))
    if output.exists():
        return output
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    subprocess.run(
        [sys.executable, "-m", CONVERT.split()[-1], str(source), str(output)],
        check=True,
        capture_output=True,
        env={**ENVIRONMENT, "PYTHONWARNINGS": "default"},
    )
    return output


def use_as(reader: Reader, name: str, path: Path) -> Path:
    """Return the directory, or what its refusal makes of it."""
    try:
        check_model(path, "student.model", reader)
    except InvalidInput as error:
        usable = make_usable(name, path, error)
        check_model(usable, "student.model", reader)
        return usable
    return path


def expected_logits(name: str, path: Path, plain: Path) -> torch.Tensor:
    """Return logits [L, V] that no code of this project computed."""
    exact = path.with_name("exact")
    if name == "bitsandbytes":
        return logits_of(path if find_spec(name) else plain, IDS)
    if name == "a LoRA adapter (peft)":
        save_merged(plain, path, exact)
    return logits_of(exact if exact.exists() else plain, IDS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in CONVERTED else name
        for name in DIRECTORIES
    ],
)
def test_student_and_teacher_compute_its_logits(
    name: str, make: Callable[[str], Path], plain: Path
) -> None:
    """Directly, or after what the refusal says; else the loaders of the two refuse it, too."""
    from student_trainer.model.loading import load_model, load_tokenizer, require_trainable
    from teacher_service.engines.hf import HfEngine

    path = make(name)
    student = StudentConfig(model=str(path))
    expected = expected_logits(name, path, plain)
    if answer(path, "trainer")[0] == "refused":
        with pytest.raises(InvalidInput):  # noqa: PT012 (which of the three depends on the kind)
            require_trainable(student)
            load_tokenizer(student)
            load_model(student)
    if answer(path, "hf")[0] == "refused":
        with pytest.raises(InvalidInput):
            HfEngine(str(path), device="cpu")
    if name in UNREADABLE:
        return
    # Other formats have rounded weights, or are dequantised with another order of products.
    tolerance = 0.05 if name in {*PACKAGES, "float16", "bfloat16", "FP8, 128 x 128"} else 1e-4
    usable = use_as("hf", name, path)
    engine = HfEngine(str(usable), dtype="float32", device="cpu")
    [block] = engine.score([ScoreQuery(np.array(IDS, np.int32), 1, top_k=4)])
    assert not isinstance(block, DistillError)
    rows = expected.log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    difference = torch.from_numpy(block.token_logprobs) - rows
    assert difference.abs().max() < tolerance
    student = StudentConfig(model=str(use_as("trainer", name, path)))
    load_tokenizer(student)
    with torch.no_grad():
        logits = load_model(student).eval()(torch.tensor([IDS])).logits[0]
    assert (logits - expected).abs().max() < 4 * tolerance


@pytest.mark.slow
@NAMES
def test_a_job_of_one_step(
    name: str, make: Callable[[str], Path], material: Material, tmp_path: Path
) -> None:
    """`distill run` with the directory as student and as teacher: refused first, if the table says
    so; then it succeeds with what the refusal says.
    """
    from tests.student_trainer.tiny import job

    path = make(name)
    config = job(material, max_steps=1, eval={"every": 1, "prompts": 8}, method__max_new_tokens=4)
    file = tmp_path / "job.yaml"
    file.write_text(config.model_dump_json(exclude={"teacher": {"address"}}, exclude_none=True))

    def run(student: Path, teacher: Path) -> subprocess.CompletedProcess[str]:
        models = [f"student.model={student}", f"teacher.model={teacher}"]
        options = [word for setting in models for word in ("--set", setting)]
        return subprocess.run(
            [sys.executable, "-m", "clients", "run", str(file), *options, "--runs", "runs"],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, "PYTHONWARNINGS": "default"},
            cwd=tmp_path,
        )

    answers = [answer(path, reader) for reader in ("trainer", "hf")]
    remedies = [text for word, text in answers if word == "refused"]
    if remedies:
        process = run(path, path)
        assert process.returncode == 2, process.stderr
        assert remedies[0] in process.stderr.replace("\n  ", " ")
        assert not (tmp_path / "runs").exists(), "nothing was started"
    if name in UNREADABLE:
        return
    process = run(use_as("trainer", name, path), use_as("hf", name, path))
    assert process.returncode == 0, process.stderr
