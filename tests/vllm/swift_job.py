"""ms-swift's GKD on a student of random weights: STUDENT URL OUT K. It needs a Python of its own.

Nothing of ms-swift is changed; the address is the only thing that it knows of the teacher. OUT gets
the losses of the steps as JSON. This module imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    student, url, out, k = sys.argv[1:]
    data = Path(out).with_suffix(".jsonl")
    data.write_text("".join(json.dumps(record(a, b)) + "\n" for a in "abcdefgh" for b in "uvwxyz"))
    from swift import rlhf_main

    settings = {
        "rlhf_type": "gkd",
        "model": student,
        "model_type": "qwen3",
        "template": "dummy",
        "teacher_model_server": url,
        "gkd_logits_topk": k,
        "dataset": data,
        "lmbda": 0,
        "beta": 0.5,
        "temperature": 1,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "attn_impl": "eager",
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": "false",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "split_dataset_ratio": 0,
        "output_dir": Path(out).with_suffix(""),
        "report_to": "none",
        "use_hf": "true",
        "use_cpu": "true",
        "seed": 0,
    }
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    history = rlhf_main(words)["log_history"]
    Path(out).write_text(json.dumps([line["loss"] for line in history if "loss" in line]))


def record(first: str, second: str) -> dict[str, list[dict[str, str]]]:
    user_message = {"role": "user", "content": f"{first} and {second}"}
    return {
        "messages": [user_message, {"role": "assistant", "content": f"{second} or {first} perhaps"}]
    }


if __name__ == "__main__":
    main()
