"""The memory formulas, compared with what autograd saves, and the memory plan of a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.models.memory_plan import LINE, SHAPE, MemoryCase, make_model, random_batch
from clients.cli.app import main
from clients.config.kinds import AnyTraining, parse_job
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.data.models.shape import shape_of
from clients.plan.memory import (
    Load,
    activation_bytes,
    host_bytes,
    optimizer_bytes,
    peak_bytes,
    products_per_token,
    resident_bytes,
    sampling_bytes,
    saved_per_token,
)
from clients.plan.memory_plan import (
    GIB,
    USABLE,
    largest_micro_batch,
    load_of,
    plan_of,
    shape_of_student,
    with_changes,
)
from protos.errors import InvalidInput
from student_trainer.checkpoints.optimizer_state import BLOCK, is_quantized
from student_trainer.model.loading import PRODUCTS
from student_trainer.model.student import Student

# The size-related keys of the published config.json of Qwen2.5-7B.
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
WEIGHTS_7B = 7_615_616_512  # of its safetensors index
TOKENS = 2 * LINE
ROOT = Path(__file__).parents[3]


def measure_saved_bytes(model: str, load: Load, kernel: SDPBackend) -> int:
    """Return the bytes that autograd saves in one forward pass, without weights."""
    torch.manual_seed(0)
    student = Student(make_model(MemoryCase(model, load)), bf16=load.bf16)
    student.train()
    batch = random_batch(load, torch.device("cpu"))
    weights = [*student.parameters(), *student.buffers()]
    shapes = {tuple(weight.shape) for weight in weights}
    shapes |= {shape[::-1] for shape in shapes if len(shape) == 2}
    weight_pointers = {weight.untyped_storage().data_ptr() for weight in weights}
    saved_tensors: dict[int, Tensor] = {}

    def record_tensor(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        # Bfloat16 copies of weights do not count either.
        if pointer not in weight_pointers and tuple(tensor.shape) not in shapes:
            saved_tensors[pointer] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(record_tensor, lambda tensor: tensor),
        sdpa_kernel(kernel),
    ):
        student(batch, lambda rows, index: -rows.token_logprobs, 1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors.values())


@pytest.mark.parametrize("lora", [0, 8])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_autograd_saves_these_bytes(model: str, bf16: bool, lora: int) -> None:
    shape = replace(SHAPE, vocabulary=1024, query_norm=model == "qwen3")
    load = Load(shape, 1, False, bf16, False, TOKENS, LINE, lora=lora, cuda=False)
    few, many = (
        measure_saved_bytes(
            model, replace(load, shape=replace(shape, layers=n)), SDPBackend.FLASH_ATTENTION
        )
        for n in (1, 3)
    )
    assert (many - few) / 2 / TOKENS == pytest.approx(saved_per_token(load), rel=0.02)


class Products(TorchDispatchMode):
    """Adds up the bytes of the outputs that the selective policy keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            tensors = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return output


@pytest.mark.parametrize("lora", [0, 8])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_selective_policy_keeps_these_bytes(bf16: bool, lora: int) -> None:
    shape = replace(SHAPE, vocabulary=1024, layers=3)
    load = Load(shape, 1, False, bf16, "selective", TOKENS, LINE, lora=lora, cuda=False)
    body = make_model(MemoryCase("llama", load)).get_decoder()
    ids = random_batch(load, torch.device("cpu")).inputs["input_ids"]
    with Products() as products, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        body(input_ids=ids, use_cache=False)
    assert products.bytes / 3 / TOKENS == pytest.approx(products_per_token(load), rel=0.05)


def test_layers_that_recompute_save_their_input_only() -> None:
    load = Load(replace(SHAPE, layers=5), 1, False, True, False, TOKENS, LINE)
    policies: tuple[bool | int | str, ...] = (False, 3, 2, "selective", True)
    bytes_by_policy = [activation_bytes(replace(load, checkpointing=policy)) for policy in policies]
    layer = TOKENS * (saved_per_token(load) - 4 * SHAPE.hidden)
    assert bytes_by_policy[0] - bytes_by_policy[1] == 2 * layer
    assert bytes_by_policy[0] - bytes_by_policy[2] == 3 * layer
    assert bytes_by_policy[0] - bytes_by_policy[4] == 5 * layer
    assert bytes_by_policy[3] - bytes_by_policy[4] == 5 * TOKENS * products_per_token(load)


def test_a_gpu_without_a_kernel_for_float32_groups_saves_the_scores() -> None:
    """PyTorch then uses the kernel `MATH`, which also runs on a CPU."""
    shape = replace(SHAPE, vocabulary=1024)
    load = Load(shape, 1, False, False, False, TOKENS, LINE)
    few, many = (
        measure_saved_bytes("llama", replace(load, shape=replace(shape, layers=n)), SDPBackend.MATH)
        for n in (1, 3)
    )
    assert (many - few) / 2 / TOKENS == pytest.approx(saved_per_token(load), rel=0.1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_weights_are_those_of_the_model(model: str, tied: bool) -> None:
    shape = replace(SHAPE, query_norm=model == "qwen3", tied=tied)
    load = Load(shape, 1, False, False, False, TOKENS, LINE)
    student = make_model(MemoryCase(model, load))
    assert shape.weights == sum(weight.numel() for weight in student.parameters())
    assert shape_of(json.loads(student.config.to_json_string())) == shape
    adapters = replace(load, lora=8)
    with_adapters = make_model(MemoryCase(model, adapters))
    trained_weights = [weight for weight in with_adapters.parameters() if weight.requires_grad]
    assert adapters.trained == sum(weight.numel() for weight in trained_weights)
    assert adapters.frozen == shape.weights


def test_a_published_model_has_its_published_weights() -> None:
    assert shape_of(QWEN_7B).weights == WEIGHTS_7B


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "a model of type 'gpt2'"),
        ({"hidden_size": None}, "config.json lacks a size"),
        ({"hidden_size": "wide"}, "config.json lacks a size"),
        ({"num_attention_heads": 0}, "config.json lacks a size"),
        ({"num_hidden_layers": 0}, "a size is not a positive number: num_hidden_layers is 0"),
        ({"hidden_size": -5}, "a size is not a positive number: hidden_size is -5"),
        ({"vocab_size": float("inf")}, "a size is not a positive number"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        shape_of({**QWEN_7B, **changes})


def make_job(tmp_path: Path, **tables: Any) -> AnyTraining:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    student = {"model": str(tmp_path), "dtype": "bfloat16"}
    values = {"student": student, "data": {"path": "p.jsonl"}, "train": {"processes": 8}}
    training_job = parse_job(json.dumps(values | tables))
    assert isinstance(training_job, OnPolicyJob | RLJob)
    return training_job


def test_states_and_weights_are_shared_by_fsdp2(tmp_path: Path) -> None:
    rl = {"method": {"type": "rl", "beta": 0.01}, "reward": {"type": "exact_match"}}
    config = make_job(tmp_path, **rl)
    shape = shape_of_student(config)
    replicated = resident_bytes(load_of(config, shape))
    sharded = resident_bytes(load_of(with_changes(config, {"train": {"sharding": "fsdp2"}}), shape))
    assert (
        replicated["weights"] == replicated["anchor"] == replicated["DDP buckets"] == 4 * WEIGHTS_7B
    )
    assert replicated["optimizer"] == 8 * WEIGHTS_7B
    assert sharded["weights"] == sharded["anchor"] == 4 * WEIGHTS_7B // 8
    assert (sharded["DDP buckets"], sharded["critic"]) == (0, 0)


def test_the_cache_of_sampling_by_hand(tmp_path: Path) -> None:
    config = make_job(tmp_path)
    load = load_of(config, shape_of_student(config))
    # 32 prompts on 8 processes, and 128 held-out ones; at most 4 * 16384 tokens at a time.
    assert (load.sampled, load.sampled_line) == (16, 512 + 256)
    # Keys and values of 4 heads of 128 numbers, bfloat16, in 28 layers.
    assert sampling_bytes(load)["key-value cache"] == 16 * 768 * 2 * 4 * 128 * 2 * 28


def test_a_job_that_does_not_fit_gets_changes_that_do(tmp_path: Path) -> None:
    config = make_job(tmp_path)
    shape = shape_of_student(config)
    plan = plan_of(config, shape, 80.0)
    assert not plan.fits
    assert plan.micro_batch == 0
    # 7.6 billion weights, moments, buckets and gradients.
    assert plan.peak >= WEIGHTS_7B * (4 + 8 + 4 + 4)
    (sharded,) = [change for change in plan.changes if change.startswith("train.sharding")]
    assert sharded.endswith("GiB, fits")
    better = with_changes(config, {"train": {"sharding": "fsdp2"}})
    assert peak_bytes(load_of(better, shape)) <= USABLE * 80 * GIB
    assert not plan_of(better, shape, 80.0).changes


def test_the_largest_micro_batch_is_the_largest(tmp_path: Path) -> None:
    config = with_changes(
        make_job(tmp_path), {"train": {"sharding": "fsdp2", "prompts_per_step": 4096}}
    )
    shape = shape_of_student(config)
    usable = round(80 * GIB)
    max_tokens = largest_micro_batch(config, shape, usable)
    assert max_tokens % 768 == 0

    def needed_bytes(tokens: int) -> int:
        return peak_bytes(
            load_of(with_changes(config, {"train": {"tokens_per_micro_batch": tokens}}), shape)
        )

    assert needed_bytes(max_tokens) <= usable < needed_bytes(max_tokens + 768)


def test_headers_with_other_weights_are_refused(tmp_path: Path) -> None:
    config = make_job(tmp_path)
    save_file({"x": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="the files have 3 weights"):
        shape_of_student(config)


def test_adamw_needs_a_gradient_and_nothing_else() -> None:
    """The fused GPU kernel has no temporary tensors; the loop on a CPU has small ones."""
    load = Load(SHAPE, 2, True, True, False, TOKENS, LINE)
    assert optimizer_bytes(load) == {"gradients": 4 * SHAPE.weights // 2}


@pytest.mark.parametrize(("processes", "anchor"), [(1, False), (8, True)])
def test_weights_in_host_memory(processes: int, anchor: bool) -> None:
    """float32 weights, gradients and two moments: 16 bytes per weight, 20 with an anchor."""
    load = Load(SHAPE, processes, True, True, True, TOKENS, LINE, anchor=anchor, cpu_offload=True)
    assert host_bytes(load) == (20 if anchor else 16) * SHAPE.weights // processes
    assert not any(resident_bytes(load).values())
    assert optimizer_bytes(load) == {}
    on_gpu = replace(load, cpu_offload=False)
    assert peak_bytes(load) < peak_bytes(on_gpu) - 8 * SHAPE.weights // processes
    assert host_bytes(on_gpu) == 0


@pytest.mark.parametrize("lora", [0, 64])
@pytest.mark.parametrize("hidden", [256, 320, 288])
def test_moments_in_8_bits(lora: int, hidden: int) -> None:
    """Rows of 288 numbers are not whole blocks; adapters of rank 64 have few but whole blocks."""
    shape = replace(SHAPE, hidden=hidden, tied=True)
    load = Load(shape, 2, True, True, False, TOKENS, LINE, lora=lora, narrow_moments=True)
    student = make_model(MemoryCase("llama", load))
    trained_weights = [weight for weight in student.parameters() if weight.requires_grad]
    moment_bytes = [
        weight.numel() * (1 + 4 / BLOCK) if is_quantized(weight) else 4 * weight.numel()
        for weight in trained_weights
    ]
    assert resident_bytes(load)["optimizer"] == 2 * sum(moment_bytes) // 2
    largest = max(weight.numel() for weight in trained_weights)
    assert optimizer_bytes(load)["temporary"] == 8 * largest // 2


class TestCommand:
    @pytest.fixture
    def file(self, tmp_path: Path) -> str:
        (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
        path = tmp_path / "job.toml"
        path.write_text(
            f'[student]\nmodel = "{tmp_path}"\ndtype = "bfloat16"\n[data]\npath = "p.jsonl"\n'
            '[train]\nsharding = "fsdp2"\n'
        )
        return str(path)

    def test_it_prints_every_stage(self, file: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", file, "--gpus", "8"]) == 0
        output = capsys.readouterr().out
        assert output.startswith("7.62 billion weights, 7.62 billion trained, on 8 GPUs, FSDP2")
        for word in ("SAMPLING", "LEARNING", "key-value cache", "activations", "The job fits"):
            assert word in output

    def test_a_small_model_has_its_weights_in_full(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        small = QWEN_7B | sizes | {"num_attention_heads": 4, "vocab_size": 99}
        (tmp_path / "config.json").write_text(json.dumps(small))
        assert main(["plan", file]) == 0
        weights = shape_of(small).weights
        assert capsys.readouterr().out.startswith(f"{weights:,} weights, {weights:,} trained, on 1")

    def test_json_has_bytes(self, file: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--json", "plan", file, "--gpus", "8", "--memory", "24"]) == 1
        plan = json.loads(capsys.readouterr().out)
        assert plan["fits"] is False
        assert plan["usable"] == round(USABLE * 24 * GIB)
        stages = [sum(bytes_by_part.values()) for bytes_by_part in plan["bytes"].values()]
        assert max(stages) == plan["peak"] > plan["usable"]
        assert any(change.startswith("student.lora") for change in plan["changes"])
        assert plan["data"] is None

    def test_wrong_requests_are_one_sentence(
        self, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The library reads the environment variable only when it is imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        capture = str(ROOT / "deploy" / "jobs" / "gsm8k_capture.toml")
        for code, arguments, message in (
            (2, [file, "--gpus", "0"], "--gpus"),
            (2, [file, "--gpus", "64"], "train.prompts_per_step: 32 sequences are too few for 64"),
            (4, [file, "--set", "student.model=no/model"], "student.model: no config.json of"),
            (2, [capture], "method.type: a job of method capture trains no student"),
        ):
            assert main(["plan", *arguments]) == code
            assert message in capsys.readouterr().err
