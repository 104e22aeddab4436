"""Random adapters of a model in peft's format, and the model with one merged into its weights."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers


def save_adapter(model: Path, path: Path, *, seed: int, **options: Any) -> Path:
    """Write an adapter with weights that change every logit."""
    from peft import LoraConfig, get_peft_model

    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}
    settings |= {"lora_dropout": 0.5, **options}  # which a teacher must not apply
    with warnings.catch_warnings(action="ignore"):  # peft's own
        adapted = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    with warnings.catch_warnings(action="ignore"):
        adapted.save_pretrained(path)
    return path


def save_merged(model: Path, adapter: Path, path: Path) -> Path:
    """Write the model with the adapter merged by peft, in float64."""
    from peft import PeftModel

    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with warnings.catch_warnings(action="ignore"):
        merged = PeftModel.from_pretrained(plain, adapter).double().merge_and_unload()
    shutil.copytree(model, path)
    merged.save_pretrained(path)
    return path
