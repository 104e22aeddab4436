"""A loaded tokenizer is that of the model's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from clients.config.tables.common import StudentConfig
from clients.data.tokens import loading
from clients.data.tokens.loading import PROBE, load_tokenizer
from protos.errors import InvalidInput
from student_trainer.model import loading as student_loading


def save_bpe(path: Path, tokenizer_class: str, model_type: str) -> Tokenizer:
    """Save a tokenizer that keeps numbers whole, under the name of a class that splits them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["1234567 123 45 they'll say it's 1234567"] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(path)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": tokenizer_class}
    file.write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer_class", "model_type"),
    [("Qwen2Tokenizer", "qwen2"), ("Qwen2TokenizerFast", "qwen3_5"), ("GPT2Tokenizer", "gpt2")],
)
def test_the_file_decides_how_texts_are_split(
    tmp_path: Path, tokenizer_class: str, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = save_bpe(tmp_path, tokenizer_class, model_type)
    tokenizer = load_tokenizer(transformers, str(tmp_path))
    for text in (PROBE, "1234567 they'll"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == expected.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_token == "<|endoftext|>"
    assert ("splits texts otherwise than tokenizer.json" in caplog.text) == (model_type != "gpt2")


def test_a_sentencepiece_file_alone_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    monkeypatch.setattr(loading, "reads_sentencepiece", lambda: False)
    with pytest.raises(
        InvalidInput, match=r"has tokenizer\.model without tokenizer\.json"
    ) as caught:
        student_loading.load_tokenizer(StudentConfig(model=str(tmp_path)))
    assert "the package sentencepiece, which converts it, is not installed" in str(caught.value)
