"""Adapters: trained weights, checkpoints, and exports of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.models.tiny_configs import make_tiny_config
from clients.config.tables.common import LoraConfig, StudentConfig
from protos.errors import InvalidInput
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.export import export_model
from student_trainer.losses import LogitMap
from student_trainer.model import lora
from student_trainer.model.loading import load_model
from student_trainer.model.lora import add_adapters, trainable_weights
from student_trainer.model.probes import find_logit_map
from student_trainer.model.student import Student
from tests.student_trainer import tiny
from tests.student_trainer.model.test_student import (
    assert_rows,
    batch_of,
    exact_rows,
    gradients_of,
    soft_capped,
    untied,
)
from tests.student_trainer.saving import save_checkpoint

IDS = torch.arange(12)[None]
HEADS = ["frozen", "trained"]
MODELS = {"tied": lambda: tiny.model(seed=4, spread=0.2), "untied": lambda: untied(False)}


def config(path: Path, head: str = "frozen", **options: Any) -> StudentConfig:
    table = LoraConfig(rank=3, train_head=head == "trained")
    return StudentConfig(model=str(path), lora=table, **options)


@pytest.fixture(params=MODELS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model on disk."""
    return tiny.save(MODELS[request.param](), tiny.tokenizer(), tmp_path / "base")


def load_adapted(student: StudentConfig) -> Any:
    """Return a student with random adapters, as after training; initially B is zero."""
    return randomize_adapters(load_model(student))


def randomize_adapters(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(input_ids=IDS, use_cache=False).logits
    return out.float()


@pytest.mark.parametrize("head", HEADS)
def test_only_the_adapters_learn_and_the_head_if_asked(base: Path, head: str) -> None:
    base_model, model = load_model(StudentConfig(model=str(base))), load_model(config(base, head))
    assert type(model) is type(base_model)
    assert torch.equal(logits(model), logits(base_model))
    assert find_logit_map(model) == LogitMap()
    other_weights = {name for name in trainable_weights(model) if ".lora_" not in name}
    is_tied = model.config.tie_word_embeddings
    assert other_weights == (
        set()
        if head == "frozen"
        else {"lm_head.weight"} | ({"model.embed_tokens.weight"} if is_tied else set())
    )
    linears = sum(isinstance(module, torch.nn.Linear) for module in base_model.modules())
    assert len(trainable_weights(model)) - len(other_weights) == 2 * (linears - 1)
    assert model.model.layers[0].mlp.up_proj.scaling == {"default": 2.0}


@pytest.mark.parametrize("head", HEADS)
def test_the_fused_path_is_the_plain_one(base: Path, head: str) -> None:
    model = load_adapted(config(base, head))
    batch = batch_of(model)
    student = Student(model)
    fused, fused_grads = gradients_of(student, batch)
    student._logit_map = None
    _, plain_grads = gradients_of(student, batch)
    assert_rows(fused.rows, exact_rows(model, batch))
    assert (
        fused_grads.keys()
        == plain_grads.keys()
        == {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    )
    for name, grad in fused_grads.items():
        assert float((grad - plain_grads[name]).norm() / plain_grads[name].norm()) < 1e-5, name


def test_a_capped_head_is_fused_too() -> None:
    model = soft_capped()
    add_adapters(model, config(Path("unused")))
    student = Student(randomize_adapters(model))
    assert student._logit_map == LogitMap(13, cap=2.0)
    batch = batch_of(model)
    out, grads = gradients_of(student, batch)
    assert_rows(out.rows, exact_rows(model, batch))
    assert grads
    assert all(".lora_" in name and bool(grad.any()) for name, grad in grads.items())


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_a_mixture_of_experts_is_refused_before_it_learns() -> None:
    """Its export would fail at the end of training."""
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=13,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    with pytest.raises(InvalidInput, match="mixture of experts") as caught:
        add_adapters(model, config(Path("unused")))
    assert caught.value.field == "student.lora"


@pytest.mark.filterwarnings("default")  # those of the model's own code
@pytest.mark.parametrize(
    "kind", ["mamba", "falcon_h1", "jamba", "granitemoehybrid", "gemma3n_text", "dots3_note"]
)
def test_adapters_all_learn_in_models_that_read_weights_without_a_call(kind: str) -> None:
    """As do the kernels of state-space mixers, Gemma 3n in training, and indexers of keys."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_tiny_config(CONFIG_MAPPING[kind], kind))
    add_adapters(model, config(Path("unused")))
    targets = model.peft_config["default"].target_modules
    assert targets
    assert {name.split(".")[-1] for name in targets if ".mamba." in name or "mixer" in name} <= {
        "in_proj"
    }
    model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, adapter in adapters.items() if adapter.grad is None] == []
    assert len(adapters) == 2 * len(targets)


class _CastLinear(torch.nn.Linear):
    """A head of some models: its input is a keyword argument, its output is float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_of_another_dtype_has_an_adapter(dtype: torch.dtype) -> None:
    model = tiny.model(layers=1)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.__class__ = _CastLinear
    mlp.forward = lambda x: mlp.down_proj(
        (mlp.act_fn(mlp.gate_proj(hidden_states=x)) * mlp.up_proj(x)).to(dtype)
    )
    add_adapters(model.to(dtype), config(Path("unused")))
    assert len(model.peft_config["default"].target_modules) == 7


def test_modules_that_share_a_weight_have_no_adapters(caplog: pytest.LogCaptureFixture) -> None:
    """The merged export has the weight once."""
    model = tiny.model(layers=2)
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    second.weight = first.weight
    with caplog.at_level("INFO"):
        add_adapters(model, config(Path("unused")))
    assert "2 linear layers have no adapter, such as model.layers.0.mlp.up_proj" in caplog.text
    targets = model.peft_config["default"].target_modules
    assert len(targets) == 2 * 6
    assert not any("up_proj" in name for name in targets)


def test_adapters_that_peft_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_modules_without_adapters", lambda *_: None)
    model = AutoModelForCausalLM.from_config(make_tiny_config(CONFIG_MAPPING["mamba"], "mamba"))
    with pytest.raises(InvalidInput, match="peft cannot add adapters") as caught:
        add_adapters(model, config(Path("unused")))
    assert caught.value.field == "student.lora"


def test_recomputed_activations_change_nothing(base: Path) -> None:
    gradients_by_run: list[dict[str, Tensor]] = []
    calls: list[int] = []
    for recompute in (False, True):
        model = load_adapted(config(base, gradient_checkpointing=recompute))
        batch, student = batch_of(model), Student(model.train())
        adapter = model.model.layers[0].mlp.up_proj.lora_A["default"]
        hook = adapter.register_forward_hook(lambda *_: calls.append(len(gradients_by_run)))
        gradients_by_run.append(gradients_of(student, batch)[1])
        hook.remove()
    assert calls == [0, 1, 1]
    for name, grad in gradients_by_run[0].items():
        assert torch.equal(grad, gradients_by_run[1][name])


def test_bfloat16_keeps_what_learns_in_float32(base: Path) -> None:
    wide_model = load_adapted(config(base, "trained"))
    narrow_model = load_adapted(config(base, "trained", dtype="bfloat16"))
    kinds = {(p.requires_grad, p.dtype) for p in narrow_model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    batch = batch_of(wide_model)
    _, wide_gradients = gradients_of(Student(wide_model), batch)
    _, narrow_gradients = gradients_of(Student(narrow_model, bf16=True), batch)
    assert wide_gradients.keys() == narrow_gradients.keys()
    for name, grad in narrow_gradients.items():
        assert grad.dtype == torch.float32
        assert (
            float(torch.cosine_similarity(grad.flatten(), wide_gradients[name].flatten(), dim=0))
            > 0.98
        )


# peft reads a deprecated name of transformers.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS)
def test_exports_are_the_model(base: Path, tmp_path: Path, head: str, dtype: Any) -> None:
    """The merged directory in transformers, and the adapter on its base in peft."""
    model = load_adapted(config(base, head, dtype=dtype))
    export = tmp_path / "export"
    export_model(export, model=model, tokenizer=tiny.tokenizer())
    expected = logits(model.float())
    merged = AutoModelForCausalLM.from_pretrained(export)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert set(merged.state_dict()) == set(AutoModelForCausalLM.from_pretrained(base).state_dict())
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).float()
    assert not torch.allclose(logits(plain), expected, atol=1e-2)
    on_base = PeftModel.from_pretrained(plain, export / "adapter")
    torch.testing.assert_close(logits(on_base), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_a_checkpoint_has_what_learns_and_nothing_else(
    base: Path, tmp_path: Path, head: str
) -> None:
    def run_steps(model: Any, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 3):
            ids = torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def load_student(checkpoint_path: Path | None) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = load_model(
            config(base, head), checkpoint_path / "model" if checkpoint_path else None
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if checkpoint_path:
            checkpoint.load_optimizer(checkpoint_path, model, optimizer)
        return model, optimizer

    model, optimizer = load_student(None)
    run_steps(model, optimizer, 0)
    save_checkpoint(tmp_path, 3, model=model, tokenizer=tiny.tokenizer(), optimizer=optimizer)
    checkpoint_path = checkpoint.checkpoint_path(tmp_path, 3)
    with safe_open(checkpoint_path / "model" / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == len(trainable_weights(model))
    with safe_open(checkpoint_path / "optimizer.safetensors", "pt") as file:
        assert len(file.keys()) == 3 * sum(p.requires_grad for p in model.parameters())
    assert not (checkpoint_path / "model" / "model.safetensors").exists()

    resumed_model, resumed_optimizer = load_student(checkpoint_path)
    for trained_model, its_optimizer in ((model, optimizer), (resumed_model, resumed_optimizer)):
        run_steps(trained_model, its_optimizer, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resumed_model.get_parameter(name)), name


def test_adapters_of_another_table_are_refused(base: Path, tmp_path: Path) -> None:
    model = load_model(config(base))
    save_checkpoint(
        tmp_path,
        1,
        model=model,
        tokenizer=tiny.tokenizer(),
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    adapter_path = checkpoint.checkpoint_path(tmp_path, 1) / "model"
    load_model(config(base), adapter_path)
    wider_config = config(base).model_copy(update={"lora": LoraConfig(rank=4)})
    for student_config, directory in (
        (wider_config, adapter_path),
        (config(base, "trained"), adapter_path),
        (config(base), base),
    ):
        with pytest.raises(InvalidInput, match="other adapters") as caught:
            load_model(student_config, directory)
        assert caught.value.field == "student.lora"
