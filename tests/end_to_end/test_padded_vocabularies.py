"""Teachers and students of one tokenizer whose heads have different widths.

A tokenizer of 300 tokens; models with 320 and 336 logits. The job must be that of two models
without the padding: the same tokens, losses and weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import metrics_of, new_run

CHARACTERS = "0123456789+=" + "".join(chr(0x4E00 + number) for number in range(287))
TOKENS, NARROW, WIDE = 300, 320, 336
PROMPTS = ["12+34=", "5+6=", "1+1=", "70+8=", "9+9=", "33+44="] * 8
# Metrics that must be equal; times and memory may differ.
COMPARED = ("loss", "grad_norm", "kl/teacher", "entropy", "topk/teacher_mass", "topk/student_mass")


def make_padded_model(seed: int) -> Any:
    """Return a model with the widest head, whose padding has as much mass as its tokens."""
    import torch

    from student_trainer.tools.pretrain import make_model
    from tests.student_trainer import tiny

    torch.manual_seed(seed)
    model = make_model(WIDE, tiny.tokenizer(CHARACTERS), 1, 32).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.3)
    return model


def make_biased_model(seed: int) -> Any:
    """Return a model whose padding has no mass, because of the head's bias."""
    import torch
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(seed)
    config = PhiConfig(
        vocab_size=WIDE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        resid_pdrop=0.0,
    )
    model = PhiForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.3)
        model.lm_head.bias.normal_()
        model.lm_head.bias[TOKENS:] = -1e4
    return model


def save_cut_model(model: Any, width: int, path: Path) -> Path:
    """Save the model with its first `width` ids only."""
    import copy

    from tests.student_trainer import tiny

    config = copy.deepcopy(model.config)
    config.vocab_size = width
    cut_model = type(model)(config)
    state = {
        name: value[:width] if value.shape[:1] == (WIDE,) else value
        for name, value in model.state_dict().items()
    }
    cut_model.load_state_dict(state)
    return tiny.save(cut_model, tiny.tokenizer(CHARACTERS), path)


class Pairs:
    """A teacher and a student in several widths, which are saved on the first use."""

    def __init__(self, root: Path, make_model: Callable[[int], Any]) -> None:
        self._root = root
        self._teacher, self._student = make_model(1), make_model(2)
        self.prompts = root / "prompts.jsonl"
        lines = [json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in PROMPTS]
        self.prompts.write_text("".join(lines))

    def model(self, kind: str, width: int) -> Path:
        path = self._root / f"{kind}-{width}"
        if not path.exists():
            save_cut_model(self._teacher if kind == "teacher" else self._student, width, path)
        return path

    @contextmanager
    def serve_teacher(self, width: int) -> Iterator[str]:
        arguments = ["--model", str(self.model("teacher", width)), "--batch-invariant"]
        log = self._root / "teacher.log"
        process = ForkedTeacher([*arguments, "--no-cache", "--device", "cpu"], log=log)
        yield process.address
        process.close()


@pytest.fixture(
    scope="module",
    params=[make_padded_model, pytest.param(make_biased_model, marks=pytest.mark.slow)],
    ids=["cut", "without mass"],
)
def width_pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"), request.param)


def make_material(width_pairs: Pairs, student: int) -> Any:
    from tests.student_trainer.tiny import Material

    return Material(width_pairs.prompts, Path(), width_pairs.model("student", student))


def make_job(kind: str, width_pairs: Pairs, student: int, address: str) -> Any:
    """A job of three steps, with rows in float32: float16 would round equal logs differently."""
    from tests.student_trainer import tiny

    common: dict[str, Any] = {
        "max_steps": 3,
        "eval__every": 3,
        "train__learning_rate": 1e-3,
        "checkpoint__every": 3,
        "teacher__logprob_format": "f32",
    }
    if kind == "rl":
        rl = {"teacher__address": address, "method__updates_per_step": 1}
        return tiny.rl_job(make_material(width_pairs, student), **common, **rl, eval__metric="none")
    options = {"method__divergence": "forward_kl"} if kind == "forward" else {}
    options |= {"eval__metric": "none"}
    return tiny.job(make_material(width_pairs, student), address, **common, **options)


def run_pair(kind: str, width_pairs: Pairs, student: int, teacher: int, root: Path) -> RunDirectory:
    with width_pairs.serve_teacher(teacher) as address:
        path = root / f"{kind}-{student}-{teacher}"
        return finish(new_run(path, make_job(kind, width_pairs, student, address)))


def assert_same_run(actual: RunDirectory, expected: RunDirectory) -> None:
    """Compare the metrics, and the weights that both runs have."""
    lines, expected_lines = metrics_of(actual), metrics_of(expected)
    assert [line["step"] for line in lines] == [line["step"] for line in expected_lines]
    for line, expected_line in zip(lines, expected_lines, strict=True):
        for name in COMPARED:
            assert (name in line) == (name in expected_line)
            if name in line:
                assert line[name] == pytest.approx(expected_line[name], rel=1e-6, abs=1e-7), name
    from safetensors.torch import load_file

    actual_weights, expected_weights = (
        load_file(run.export / "model.safetensors") for run in (actual, expected)
    )
    assert actual_weights.keys() == expected_weights.keys()
    # All weights together: the bias of keys has no effect, and learns only from rounding.
    squared_difference = sum(
        float((actual_weights[name][: len(value)] - value).square().sum())
        for name, value in expected_weights.items()
    )
    squared_norm = sum(float(value.square().sum()) for value in expected_weights.values())
    assert squared_difference**0.5 <= 1e-6 * squared_norm**0.5


EACH_WIDTH = pytest.mark.parametrize(
    "widths",
    [pytest.param((NARROW, WIDE), marks=pytest.mark.slow), (WIDE, NARROW)],
    ids=["wide teacher", "wide"],
)


@EACH_WIDTH
@pytest.mark.parametrize(
    "kind",
    [
        "reverse",
        pytest.param("forward", marks=pytest.mark.slow),
        pytest.param("rl", marks=pytest.mark.slow),
    ],
)
def test_the_run_is_that_of_unpadded_models(
    kind: str, widths: tuple[int, int], width_pairs: Pairs, tmp_path: Path
) -> None:
    """Of 320 and 336 logits the first 320 count; if the padding has no mass, the 300 tokens."""
    student, teacher = widths
    count = TOKENS if has_biased_head(width_pairs) else NARROW
    unpadded_run = run_pair(kind, width_pairs, count, count, tmp_path)
    padded_run = run_pair(kind, width_pairs, student, teacher, tmp_path)
    assert_same_run(padded_run, unpadded_run)
    if student == WIDE:
        assert_untouched(width_pairs, padded_run)


def has_biased_head(width_pairs: Pairs) -> bool:
    return type(width_pairs._student).__name__ == "PhiForCausalLM"


def assert_untouched(width_pairs: Pairs, run: RunDirectory) -> None:
    """The padding of the student has no gradient, so its weights do not change."""
    from safetensors.torch import load_file

    old_weights = load_file(width_pairs.model("student", WIDE) / "model.safetensors")
    new_weights = load_file(run.export / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert bool((new_weights[name][NARROW:] == old_weights[name][NARROW:]).all())
    assert bool((new_weights[name][:NARROW] != old_weights[name][:NARROW]).any())


def capture_rows(width_pairs: Pairs, student: int, teacher: int, root: Path) -> Path:
    """Capture the teacher's rows for a student, with nearly all ids in the head."""
    from clients.config.capture import CaptureJob
    from tests.teacher_service.capture.material import capture_here

    values = {
        "data": {"path": str(width_pairs.prompts)},
        "teacher": {
            "model": str(width_pairs.model("teacher", teacher)),
            "top_k": 290,
            "logprob_format": "f32",
        },
        "student": {"model": str(width_pairs.model("student", student))},
        "method": {"type": "capture", "max_tokens": 64},
    }
    _, store = capture_here(root / f"capture-{student}", CaptureJob.model_validate(values))
    return store


@EACH_WIDTH
def test_a_store_and_its_offline_job(
    widths: tuple[int, int], width_pairs: Pairs, tmp_path: Path
) -> None:
    """The capture names its student, so it leaves out ids that the student does not have."""
    import torch

    from clients.store.dataset import LogitDataset
    from tests.student_trainer import tiny

    torch.set_num_threads(1)
    student, teacher = widths
    count = TOKENS if has_biased_head(width_pairs) else NARROW
    runs = []
    for student_width, teacher_width, root in (
        (student, teacher, "padded"),
        (count, count, "plain"),
    ):
        (tmp_path / root).mkdir()
        store = capture_rows(width_pairs, student_width, teacher_width, tmp_path / root)
        assert LogitDataset(store).metadata["vocab_size"] == str(min(student_width, teacher_width))
        config = tiny.offline_job(
            make_material(width_pairs, student_width),
            store,
            max_steps=3,
            eval__every=3,
            checkpoint__every=3,
        )
        runs.append(finish(new_run(tmp_path / root / "run", config)))
    assert_same_run(*runs)


def test_a_store_about_more_ids_than_the_student_has(width_pairs: Pairs, tmp_path: Path) -> None:
    from protos.errors import WrongState
    from student_trainer.data.captured_stores import open_stores
    from student_trainer.model.loading import vocabulary
    from student_trainer.run.model_checks import check_stored_vocabulary
    from tests.student_trainer import tiny

    store = capture_rows(width_pairs, WIDE, WIDE, tmp_path)
    config = tiny.offline_job(make_material(width_pairs, NARROW), store)
    with pytest.raises(WrongState, match=r"cover 336 ids, but .* for 320 only; capture again"):
        check_stored_vocabulary(
            open_stores(config).training,
            vocabulary(tiny.tokenizer(CHARACTERS)),
            NARROW,
            None,
        )
