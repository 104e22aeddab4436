"""One rank of `benchmarks.data`: reads the records of a job, and measures itself.

    python -m benchmarks.data.rank READER FILE [in-order] STEP...

It prints a line when its libraries are loaded, waits for a line, and prints its figures as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.shared.process_memory import MIB
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from student_trainer.data.examples import load_examples
from student_trainer.data.prompts import Prompt, load_prompts
from student_trainer.methods.rl_prompts import load_rl_prompts

METHODS = ("on_policy", "sft", "rl")
OTHERS = ("datasets", "TRL")
PER_STEP = 8
HELD_OUT = 128
MAX_TOKENS = 256
_PAUSE = 0.01  # seconds between two readings of the memory

Batch = Sequence[Sequence[int]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, which needs no training."""
    vocabulary = {"<|end|>": 0}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    words.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if not add_generation_prompt %}<|end|>{% endif %}"
    )
    return words


class Memory:
    """The growth of this process's memory since `start`, in MiB, at its largest."""

    def __init__(self) -> None:
        self.own = self.pss = 0.0
        self._first = _read_memory()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read the memory once more, and end."""
        self._is_over.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._is_over.wait(_PAUSE):
            self._read()

    def _read(self) -> None:
        own, pss = _read_memory()
        self.own = max(self.own, own - self._first[0])
        self.pss = max(self.pss, pss - self._first[1])


def _read_memory() -> tuple[float, float]:
    fields = dict.fromkeys(("Anonymous", "Pss"), 0.0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in fields:
            fields[name] = int(value.split()[0]) * 1024 / MIB
    return fields["Anonymous"], fields["Pss"]


def open_reader(reader: str, file: Path) -> Callable[[int], Batch]:
    """Read the data as a job of a method, or as another library; return the batch of a step."""
    tokenizer = make_tokenizer()
    tables: dict[str, Any] = {
        "student": {"model": "student"},
        "data": {"path": str(file)},
        "eval": {"prompts": HELD_OUT},
    }
    if reader == "datasets":
        records = datasets.load_dataset("json", data_files=str(file), split="train")
        order = np.random.default_rng(0).permutation(len(records))
        return lambda step: [
            tokenizer(records[int(index)]["prompt"])["input_ids"]
            for index in order[(step - 1) * PER_STEP : step * PER_STEP]
        ]
    if reader == "TRL":
        return _open_trl(file, tokenizer)
    if reader == "sft":
        method = {"type": "sft", "max_tokens": MAX_TOKENS}
        examples, _ = load_examples(SFTJob.model_validate({**tables, "method": method}), tokenizer)
        return lambda step: [item.token_ids for item in examples.of_step(step, PER_STEP)]  # type: ignore[misc]
    if reader == "rl":
        job = RLJob.model_validate(
            {
                **tables,
                "method": {"type": "rl", "max_prompt_tokens": MAX_TOKENS},
                "reward": {"type": "math"},
            }
        )
        prompts: Any = load_rl_prompts(job, tokenizer).training
    else:
        data = SFTJob.model_validate({**tables, "method": {"type": "sft"}}).data
        prompts, _ = load_prompts(data, tokenizer, held_out=HELD_OUT, max_tokens=MAX_TOKENS, seed=0)

    def read_prompts(step: int) -> Batch:
        batch: list[Prompt] = prompts.of_step(step, PER_STEP)
        return [prompt.ids for prompt in batch]  # type: ignore[misc]

    return read_prompts


def _open_trl(file: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[[int], Batch]:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    data = datasets.load_dataset("json", data_files=str(file), split="train")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **{"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16},
            **{"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        )
    )
    settings = SFTConfig(
        str(file.parent / "trl"),
        per_device_train_batch_size=PER_STEP,
        max_length=MAX_TOKENS,
        use_cpu=True,
        report_to="none",
    )
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=data.rename_column("answer", "completion"),
        processing_class=tokenizer,
    )
    return lambda step: next(iter(trainer.get_train_dataloader()))["input_ids"].tolist()  # type: ignore[no-any-return]


def digest_of(batch: Batch) -> str:
    """Return a digest of the token ids of a batch."""
    lines = [",".join(map(str, ids)) for ids in batch]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def main() -> None:
    reader, file, *steps = sys.argv[1:]
    if reader == "TRL":
        import trl  # noqa: F401 (loaded before the measurement)
    torch.set_num_threads(1)
    print("ready", flush=True)
    sys.stdin.readline()
    memory, started_at, cpu_at = Memory(), time.perf_counter(), time.process_time()
    read_batch = open_reader(reader, Path(file))
    figures: dict[str, Any] = {}
    if steps[0] == "in-order":
        wanted, digests = {int(step) for step in steps[1:]}, {}
        for step in range(1, max(wanted) + 1):
            batch = read_batch(step)
            if step in wanted:
                digests[step] = digest_of(batch)
        figures["digests"] = digests
    else:
        figures["digest"] = digest_of(read_batch(int(steps[0])))
    figures["seconds"] = time.perf_counter() - started_at
    figures["cpu_seconds"] = time.process_time() - cpu_at
    memory.stop()
    print(json.dumps({**figures, "own_mib": memory.own, "pss_mib": memory.pss}))


if __name__ == "__main__":
    main()
