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
# Of these, only the seconds and the memory may differ.
COMPARED = ("loss", "grad_norm", "kl/teacher", "entropy", "topk/teacher_mass", "topk/student_mass")


def models(seed: int) -> Any:
    """A model of the widest head, whose padding has as much mass as its tokens."""
    import torch

    from student_trainer.tools.pretrain import make_model
    from tests.student_trainer import tiny

    torch.manual_seed(seed)
    made = make_model(WIDE, tiny.tokenizer(CHARACTERS), 1, 32).eval()
    with torch.no_grad():
        made.get_input_embeddings().weight.normal_(std=0.3)
    return made


def biased(seed: int) -> Any:
    """A model whose padding has no mass at all: a bias of the head takes it out."""
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
    made = PhiForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.normal_(std=0.3)
        made.lm_head.bias.normal_()
        made.lm_head.bias[TOKENS:] = -1e4
    return made


def save(made: Any, width: int, path: Path) -> Path:
    """With the first `width` ids of the model."""
    import copy

    from tests.student_trainer import tiny

    config = copy.deepcopy(made.config)
    config.vocab_size = width
    cut = type(made)(config)
    state = {
        name: value[:width] if value.shape[:1] == (WIDE,) else value
        for name, value in made.state_dict().items()
    }
    cut.load_state_dict(state)
    return tiny.save(cut, tiny.tokenizer(CHARACTERS), path)


class Pairs:
    """Runs of jobs of pairs of widths, made on the first demand."""

    def __init__(self, root: Path, make: Callable[[int], Any]) -> None:
        self._root = root
        self._teacher, self._student = make(1), make(2)
        self.prompts = root / "prompts.jsonl"
        lines = [json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in PROMPTS]
        self.prompts.write_text("".join(lines))

    def model(self, kind: str, width: int) -> Path:
        path = self._root / f"{kind}-{width}"
        if not path.exists():
            save(self._teacher if kind == "teacher" else self._student, width, path)
        return path

    @contextmanager
    def teaching(self, width: int) -> Iterator[str]:
        arguments = ["--model", str(self.model("teacher", width)), "--batch-invariant"]
        log = self._root / "teacher.log"
        process = ForkedTeacher([*arguments, "--no-cache", "--device", "cpu"], log=log)
        yield process.address
        process.close()


@pytest.fixture(scope="module", params=[models, biased], ids=["cut", "without mass"])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"), request.param)


def material(pairs: Pairs, student: int) -> Any:
    from tests.student_trainer.tiny import Material

    return Material(pairs.prompts, Path(), pairs.model("student", student))


def job(kind: str, pairs: Pairs, student: int, address: str) -> Any:
    """Of three steps, with rows in float32: in float16, two logs may round to two numbers."""
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
        return tiny.rl_job(material(pairs, student), **common, **rl, eval__metric="none")
    options = {"method__divergence": "forward_kl"} if kind == "forward" else {}
    options |= {"eval__metric": "none"}
    return tiny.job(material(pairs, student), address, **common, **options)


def run(kind: str, pairs: Pairs, student: int, teacher: int, root: Path) -> RunDirectory:
    with pairs.teaching(teacher) as address:
        path = root / f"{kind}-{student}-{teacher}"
        return finish(new_run(path, job(kind, pairs, student, address)))


def assert_same_run(found: RunDirectory, expected: RunDirectory) -> None:
    """The metrics, and the weights that both have."""
    lines, wanted = metrics_of(found), metrics_of(expected)
    assert [line["step"] for line in lines] == [line["step"] for line in wanted]
    for one, other in zip(lines, wanted, strict=True):
        for name in COMPARED:
            assert (name in one) == (name in other)
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-7), name
    from safetensors.torch import load_file

    one, other = (load_file(found.export / "model.safetensors") for found in (found, expected))
    assert one.keys() == other.keys()
    # All of them together: that of a bias of keys, which changes nothing, learns from rounding.
    apart = sum(
        float((one[name][: len(value)] - value).square().sum()) for name, value in other.items()
    )
    size = sum(float(value.square().sum()) for value in other.values())
    assert apart**0.5 <= 1e-6 * size**0.5


@pytest.mark.parametrize("widths", [(NARROW, WIDE), (WIDE, NARROW)], ids=["wide teacher", "wide"])
@pytest.mark.parametrize(
    "kind",
    [
        "reverse",
        pytest.param("forward", marks=pytest.mark.slow),
        pytest.param("rl", marks=pytest.mark.slow),
    ],
)
def test_the_run_is_that_of_unpadded_models(
    kind: str, widths: tuple[int, int], pairs: Pairs, tmp_path: Path
) -> None:
    """Of 320 and 336 logits the first 320 count; if the padding has no mass, the 300 tokens."""
    student, teacher = widths
    count = TOKENS if isinstance_of_phi(pairs) else NARROW
    expected = run(kind, pairs, count, count, tmp_path)
    found = run(kind, pairs, student, teacher, tmp_path)
    assert_same_run(found, expected)
    if student == WIDE:
        assert_untouched(pairs, found)


def isinstance_of_phi(pairs: Pairs) -> bool:
    return type(pairs._student).__name__ == "PhiForCausalLM"


def assert_untouched(pairs: Pairs, found: RunDirectory) -> None:
    """The padding of the student has no gradient: its weights are those of before."""
    from safetensors.torch import load_file

    before = load_file(pairs.model("student", WIDE) / "model.safetensors")
    after = load_file(found.export / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert bool((after[name][NARROW:] == before[name][NARROW:]).all())
    assert bool((after[name][:NARROW] != before[name][:NARROW]).any())


def capture(pairs: Pairs, student: int, teacher: int, root: Path) -> Path:
    """A store of the teacher's rows for a student, with the whole head but a few ids."""
    from clients.config.capture import CaptureJob
    from tests.teacher_service.capture.material import capture_here

    values = {
        "data": {"path": str(pairs.prompts)},
        "teacher": {
            "model": str(pairs.model("teacher", teacher)),
            "top_k": 290,
            "logprob_format": "f32",
        },
        "student": {"model": str(pairs.model("student", student))},
        "method": {"type": "capture", "max_tokens": 64},
    }
    _, store = capture_here(root / f"capture-{student}", CaptureJob.model_validate(values))
    return store


@pytest.mark.parametrize("widths", [(NARROW, WIDE), (WIDE, NARROW)], ids=["wide teacher", "wide"])
def test_a_store_and_its_offline_job(widths: tuple[int, int], pairs: Pairs, tmp_path: Path) -> None:
    """The capture names its student, and so leaves out what the student has not."""
    import torch

    from clients.store.dataset import LogitDataset
    from tests.student_trainer import tiny

    torch.set_num_threads(1)
    student, teacher = widths
    count = TOKENS if isinstance_of_phi(pairs) else NARROW
    runs = []
    for ours, theirs, root in ((student, teacher, "padded"), (count, count, "plain")):
        (tmp_path / root).mkdir()
        store = capture(pairs, ours, theirs, tmp_path / root)
        assert LogitDataset(store).metadata["vocab_size"] == str(min(ours, theirs))
        config = tiny.offline_job(
            material(pairs, ours), store, max_steps=3, eval__every=3, checkpoint__every=3
        )
        runs.append(finish(new_run(tmp_path / root / "run", config)))
    assert_same_run(*runs)


def test_a_store_about_more_ids_than_the_student_has(pairs: Pairs, tmp_path: Path) -> None:
    from protos.errors import WrongState
    from student_trainer.data.captured_stores import open_stores
    from student_trainer.model.loading import vocabulary
    from student_trainer.run.model_checks import check_stored_vocabulary
    from tests.student_trainer import tiny

    store = capture(pairs, WIDE, WIDE, tmp_path)
    config = tiny.offline_job(material(pairs, NARROW), store)
    with pytest.raises(WrongState, match=r"are about 336 ids, but .* for 320 only; capture again"):
        check_stored_vocabulary(
            open_stores(config).training,
            vocabulary(tiny.tokenizer(CHARACTERS)),
            NARROW,
            None,
        )
