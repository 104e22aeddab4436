"""A random Qwen3 that vLLM's CPU attention takes: its smallest head is 32 wide."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.teacher_service.tiny_model import save_tokenizer

VOCAB_SIZE = 500  # vLLM pads it to 512
MAX_LENGTH = 1024
# Its embedding can be made to spoil every state that has seen it.
BAD_TOKEN = VOCAB_SIZE - 1


def save_model(
    path: Path,
    *,
    tied: bool = False,
    bad_token: bool = False,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    layers: int = 3,
    std: float = 0.5,
    max_length: int = MAX_LENGTH,
) -> Path:
    """Write weights, config and tokenizer to `path`; logits spread over about +-10 nats.

    `std`: of the weights of embeddings and head, which make the spread.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=std)
        model.get_input_embeddings().weight.normal_(std=std)
        if bad_token:
            model.get_input_embeddings().weight[BAD_TOKEN] = torch.nan
    model.save_pretrained(path)
    save_tokenizer(path)
    return path
