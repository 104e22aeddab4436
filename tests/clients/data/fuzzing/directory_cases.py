"""Cases of tokenizer files and model directories: what is loaded is what the files have."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from clients.config.tables.common import StudentConfig
from clients.data.models.check import check_model
from clients.data.models.files import shard_names
from clients.data.models.shape import logits_in, read_shape
from clients.data.tokens.tokenizer import tokens_in
from protos.errors import InvalidInput
from student_trainer.model.loading import load_config, load_model, load_tokenizer
from teacher_service.models.files import model_directory
from teacher_service.models.loading import load_model as load_teacher
from tests.clients.data.fuzzing.tokenizer_files import KINDS, SPECIAL, write_tokenizer

_TEXTS = (
    "the roller, 17+25=42",
    " x  y\n\n\t",
    "",
    "\u00e9\u65e5\u672c\U0001f993",
    f"a{SPECIAL[1]}b",
    "<0x41>\u2581",
)
_JUNK: tuple[Any, ...] = (None, True, 0, -1, 3, 1.5, 1 << 40, "", "many", [], {}, ["a"], {"a": 1})
_DTYPES = {"F32": np.float32, "F16": np.float16}


def run_tokenizer_case(random: Random, folder: Path) -> str:
    """Change the files of a tokenizer, and load it. Returns what has become of it."""
    path = write_tokenizer(folder / "model", random.choice(KINDS), "{{ messages[0].content }}")
    name = random.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
    _change_file(random, path / name)
    tokens_in(path)
    try:
        tokenizer = load_tokenizer(StudentConfig(model=str(path)))
    except InvalidInput as error:
        require_remedy(error)
        return "refused"
    try:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.encode(_TEXTS[3])
    except Exception as error:
        raise AssertionError(f"loads a file that tokenizers refuses: {error}") from error
    if name == "tokenizer_config.json":  # it may add tokens, or name another class
        tokenizer(_TEXTS[0])
        return "read"
    backend.no_truncation()
    backend.no_padding()
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    # tokenizer_config.json names special tokens too, so they are added where the file lacks them.
    texts = _TEXTS if special >= {*SPECIAL} else [text for text in _TEXTS if "<|" not in text]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = backend.encode(text, add_special_tokens=False).ids
        assert ids == expected, f"{text!r} is {ids} in place of {expected}"
    return "read"


def run_model_case(random: Random, folder: Path) -> str:
    """Change the files of a model, and load it as student and teacher."""
    path = folder / "model"
    shutil.copytree(_model_directory(is_divided=random.random() < 0.4), path)
    _change_model(random, path)
    student = StudentConfig(model=str(path))
    outcomes = []
    for load in (
        lambda: _check_weights(load_model(student), path),
        lambda: _check_weights(_load_checked_teacher(path), path),
        lambda: load_config(student),
        lambda: read_shape(str(path)),
        lambda: check_model(path, "student.model", "trainer"),
        lambda: shard_names(path, "student.model"),
        lambda: logits_in(path),
    ):
        try:
            load()
        except InvalidInput as error:
            require_remedy(error)
            outcomes.append("refused")
        else:
            outcomes.append("read")
    return "read" if outcomes[0] == "read" else "refused"


def _load_checked_teacher(path: Path) -> Any:
    return load_teacher(model_directory(str(path), "hf"), dtype="float32")


def require_remedy(error: InvalidInput) -> None:
    """Raise AssertionError unless an error names a field and a remedy."""
    assert error.message, "says nothing"
    assert error.field, f"names no field: {error}"
    assert error.hint, f"has no remedy: {error}"


def _check_weights(model: Any, path: Path) -> None:
    """Raise AssertionError unless each weight of the model is in its files, with these numbers."""
    stored = {}
    names = shard_names(path, "student.model")
    files = [path / "model.safetensors"] if (path / "model.safetensors").is_file() else []
    for file in files or [path / name for name in names]:
        stored |= _read_tensors(file)
    for name, weight in model.named_parameters():
        assert name in stored, f"{name} is in no file"
        expected = stored[name].astype(np.float32)
        np.testing.assert_array_equal(weight.detach().float().numpy(), expected)


def _read_tensors(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        first, last = (8 + size + offset for offset in facts["data_offsets"])
        values = np.frombuffer(data[first:last], _DTYPES[facts["dtype"]])
        tensors[name] = values.reshape(facts["shape"])
    return tensors


@cache
def _model_directory(is_divided: bool) -> Path:
    """Write a model once; `is_divided`: its weights are in several files, which an index names."""
    path = Path(mkdtemp(prefix="fuzzing-"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    size = "8KB" if is_divided else "1GB"
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size=size)
    assert (path / "model.safetensors").exists() != is_divided
    return write_tokenizer(path, "bytes")


def _change_model(random: Random, path: Path) -> None:
    weights = sorted(path.glob("*.safetensors"))
    match random.randrange(9):
        case 0 | 1:
            _change_file(random, path / "config.json")
        case 2 if (path / "model.safetensors.index.json").exists():
            _change_file(random, path / "model.safetensors.index.json")
        case 3:
            _damage_bytes(random, random.choice(weights))
        case 4:
            _change_header(random, random.choice(weights))
        case 5:
            random.choice([*weights, path / "config.json", path / "tokenizer.json"]).unlink()
        case 6:
            content = json.dumps(random.choice([{"base_model_name_or_path": "x"}, {}, [], None]))
            (path / "adapter_config.json").write_text(content)
        case 7:
            (
                path / random.choice(["model.safetensors.index.json", "pytorch_model.bin"])
            ).write_text(json.dumps(random.choice(_JUNK)))
        case _:
            config = json.loads((path / "config.json").read_text())
            config |= random.choice(
                [
                    {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
                    {"num_hidden_layers": 1},
                    {"num_hidden_layers": 3},
                    {"vocab_size": 301},
                    {"tie_word_embeddings": True},
                    {"quantization_config": {"quant_method": random.choice(["fp8", "x", None])}},
                    {"model_type": random.choice(["qwen3", "bert", "t5", "nonsense"])},
                    {"torch_dtype": "nonsense"},
                    {"architectures": ["BertModel"]},
                ]
            )
            (path / "config.json").write_text(json.dumps(config))


def _change_file(random: Random, file: Path) -> None:
    """Damage a JSON file, delete it, or replace or delete one value in it."""
    if random.random() < 0.15:
        _damage_bytes(random, file)
        return
    document = json.loads(file.read_text())
    parent: Any = document
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        if len(keys) > 40:
            keys = random.sample(keys, 40)
        key = random.choice(keys)
        if not (isinstance(parent[key], (dict, list)) and parent[key]) or random.random() < 0.25:
            break
        parent = parent[key]
    if isinstance(parent, dict) and random.random() < 0.25:
        del parent[key]
    else:
        parent[key] = random.choice(_JUNK)
    file.write_text(json.dumps(document))


def _damage_bytes(random: Random, file: Path) -> None:
    data = file.read_bytes()
    place = random.randrange(len(data))
    changed = (
        data[:place],
        data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :],
        b"",
        b"\0" * 64,
        data + data[:7],
    )
    file.write_bytes(random.choice(changed))


def _change_header(random: Random, file: Path) -> None:
    """Rename or remove a tensor of a .safetensors file, or change what its header says."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    name = random.choice([key for key in header if key != "__metadata__"])
    match random.randrange(4):
        case 0:
            header[random.choice(["_orig_mod.", "module.", "x"]) + name] = header.pop(name)
        case 1:
            header[name]["shape"] = random.choice([[], [1], header[name]["shape"][::-1], [1 << 40]])
        case 2:
            header[name]["dtype"] = random.choice(["F16", "I64", "F8_E4M3", "nonsense"])
        case _:
            header[name]["data_offsets"] = random.choice([[0, 0], [-4, 4], [1 << 50, 1 << 51], []])
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


logging.getLogger("transformers").setLevel(logging.ERROR)
