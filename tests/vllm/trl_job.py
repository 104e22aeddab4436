"""TRL's ServerDistillationTrainer on a student of random weights: STUDENT URL OUT K BETA.

Nothing of TRL is changed; the address is the only thing that it knows of the teacher. OUT gets the
losses of the steps as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

STEPS, BATCH = 4, 4


def main() -> None:
    student, url, out, k, beta = sys.argv[1:]
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(student, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token = "~"
    settings = ServerDistillationConfig(
        output_dir=str(Path(out).with_suffix("")),
        teacher_model_server_url=url,
        loss_top_k=int(k),
        beta=float(beta),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_completion_length=24,
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=0,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    texts = [f"{first} and {second}" for first in "abcdefgh" for second in "uvwxyz"]
    model: Any = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    trainer = ServerDistillationTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
