"""A random Qwen3 with a character tokenizer, small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 96


def save_tiny_model(path: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """Write weights, config and tokenizer to `path`; logits spread over about +-10 nats."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.6)
        model.get_input_embeddings().weight.normal_(std=0.6)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """A token a printable character; ids VOCAB_SIZE - 1 and up have none."""
    vocab = {chr(32 + i): i for i in range(VOCAB_SIZE - 1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ").save_pretrained(path)
