"""Compiled layers equal eager ones, and new lengths cause no recompilation."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

from clients.config.tables.common import LoraConfig, StudentConfig
from protos.errors import InvalidInput
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.packing import Layout
from student_trainer.data.sequence import Rollout
from student_trainer.model.loading import recompute_activations
from student_trainer.model.lora import add_adapters
from student_trainer.model.student import Student, compile_layers
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.parallel.passes import run_passes
from student_trainer.parallel.sharding import distribute
from student_trainer.parallel.shards import full_tensor
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.methods.test_sft import learn_step, trainer_of
from tests.student_trainer.saving import LIMIT

# PyTorch suppresses this warning itself, unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
# Lengths of each batch: several lines and one line, with and without padding.
LENGTHS = ([5, 9], [8, 8], [6], [4, 3, 20])
NEW_LENGTHS = ([7, 3, 4], [12, 11, 10], [9, 9, 9], [8], [20, 3], [3, 6, 5, 2, 7], [30])
# Dynamo and autograd without the C++ compiler, which takes minutes per layer on a slow machine.
FAST_BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _reset_compiler() -> Iterator[None]:
    """Reset the compiler, whose cache is shared by all models of a class."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def use_backend(backend: str, patch: Callable[..., None]) -> None:
    """Change the default backend of torch.compile."""
    original = torch.compile
    patch(torch, "compile", lambda *of, **options: original(*of, backend=backend, **options))


def batch(lengths: Sequence[int], layout: Layout) -> Batch:
    scored_sequences = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(length + number)
        ids, top = torch.randint(13, (length,), generator=generator), torch.zeros(length - 1, 1)
        rollout = Rollout(ids, 1, top.long(), torch.zeros(length - 1), False, "")
        scored_sequences.append(ScoredSequence(rollout, placeholder_rows(top.int().numpy())))
    return make_batch(scored_sequences, torch.device("cpu"), layout)


def learn(student: Any, layout: Layout, model: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all batches, and the sums of their gradients.

    NEW_LENGTHS cause no recompilation.
    """
    losses, graphs = [], 0
    for lengths in (*LENGTHS, *NEW_LENGTHS):
        if lengths == NEW_LENGTHS[0]:
            graphs = counters["stats"]["unique_graphs"]
        out = student(batch(lengths, layout), lambda rows, _: -rows.token_logprobs.exp(), 1.0)
        out.loss_sum.backward()
        losses.append(float(out.loss_sum.detach()))
    assert counters["stats"]["unique_graphs"] == graphs
    named = model.named_parameters()
    return losses, {name: full_tensor(p.grad) for name, p in named if p.grad is not None}


def assert_equal(losses_and_gradients: Any, expected: Any, tolerance: float) -> None:
    assert losses_and_gradients[0] == pytest.approx(expected[0], rel=tolerance)
    assert losses_and_gradients[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (losses_and_gradients[1][name] - gradient).norm() <= tolerance * gradient.norm(), (
            name
        )


def learn_with_layers(
    model: Any, *, compiled: bool, layout: Layout = "padded", bf16: bool = False
) -> Any:
    student = Student(model.train(), bf16=bf16)
    if compiled:
        compile_layers(student)
    return learn(student, layout, model)


def gpt2() -> Any:
    """A model in float64 everywhere, unlike newer models, whose norms use float32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    end_tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **end_tokens)).double()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_compiled_code_computes_the_same() -> None:
    compiled = learn_with_layers(gpt2(), compiled=True)
    assert 0 < counters["stats"]["unique_graphs"] <= 3, "with padding, without, and of one line"
    assert not counters["graph_break"]
    assert_equal(compiled, learn_with_layers(gpt2(), compiled=False), 1e-10)


@pytest.mark.parametrize(
    ("policy", "layout", "bf16"),
    [
        (False, "one_line", False),
        pytest.param(True, "padded", True, marks=pytest.mark.slow),
        pytest.param(2, "lines", False, marks=pytest.mark.slow),
        pytest.param("selective", "lines", True, marks=pytest.mark.slow),
    ],
)
def test_layouts_and_recomputation(
    monkeypatch: pytest.MonkeyPatch, policy: bool | int | str, layout: Layout, bf16: bool
) -> None:
    use_backend(FAST_BACKEND, monkeypatch.setattr)

    def model() -> Any:
        student_model = tiny.model(layers=2)
        recompute_activations(student_model, policy)
        return student_model

    compiled = learn_with_layers(model(), compiled=True, layout=layout, bf16=bf16)
    assert counters["stats"]["unique_graphs"] > 0
    expected = learn_with_layers(model(), compiled=False, layout=layout, bf16=bf16)
    assert_equal(compiled, expected, 2e-2 if bf16 else 1e-5)


@pytest.mark.slow
def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(FAST_BACKEND, monkeypatch.setattr)

    def model() -> Any:
        adapted_model = tiny.model(layers=2)
        torch.manual_seed(1)
        add_adapters(adapted_model, StudentConfig(model="-", lora=LoraConfig(rank=4)))
        return adapted_model

    compiled = learn_with_layers(model(), compiled=True)
    assert_equal(compiled, learn_with_layers(model(), compiled=False), 1e-5)


def learn_in_group(sharding: str, bf16: bool, out: Path) -> None:
    """Learn with eager and compiled layers in each process; score without a gradient between."""
    use_backend(FAST_BACKEND, setattr)
    results = []
    for compiled in (False, True):
        accelerator = make_accelerator(LIMIT)
        student = distribute(accelerator, Student(tiny.model(layers=2), bf16=bf16), sharding)
        student.choose_attention(StudentConfig(model="-"))
        if compiled:
            compile_layers(student.trained)
        student.trained.train()
        learn(student, "padded", student.trained.model)
        graphs = counters["stats"]["unique_graphs"]
        rows = partial(student.rows, temperature=1.0)
        run_passes(student, [[4, 4]], partial(batch, layout="padded"), rows)
        assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled for scoring"
        assert (graphs > 0) == compiled
        results.append(learn(student, "padded", student.trained.model))
    assert_equal(results[1], results[0], 2e-2 if bf16 else 1e-5)
    (out / f"{accelerator.process_index}").touch()


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "bf16"), [("none", False), ("fsdp2", False), ("fsdp2", True)])
def test_two_processes(tmp_path: Path, sharding: str, bf16: bool) -> None:
    group = tmp_path / "group"
    assert Forks(2, group, learn_in_group, sharding, bf16, tmp_path).wait() == [0, 0]
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


@pytest.mark.slow
def test_a_job_with_the_key_learns_compiled(
    monkeypatch: pytest.MonkeyPatch, material: tiny.Material, tmp_path: Path
) -> None:
    use_backend(FAST_BACKEND, monkeypatch.setattr)
    losses = []
    for compiled in (False, True):
        config = tiny.sft_job(material, student__compile=compiled)
        with trainer_of(tmp_path / str(compiled), config) as trainer:
            losses.append(learn_step(trainer)[0]["loss"])
            graphs = counters["stats"]["unique_graphs"]
            assert (graphs > 0) == compiled
            trainer._evaluate()
            assert counters["stats"]["unique_graphs"] == graphs
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    with pytest.raises(InvalidInput, match=r"cannot be compiled: .*compiler") as caught:
        compile_layers(Student(tiny.model()))
    assert caught.value.field == "student.compile"


def test_a_model_without_layers_is_refused() -> None:
    student = Student(tiny.model())
    student.model.model.layers = torch.nn.ModuleList()
    with pytest.raises(InvalidInput, match="define which modules are its layers"):
        compile_layers(student)
