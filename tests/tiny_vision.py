"""Tiny random Qwen2.5-VL and Qwen3-VL models with a character tokenizer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.student_trainer import tiny

KINDS = ("qwen2_5_vl", "qwen3_vl")
START, IMAGE, VIDEO, END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
# The texts and images of all messages in order, without separators.
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    + START
    + IMAGE
    + END
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
_PATCH = 4


def tokenizer() -> PreTrainedTokenizerFast:
    character_tokenizer = tiny.tokenizer()
    character_tokenizer.add_tokens([START, IMAGE, VIDEO, END], special_tokens=True)
    character_tokenizer.chat_template = TEMPLATE
    return character_tokenizer


def processor(**changes: Any) -> Qwen2VLImageProcessorPil:
    """Return a processor with patches of 4 pixels, 2 x 2 per token: 4 to 64 tokens per image."""
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(**{"patch_size": _PATCH, "size": size, **changes})


def model(kind: str = KINDS[0], *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    character_tokenizer = tokenizer()
    text: dict[str, Any] = {
        "vocab_size": len(character_tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
        },
        "bos_token_id": None,
        "eos_token_id": character_tokenizer.eos_token_id,
        "pad_token_id": character_tokenizer.pad_token_id,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": _PATCH,
        "out_hidden_size": 32,
    }
    ids = {
        "image_token_id": character_tokenizer.convert_tokens_to_ids(IMAGE),
        "video_token_id": character_tokenizer.convert_tokens_to_ids(VIDEO),
        "vision_start_token_id": character_tokenizer.convert_tokens_to_ids(START),
        "vision_end_token_id": character_tokenizer.convert_tokens_to_ids(END),
    }
    vision_model: Any
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        vision_model = Qwen2_5_VLForConditionalGeneration(config)
    else:
        text |= {"head_dim": 8}
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        vision_model = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        )
    with torch.no_grad():
        for weight in vision_model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    return vision_model.eval()


def save(path: Path, kind: str = KINDS[0], *, seed: int = 0) -> Path:
    model(kind, seed=seed).save_pretrained(path)
    tokenizer().save_pretrained(path)
    processor().save_pretrained(path)
    return path


def image(seed: int = 0, width: int = 24, height: int = 16) -> bytes:
    """Return a PNG of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return png(Image.fromarray(pixels))


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def plain_logits(vision_model: Any, ids: list[int], images: list[bytes]) -> torch.Tensor:
    """The logits [T, V] of the model's own code for ids with one placeholder an image.

    Nothing of this project is used: transformers' image processor, and the rule of its processors
    for Qwen that an image has a token for each square of merged patches.
    """
    character_tokenizer = tokenizer()
    placeholder = character_tokenizer.convert_tokens_to_ids(IMAGE)
    inputs: dict[str, torch.Tensor] = {}
    expanded_ids: list[int] = []
    if images:
        pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in images]
        features = processor()(images=pictures, return_tensors="pt")
        counts = [int(grid.prod()) // 4 for grid in features["image_grid_thw"]]
        for token in ids:
            expanded_ids += [token] * (counts.pop(0) if token == placeholder else 1)
        inputs = {name: features[name] for name in ("pixel_values", "image_grid_thw")}
    tokens = torch.tensor([expanded_ids or ids])
    if images:
        inputs["mm_token_type_ids"] = (tokens == placeholder).int()
    with torch.no_grad():
        logits: torch.Tensor = vision_model(input_ids=tokens, use_cache=False, **inputs).logits[0]
    return logits.float()
