"""One of several processes that load a student and take their shards; the first prints the peak."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shared.process_memory import anonymous_bytes
from clients.config.tables.common import StudentConfig
from student_trainer.model.loading import load_model
from student_trainer.model.student import Student
from student_trainer.parallel.sharding import Replicated, Sharded, distribute


def save_student(path: Path, width: int, dtype: torch.dtype) -> int:
    """Write a random student of 12 layers, and return its number of weights."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=12,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(path)
    return model.num_parameters()


class Peak(threading.Thread):
    """Peak anonymous memory of this process, sampled every 2 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.stop_requested = anonymous_bytes(), threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stop_requested.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes())


def load(path: str, accelerator: Accelerator) -> Replicated | Sharded:
    config = StudentConfig(model=path, dtype="bfloat16")
    student = Student(load_model(config, mapped=True), bf16=True)
    return distribute(accelerator, student, "fsdp2")


def main(small: str, large: str) -> None:
    accelerator = Accelerator(cpu=True)
    load(small, accelerator)  # memory of the libraries
    bytes_before, peak = anonymous_bytes(), Peak()
    student = load(large, accelerator)
    peak.stop_requested.set()
    peak.join()
    growth = torch.tensor([float(peak.bytes - bytes_before)])
    total = accelerator.reduce(growth)
    assert {p.dtype for p in student.trained.parameters()} == {torch.float32}
    if accelerator.is_main_process:
        print(float(total))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
