"""The self-test of a student: the safe path that it chooses, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from benchmarks.models.tiny_configs import make_tiny_config
from clients.config.tables.common import LoraConfig, StudentConfig
from clients.data.models.shape import rope_switch
from protos.errors import InvalidInput
from student_trainer.model.lora import add_adapters
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.rollouts.sampler import Sampler, rollout_noise
from student_trainer.rollouts.sampling_probe import probe_sampling
from student_trainer.run.model_checks import max_sequence_length
from student_trainer.run.self_test import SelfTest, run_self_test
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.teachers.anchors import LIMIT, spread_student

SWITCH = 16


def run(model: Any, *, bf16: bool = False, **options: Any) -> SelfTest:
    student = spread_student(model, pack=True, bf16=bf16)
    accelerator = make_accelerator(LIMIT)
    result = run_self_test(student, tiny.tokenizer(), accelerator, **{"samples": True, **options})
    assert not student.trained.training
    assert all(weight.grad is None for weight in student.trained.parameters())
    assert student.full.equal_lengths == result.equal_lengths
    return result


def random_model(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_tiny_config(CONFIG_MAPPING[kind], kind)).eval()
    model.get_output_embeddings().weight.data.normal_(std=0.5)
    return model


def long_rope_model(long_factor: float = 8.0) -> Phi3ForCausalLM:
    """Return a model whose rotary factors change beyond SWITCH tokens."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 8, "long_factor": [long_factor] * 8}
    config = Phi3Config(
        vocab_size=13,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=SWITCH,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": SWITCH,
            **factors,
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=tiny.tokenizer().eos_token_id,
    )
    model = Phi3ForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=0.5)
    return model


def plain_logprobs(model: Any, before: Tensor, sampled: Tensor) -> Tensor:
    ids = torch.cat([before, sampled])
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    return logits.log_softmax(1).gather(1, ids[1:, None])[-len(sampled) :, 0]


def test_a_student_that_passes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        result = run(tiny.model(layers=2))
    assert result == SelfTest("lines", fused=True, equal_lengths=False, untrained=())
    lines = [r.getMessage() for r in caplog.records if "self-test" in r.getMessage()]
    assert lines == ["self-test passed: several sequences in a line, a fused head"]


def test_adapters_pass() -> None:
    model = tiny.model()
    add_adapters(model, StudentConfig(model="-", lora=LoraConfig(rank=2)))
    assert run(model).untrained == ()


def test_noise_in_training_is_refused() -> None:
    model = tiny.model()
    model.model.norm.register_forward_hook(
        lambda _, __, out: nn.Dropout(0.1).train(model.training)(out)
    )
    with pytest.raises(InvalidInput, match="training mode differs from evaluation mode") as caught:
        run(model)
    assert caught.value.field == "student.model"


def test_a_kernel_that_rarely_adds_in_another_order_is_no_noise() -> None:
    """Only the first pass in training mode differs, in its last bits."""
    model, passes = tiny.model(), []

    def round_otherwise(_: Any, __: Any, out: Tensor) -> Tensor:
        passes.extend([0] * model.training)
        return out * (1 + 1e-6) if len(passes) == 1 and model.training else out

    model.model.norm.register_forward_hook(round_otherwise)
    run(model, samples=False)
    assert passes


def test_a_student_that_sees_later_tokens_is_refused() -> None:
    model = tiny.model()
    model.model.norm.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    with pytest.raises(InvalidInput, match="a longer sequence in the batch changes its log-probs"):
        run(model)


@torch.no_grad()
def scale_states(model: Any, nats: float, is_scaled: Callable[[Any], bool]) -> None:
    """Change log-probs by at most `nats` in batches of some shapes, with larger states."""
    logits = model(torch.arange(6)[None]).logits[0, :-1]
    changes = (1.01 * logits).log_softmax(-1) - logits.log_softmax(-1)
    change = changes.gather(-1, logits.topk(8).indices).abs().max()
    scale = 1 + 0.01 * nats / float(change)
    model.model.norm.register_forward_hook(
        lambda _, __, out: out * (scale if is_scaled(out.shape[:2]) else 1)
    )


def test_a_small_leak_is_refused_in_bfloat16() -> None:
    """The log-probs change by 0.12 nats where those of equal sequences do not change."""
    assert run(tiny.model(), bf16=True, samples=False).untrained == ()
    model = tiny.model()
    scale_states(model, 0.12, lambda shape: shape[1] > 6)
    with pytest.raises(InvalidInput, match=r"log-probs by 0\.1\d* nats; at most 0\.00025"):
        run(model, bf16=True, samples=False)


@pytest.mark.filterwarnings("default")  # those of the model's own code
def test_rounding_is_no_leak_in_bfloat16() -> None:
    """The log-probs of this model differ by 0.18 nats in one shape, and by 1e-5 in float32."""
    model = random_model("blt")
    model.get_output_embeddings().weight.data *= 3
    assert run(model, bf16=True, samples=False).untrained == ()


def test_the_refusal_in_bfloat16_names_float32() -> None:
    """The frozen weights under adapters are bfloat16, so float32 cannot decide."""
    model = tiny.model()
    scale_states(model, 0.12, lambda shape: shape[1] > 6)
    add_adapters(model.to(torch.bfloat16), StudentConfig(model="-", lora=LoraConfig(rank=2)))
    with pytest.raises(InvalidInput, match=r"causal student, or student\.dtype = 'float32'"):
        run(model, bf16=True, samples=False)


def test_the_noise_of_large_logits_is_accepted_in_bfloat16() -> None:
    """Log-probs change by 0.3 nats with every shape of the batch."""
    model = tiny.model()
    scale_states(model, 0.3, lambda shape: shape != (1, 6))
    assert run(model, bf16=True, samples=False).untrained == ()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full")])
@pytest.mark.parametrize("rows", [1, 2])
def test_too_little_memory_is_no_fault_of_the_student(error: Exception, rows: int) -> None:
    model = tiny.model()

    def fail(_: Any, __: Any, options: dict[str, Any]) -> None:
        if options["input_ids"].shape[0] == rows:
            raise error

    model.model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(type(error), match="full"):
        probe_sampling(model, tiny.tokenizer())


def _test_one_wrong_rank(_: Path) -> None:
    """The rank 1 alone has a model that leaks; its refusal reaches rank 0, which waits for none."""
    rank = int(os.environ["RANK"])
    model = tiny.model()
    hook = (lambda _, __, out: out + out.mean(1, keepdim=True)) if rank else (lambda *_: None)
    model.model.norm.register_forward_hook(hook)
    with pytest.raises(InvalidInput, match="a longer sequence in the batch changes"):
        run(model, samples=False)


def test_a_refusal_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    assert Forks(2, tmp_path / "group", _test_one_wrong_rank, tmp_path).wait() == [0, 0]


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny.model()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match="the logits are not finite"):
        run(model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_is_refused(value: float) -> None:
    model = tiny.model()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(3), value))
    with pytest.raises(InvalidInput, match="a gradient is not finite"):
        run(model)


def test_a_weight_without_a_gradient_is_told_and_an_adapter_is_refused() -> None:
    model = tiny.model()
    model.unused = nn.Linear(2, 2, bias=False)
    result = run(model)
    assert result.untrained == ("unused.weight",)
    assert str(result).endswith("1 weights without a gradient, such as unused.weight")
    model = tiny.model()
    model.unused_lora_ = nn.ModuleDict({"lora_A": nn.Linear(2, 2, bias=False)})
    with pytest.raises(InvalidInput, match="gets no gradient") as caught:
        run(model)
    assert caught.value.field == "student.lora"


def test_a_cache_that_changes_the_policy_is_refused_where_the_trainer_samples() -> None:
    model = tiny.model()

    def forget_positions(module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        if options.get("use_cache") and options.get("position_ids") is not None:
            options["position_ids"] = torch.zeros_like(options["position_ids"])
        return inputs, options

    model.model.register_forward_pre_hook(forget_positions, with_kwargs=True)
    assert not run(model, samples=False).equal_lengths
    with pytest.raises(InvalidInput, match="sampling a sequence with a cache differs by"):
        run(model)


@pytest.mark.parametrize(("steps", "is_refused"), [(1, False), (8, True)])
def test_large_logits_may_differ_by_a_step_of_bfloat16(steps: int, is_refused: bool) -> None:
    model = tiny.model()
    model.lm_head.weight.data *= 6
    signs = torch.tensor([1.0, -1.0]).repeat(model.config.vocab_size)[: model.config.vocab_size]

    def move_logits(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        assert 64 < float(logits.abs().amax(-1).min()) < 128, "steps of 0.5"
        is_cached = logits.shape[1] == 1
        return (logits + is_cached * steps * 0.5 * signs).to(logits.dtype)

    model.lm_head.register_forward_hook(move_logits)
    probe = probe_sampling(model, tiny.tokenizer(), bf16=True)
    assert (probe.fault is not None) == is_refused


@pytest.mark.filterwarnings("default")  # those of the model's own code
@pytest.mark.parametrize(
    ("kind", "equal_lengths"),
    [("llama", False), ("deepseek_v4", True)],
)
def test_where_padding_changes_the_policy_prompts_of_one_length_are_sampled(
    kind: str, equal_lengths: bool
) -> None:
    model = random_model(kind)
    probe = probe_sampling(model, tiny.tokenizer())
    assert (probe.fault, probe.equal_lengths) == (None, equal_lengths)
    sampler = Sampler(
        model, tiny.tokenizer(), top_k=0, temperature=1.0, equal_lengths=equal_lengths
    )
    before = [torch.arange(5, 5 + length) for length in (3, 9, 3, 6)]
    noise = [rollout_noise(number, 0, 5) for number in range(4)]
    samples = sampler.write(before, [5, 4, 5, 5], noise)
    for ids, sample in zip(before, samples, strict=True):
        expected = plain_logprobs(model, ids, sample.token_ids)
        torch.testing.assert_close(sample.token_logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("default")  # those of the model's own code
@pytest.mark.parametrize(
    ("kind", "fault"),
    [("rwkv", "two sequences of one length"), ("xlstm", "sampling fails: matC_old")],
)
def test_a_student_that_cannot_sample_is_refused(kind: str, fault: str) -> None:
    model = random_model(kind)
    with pytest.raises(InvalidInput, match=fault):
        run(model)
    assert not run(model, samples=False).equal_lengths


def test_long_rope_limits_the_sequences_of_a_job(caplog: pytest.LogCaptureFixture) -> None:
    config = long_rope_model().config
    assert (rope_switch(config), max_sequence_length(config)) == (SWITCH, SWITCH)
    assert "beyond 16 tokens (LongRoPE)" in caplog.text
    one_set = long_rope_model(long_factor=1.0).config
    assert (rope_switch(one_set), max_sequence_length(one_set)) == (None, 64)
    assert max_sequence_length(tiny.model().config) == tiny.model().config.max_position_embeddings


def test_a_line_longer_than_the_switch_is_each_sequence_alone() -> None:
    """The packed line of the probe and the batch of the test have more tokens than the switch."""
    model = long_rope_model()
    model.config.rope_parameters["original_max_position_embeddings"] = 11
    model.config.original_max_position_embeddings = 11
    result = run(model)
    assert (result.layout, result.equal_lengths) == ("lines", False)


def test_answers_that_cross_the_switch_are_sampled_with_others_of_their_length() -> None:
    model = long_rope_model()
    end = tiny.tokenizer().eos_token_id
    sampler = Sampler(model, tiny.tokenizer(), top_k=0, temperature=1.0, never=end)
    before = [torch.arange(3, 3 + length) for length in (3, 9)]
    noise = [rollout_noise(number, 0, 12) for number in range(2)]
    together = sampler.write(before, [12, 12], noise)
    lengths = []
    for index, sample in enumerate(together):
        (alone,) = sampler.write([before[index]], [12], [noise[index]])
        assert torch.equal(sample.token_ids, alone.token_ids)
        torch.testing.assert_close(sample.token_logprobs, alone.token_logprobs)
        lengths.append(len(before[index]) + len(sample.token_ids))
    assert min(lengths) < SWITCH < max(lengths)
