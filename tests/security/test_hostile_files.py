"""S7: no program of this project runs code from hostile files."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.store.store import LogitStore, StoredRows
from protos.errors import Corrupt, DistillError, InvalidInput
from student_trainer.checkpoints.checkpoint import newest_checkpoint
from student_trainer.data.prompts import load_prompts
from student_trainer.model.loading import load_model, load_tokenizer
from teacher_service.engines.hf import HfEngine
from tests.architecture.test_code import code_from_data
from tests.student_trainer.tiny import model, save, tokenizer

CODE = "import pathlib; pathlib.Path({path!r}).touch()\n"
TEMPLATES = (
    "{{{{ cycler.__init__.__globals__.os.system('touch {path}') }}}}",
    "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{{{ lipsum.__globals__['os'].popen('touch"
    " {path}') }}}}",
    "{{% for m in messages %}}{{{{ m.__class__.__base__.__subclasses__ }}}}{{% endfor %}}"
    "{{{{ namespace.__init__.__globals__.__builtins__.open('{path}', 'w') }}}}",
)


class Bomb:
    """Unpickling it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code that came with a file was run"


@pytest.fixture(scope="session")
def clean_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model(), tokenizer(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def model_directory(clean_directory: Path, tmp_path: Path) -> Path:
    """A copy of the model, which the test may change."""
    return Path(shutil.copytree(clean_directory, tmp_path / "model"))


def load_student(path: Path) -> Any:
    return load_model(StudentConfig(model=str(path)))


def load_student_tokenizer(path: Path) -> Any:
    return load_tokenizer(StudentConfig(model=str(path)))


def load_teacher(path: Path) -> Any:
    return HfEngine(str(path), dtype="auto", device="cpu", batch_invariant=False)


LOADERS = pytest.mark.parametrize("load", [load_student, load_teacher])


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_bomb_works(tmp_path: Path) -> None:
    """Control: the bomb does touch the canary when it is unpickled."""
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()
    canary.unlink()
    torch.save(Bomb(canary), tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert canary.exists()


@LOADERS
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_pickled_weights(
    load: Callable[[Path], Any], name: str, model_directory: Path, canary: Path
) -> None:
    (model_directory / "model.safetensors").unlink()
    torch.save(Bomb(canary), model_directory / name)
    with pytest.raises(InvalidInput):
        load(model_directory)


@LOADERS
def test_pickled_weights_that_an_index_names(
    load: Callable[[Path], Any], model_directory: Path, canary: Path
) -> None:
    (model_directory / "model.safetensors").unlink()
    torch.save(Bomb(canary), model_directory / "weights.bin")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "weights.bin"}}
    for name in ("pytorch_model.bin.index.json", "model.safetensors.index.json"):
        (model_directory / name).write_text(json.dumps(index))
    with pytest.raises(DistillError):
        load(model_directory)


@LOADERS
def test_pickles_that_call_themselves_safetensors(
    load: Callable[[Path], Any], model_directory: Path, canary: Path
) -> None:
    torch.save(Bomb(canary), model_directory / "model.safetensors")
    with pytest.raises(DistillError):
        load(model_directory)


@LOADERS
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_a_model_brings(
    load: Callable[[Path], Any], file: str, model_directory: Path, canary: Path
) -> None:
    code = CODE.format(path=str(canary))
    (model_directory / "evil.py").write_text(code)
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModel")
    auto_map: dict[str, object] = dict.fromkeys(names, "evil.Evil")
    change_json(
        model_directory / file, auto_map={**auto_map, "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    )
    if file == "config.json":
        with pytest.raises(InvalidInput, match="auto_map"):
            load(model_directory)
        return
    # A known tokenizer class is loaded without the code, or refused; the code never runs.
    for loader in (load, load_student_tokenizer):
        with contextlib.suppress(InvalidInput):
            loader(model_directory)


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates(template: str, model_directory: Path, canary: Path, tmp_path: Path) -> None:
    (model_directory / "chat_template.jinja").write_text(template.format(path=str(canary)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n' * 4)
    loaded_tokenizer = load_student_tokenizer(model_directory)
    assert "__globals__" in loaded_tokenizer.chat_template
    with pytest.raises(InvalidInput, match="chat template"):
        load_prompts(
            DataConfig(path=str(prompts)), loaded_tokenizer, held_out=1, max_tokens=99, seed=0
        )


class EvilType(pa.ExtensionType):  # type: ignore[misc]
    """Before pyarrow 14.0.1, reading a column of such a type unpickled its metadata."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        super().__init__(pa.binary(), "arrow.py_extension_type")

    def __arrow_ext_serialize__(self) -> bytes:
        return self.payload

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> EvilType:
        return cls(serialized)


def test_arrow_types_that_carry_code(tmp_path: Path, canary: Path) -> None:
    evil_type = EvilType(pickle.dumps(Bomb(canary)))
    rows = pa.ExtensionArray.from_storage(evil_type, pa.array([b"x"], pa.binary()))
    evil_field = pa.field("rows", evil_type)
    store = tmp_path / "store"
    with LogitStore(store, write=True) as new_store:
        new_store.append([StoredRows(b"k" * 32, bytes(8), 1, b"x")])
    [shard] = store.glob("*.arrow")
    batch = pa.ipc.open_file(shard.read_bytes()).get_batch(0)
    with pa.ipc.new_file(str(shard), pa.schema([*batch.schema][:-1]).append(evil_field)) as writer:
        writer.write_batch(batch.set_column(batch.num_columns - 1, evil_field, rows))
    data = shard.read_bytes()
    assert b"arrow.py_extension_type" in data
    # Make the manifest match, so that only the content of the file is wrong.
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["shards"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (store / "manifest.json").write_text(json.dumps(manifest))
    with LogitStore(store) as damaged_store:
        assert damaged_store.unreadable == [shard.name]
        assert len(damaged_store) == 0


def test_pickles_in_a_checkpoint(tmp_path: Path, canary: Path) -> None:
    step = tmp_path / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "model.bin", "rng.pkl"):
        (step / name).write_bytes(pickle.dumps(Bomb(canary)))
    (step / "optimizer.safetensors").write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(Corrupt, match="every checkpoint in"):
        newest_checkpoint(tmp_path / "checkpoints")


FORBIDDEN = """
import cloudpickle
import marshal
import shelve
import dill
import joblib
import pickle as p
from pickle import loads
import _pickle
import torch; torch.load("x")
from torch import load
import numpy as np; np.load("x", allow_pickle=True)
from numpy import load
import pandas; pandas.read_pickle("x")
eval("1")
exec("1")
compile("1", "x", "eval")
__import__("os")
import subprocess; subprocess.run("ls", shell=True)
import os; os.system("ls")
import os; os.popen("ls")
from os import system
import yaml; yaml.load("x")
import yaml; yaml.unsafe_load("x")
import asyncio; asyncio.create_subprocess_shell("ls")
import subprocess; subprocess.getoutput("ls")
"""


@pytest.mark.parametrize("line", [line for line in FORBIDDEN.splitlines() if line])
def test_the_gate_knows(line: str) -> None:
    """The architecture test finds each of these lines."""
    assert code_from_data(ast.parse(line))


@pytest.mark.parametrize(
    "line", ["import json; json.load(f)", "import subprocess; subprocess.run(['ls'], shell=False)"]
)
def test_the_gate_lets_through(line: str) -> None:
    assert not code_from_data(ast.parse(line))
