"""Model directories of each kind that people have, made from one tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.student_trainer import tiny
from tests.teacher_service.adapters import save_adapter
from tests.vllm.quantised import FORMATS, save_quantised

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def save_plain(path: Path) -> Path:
    """Write a Qwen3 whose sizes all formats can divide, in float32, with a chat template."""
    torch.manual_seed(0)
    words = tiny.tokenizer()
    words.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=32,  # more than the tokenizers have
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=128,  # as transformers assumes for a GGUF file of this architecture
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.2)
    return tiny.save(model, words, path)


def _copy(plain: Path, path: Path) -> Path:
    return Path(shutil.copytree(plain, path))


def _change_config(path: Path, **entries: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path


def _cast(dtype: torch.dtype) -> Callable[[Path, Path], Path]:
    def make(plain: Path, path: Path) -> Path:
        _copy(plain, path)
        weights = load_file(path / "model.safetensors")
        cast = {name: weight.to(dtype) for name, weight in weights.items()}
        save_file(cast, path / "model.safetensors", {"format": "pt"})
        return _change_config(path, dtype=str(dtype).removeprefix("torch."))

    return make


def _shard(plain: Path, path: Path) -> Path:
    _copy(plain, path)
    Qwen3ForCausalLM.from_pretrained(plain).save_pretrained(path, max_shard_size="100KB")
    (path / "model.safetensors").unlink()
    assert len([*path.glob("model-*.safetensors")]) > 1
    return path


def _remove_template(plain: Path, path: Path) -> Path:
    _copy(plain, path)
    (path / "chat_template.jinja").unlink()
    return path


def _save_torch(plain: Path, path: Path) -> Path:
    _copy(plain, path)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    return path


def _save_adapter(plain: Path, path: Path) -> Path:
    return save_adapter(plain, path, seed=1)


def _save_adapter_beside(plain: Path, path: Path) -> Path:
    _copy(plain, path)
    return _save_adapter(plain, path)


def _save_gguf(plain: Path, path: Path) -> Path:
    """Write a GGUF file in float32 beside the tokenizer; an empty file without the package gguf."""
    _copy(plain, path)
    (path / "config.json").unlink()
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    file = path / "model-f32.gguf"
    file.touch()
    try:
        import gguf
    except ImportError:
        return path
    config = Qwen3Config.from_pretrained(plain)
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, weight in weights.items():
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _quantise(name: str) -> Callable[[Path, Path], Path]:
    """Write the format, and beside it, as "exact", a model with the weights that it means."""

    def make(plain: Path, path: Path) -> Path:
        quantised, exact = save_quantised(plain, path.with_name("formats"), FORMATS[name])
        exact.rename(path.with_name("exact"))
        return Path(quantised.rename(path))

    return make


def _quantise_bitsandbytes(plain: Path, path: Path) -> Path:
    """Write 4-bit weights; without the package bitsandbytes, only what config.json says of them."""
    _copy(plain, path)
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return _change_config(path, quantization_config={"quant_method": "bitsandbytes"})
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings).save_pretrained(path)
    return path


def _add_code(model_type: str) -> Callable[[Path, Path], Path]:
    def make(plain: Path, path: Path) -> Path:
        _copy(plain, path)
        auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
        (path / "modeling_own.py").write_text("raise SystemExit('code of the model has run')\n")
        return _change_config(path, auto_map=auto_map, model_type=model_type)

    return make


def _save_sentencepiece(plain: Path, path: Path) -> Path:
    """Leave tokenizer.model alone; without the package sentencepiece, with any content."""
    _copy(plain, path)
    (path / "tokenizer.json").unlink()
    file = path / "tokenizer.model"
    file.write_bytes(b"sentencepiece")
    try:
        import sentencepiece
    except ImportError:
        return path
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["17+25=42", "90+68=158", "3+4=7"] * 20),
        model_prefix=str(file.with_suffix("")),
        model_type="char",
        vocab_size=16,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    file.with_suffix(".vocab").unlink()
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})
    )
    return path


# By the name of the row in docs/pairs.md.
DIRECTORIES: dict[str, Callable[[Path, Path], Path]] = {
    "float32": _copy,
    "bfloat16": _cast(torch.bfloat16),
    "float16": _cast(torch.float16),
    "several .safetensors files with an index": _shard,
    "a base model without a chat template": _remove_template,
    "`pytorch_model.bin`": _save_torch,
    "a LoRA adapter (peft)": _save_adapter,
    "an adapter beside weights": _save_adapter_beside,
    "a GGUF file": _save_gguf,
    "FP8, 128 x 128": _quantise("FP8, 128 x 128"),
    "compressed-tensors": _quantise("compressed-tensors W4A16"),
    "bitsandbytes": _quantise_bitsandbytes,
    "GPTQ": _quantise("GPTQ"),
    "AWQ": _quantise("AWQ"),
    "own code (`auto_map`) of a type of transformers": _add_code("qwen3"),
    "own code of another type": _add_code("own"),
    "`tokenizer.model` without `tokenizer.json`": _save_sentencepiece,
}


def logits_of(path: Path, ids: list[int]) -> Tensor:
    """Return the logits [L, V] of a directory by transformers alone, in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits
