"""Student: the fused and the plain path to the same loss, and models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from clients.config.on_policy import OnPolicyConfig
from clients.config.tables.common import StudentConfig
from protos.errors import InvalidInput, Unavailable
from student_trainer.data.batch import Batch, make_batch
from student_trainer.losses import FusedLoss, LogitMap, Rows
from student_trainer.model.loading import load_config, load_model, load_tokenizer, vocabulary
from student_trainer.model.probes import find_logit_map
from student_trainer.model.student import Student
from student_trainer.objectives.distillation import DistillationObjective, distillation_loss
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler
from student_trainer.teachers.source import PendingRows
from tests.student_trainer import tiny
from tests.student_trainer.model_teacher import ModelTeacher

METHOD = DistillationObjective.on_policy(OnPolicyConfig(temperature=1.3, tail="bucket+sampled"))


def untied(bias: bool) -> Any:
    model = tiny.model(seed=4, spread=0.2)
    head = nn.Linear(32, len(tiny.tokenizer()), bias=bias)
    with torch.no_grad():
        head.weight.normal_(std=0.5)
        if bias:
            head.bias.normal_(std=2.0)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    return model


def soft_capped() -> Any:
    torch.manual_seed(5)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=13,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            final_logit_softcapping=2.0,
            sliding_window=64,
            pad_token_id=0,
            eos_token_id=0,
            bos_token_id=None,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.7)
    return model


def batch_of(model: Any) -> Batch:
    rollouts = HuggingFaceRollouts(
        Sampler(model, tiny.tokenizer(), top_k=4, temperature=1.3),
        max_new_tokens=6,
        batch_tokens=1000,
    )
    prompts = [tiny.prompt(1, 2, 3), tiny.prompt(4), tiny.prompt(5, 6)]
    (batch_rollouts,) = rollouts.generate(prompts, range(3), seed=0)
    teacher = ModelTeacher(tiny.model(seed=9), temperature=1.3)
    pending = [PendingRows(rollout, teacher.score(rollout)) for rollout in batch_rollouts]
    return make_batch([item.wait() for item in pending], torch.device("cpu"))


def gradients_of(student: Student, batch: Batch) -> tuple[FusedLoss, dict[str, Tensor]]:
    student.zero_grad()
    out = student(batch, distillation_loss(batch, METHOD), METHOD.temperature)
    out.loss_sum.backward()
    grads = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    return out, grads


def exact_rows(model: Any, batch: Batch) -> Rows:
    """Return rows by their definition, in float64."""
    logits = batch.select(model(input_ids=batch.input_ids).logits.detach()).double()
    logprobs = (logits / METHOD.temperature).log_softmax(1)
    outside = logprobs.exp().scatter(1, batch.head_ids, 0.0).sum(1).log()
    token = logprobs.gather(1, batch.token_ids[:, None])[:, 0]
    return Rows(logprobs.gather(1, batch.head_ids), outside, token)


def assert_rows(rows: Rows, expected: Rows) -> None:
    for name in ("head_logprobs", "tail_logmass", "token_logprobs"):
        values, expected_values = getattr(rows, name), getattr(expected, name)
        torch.testing.assert_close(values.double(), expected_values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [lambda: tiny.model(seed=4, spread=0.2), lambda: untied(False), lambda: untied(True)],
    ids=["tied", "untied", "bias"],
)
def test_the_fused_path_is_the_plain_one(make: Any) -> None:
    model = make()
    assert find_logit_map(model) == LogitMap()
    batch = batch_of(model)
    student = Student(model)
    fused, fused_grads = gradients_of(student, batch)
    student._logit_map = None
    plain, plain_grads = gradients_of(student, batch)
    # Losses of tokens have either sign: the sum is small, the terms are not.
    size = float(plain.metrics["loss"].abs().sum())
    assert abs(float((fused.loss_sum - plain.loss_sum).detach())) < 1e-6 * size
    assert fused_grads.keys() == plain_grads.keys()
    for name, grad in fused_grads.items():
        error = float((grad - plain_grads[name]).norm() / plain_grads[name].norm())
        assert error < 1e-5, name
    assert_rows(fused.rows, exact_rows(model, batch))


def test_the_paths_are_one_in_bfloat16_too() -> None:
    """The head's product is in bfloat16, too, though the norm returns float32 states."""
    model = tiny.model(seed=4)
    batch = batch_of(model)
    student = Student(model, bf16=True)
    fused = gradients_of(student, batch)[0].rows
    student._logit_map = None
    plain = gradients_of(student, batch)[0].rows
    torch.testing.assert_close(fused.token_logprobs, plain.token_logprobs, rtol=1e-6, atol=1e-6)


def test_a_capped_head_is_not_taken_for_a_linear_one() -> None:
    model = soft_capped()
    assert find_logit_map(model) == LogitMap(cap=2.0)
    batch = batch_of(model)
    out, grads = gradients_of(Student(model), batch)
    assert_rows(out.rows, exact_rows(model, batch))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())
    # Uncapped rows differ enough for the test to fail.
    model.config.final_logit_softcapping = None
    assert find_logit_map(model) == LogitMap()
    with pytest.raises(AssertionError):
        assert_rows(out.rows, exact_rows(model, batch))


def test_masked_positions_get_no_gradient() -> None:
    """States at positions of prompts and padding have a zero gradient."""
    model = tiny.model(seed=4, spread=0.2)
    batch = batch_of(model)
    for fused in (True, False):
        student = Student(model)
        if not fused:
            student._logit_map = None
        states: list[Tensor] = []

        def keep_states(
            module: Any, inputs: Any, output: Any, states: list[Tensor] = states
        ) -> None:
            output.last_hidden_state.retain_grad()
            states.append(output.last_hidden_state)

        hook = model.get_decoder().register_forward_hook(keep_states)
        gradients_of(student, batch)
        hook.remove()
        grad = states[-1].grad
        assert grad is not None
        is_used = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
        is_used[batch.sequence, batch.position - 1] = True
        assert bool((grad[~is_used] == 0).all())
        assert bool((grad[is_used].abs().sum(1) > 0).all())


def test_padding_may_hold_anything() -> None:
    model = tiny.model(seed=4, spread=0.2)
    batch = batch_of(model)
    lengths = torch.zeros(len(batch.input_ids), dtype=torch.long)
    lengths.scatter_reduce_(0, batch.sequence, batch.position + 1, "amax")
    padding = torch.arange(batch.input_ids.shape[1])[None] >= lengths[:, None]
    assert bool(padding.any())
    _, before = gradients_of(Student(model), batch)
    batch.input_ids[padding] = 7
    _, after = gradients_of(Student(model), batch)
    for name, grad in before.items():
        torch.testing.assert_close(after[name], grad, rtol=1e-6, atol=1e-7)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    student = StudentConfig(model=str(tmp_path))
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(InvalidInput, match=r"no usable model|no config\.json") as caught:
            load(student)
        assert caught.value.field == "student.model"
        assert "safetensors" in caught.value.hint


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits for the hub; an unknown name is the user's error."""
    monkeypatch.setattr("clients.data.hub._is_offline_by_choice", False)
    student = StudentConfig(model="someone/no-such-model")
    for cause, error_class in ((ConnectionError("reset"), Unavailable), (None, InvalidInput)):

        def find(name: str, cause: Exception | None = cause) -> bool:
            raise OSError("no such model") from cause

        monkeypatch.setattr("student_trainer.model.loading.find_on_hub", find)
        with pytest.raises(error_class, match=r"student.model: no usable model at 'someone/no"):
            load_config(student)


def test_code_of_a_model_is_never_run(material: tiny.Material, tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('it ran')")
    config = json.loads((material.student / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(InvalidInput, match="its own Python code") as caught:
            load(StudentConfig(model=str(tmp_path)))
        assert caught.value.field == "student.model"


def test_weights_come_from_the_checkpoint_when_there_is_one(material: tiny.Material) -> None:
    model = load_model(StudentConfig(model=str(material.student)), material.teacher)
    assert model.config.num_hidden_layers == 2


def test_vocabulary(material: tiny.Material) -> None:
    words = load_tokenizer(StudentConfig(model=str(material.student)))
    assert vocabulary(words) == ["<|end|>", *sorted(tiny.ALPHABET)]
