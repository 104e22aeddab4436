"""Directories without weights, or with those of another model, are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clients.config.tables.common import StudentConfig
from clients.data.models.check import CONVERT, check_model
from protos.errors import InvalidInput
from student_trainer.model.loading import load_model, load_tokenizer, require_trainable
from teacher_service.models.files import model_directory
from teacher_service.models.loading import load_model as load_teacher
from tests.clients.data.fuzzing.tokenizer_files import write_tokenizer
from tests.student_trainer import tiny

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
DOWN = "model.layers.0.mlp.down_proj.weight"


def add_prefix(prefix: str) -> Change:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def drop_ending(ending: str) -> Change:
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not name.endswith(ending)
    }


def add_base_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights as peft does in a model with unmerged adapters."""
    return {
        name.replace("_proj.weight", "_proj.base_layer.weight"): tensor
        for name, tensor in tensors.items()
    }


CASES = {
    "one tensor away": (
        drop_ending("layers.0.mlp.down_proj.weight"),
        "has no weights for " + DOWN,
        "",
    ),
    "compiled": (add_prefix("_orig_mod."), "has no weights for ", "'_orig_mod.model."),
    "ddp": (add_prefix("module."), "has no weights for ", "'module.model."),
    "peft": (add_prefix("base_model.model."), "has no weights for ", "'base_model.model.model."),
    "not merged": (add_base_layers, "has no weights for ", ".base_layer.weight'"),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.save(tiny.model(layers=2), tiny.tokenizer(), tmp_path / "student")


def change_weights(directory: Path, change: Change) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def check_directory(student: StudentConfig) -> None:
    """As preflight does."""
    check_model(Path(student.model), "student.model", "trainer")


def change_config(directory: Path, **entries: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def load_and_catch(directory: Path, *, mapped: bool = False) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        load_model(StudentConfig(model=str(directory)), mapped=mapped)
    assert caught.value.field == "student.model"
    return caught.value


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_missing_weights_are_refused(
    case: tuple[Change, str, str], mapped: bool, directory: Path
) -> None:
    change, message, hint = case
    change_weights(directory, change)
    error = load_and_catch(directory, mapped=mapped)
    assert message in error.message
    assert hint in error.hint
    with pytest.raises(InvalidInput, match="has no weights for "):
        load_teacher(directory, dtype="float32")


def test_a_layer_too_many_in_the_config(directory: Path) -> None:
    change_config(directory, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert "has no weights for model.layers.2." in load_and_catch(directory).message


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_trillion_layers_in_the_config(directory: Path, is_sharded: bool) -> None:
    """Refused before transformers makes them, by preflight, the student and the teacher."""
    if is_sharded:
        tiny.model(layers=2).save_pretrained(directory, max_shard_size=2000)
        (directory / "model.safetensors").unlink()
    change_config(directory, num_hidden_layers=10**12)
    message = "has num_hidden_layers = 1000000000000, but the model's files have "
    assert message in load_and_catch(directory).message
    for check in (
        lambda: check_directory(StudentConfig(model=str(directory))),
        lambda: model_directory(str(directory), "hf"),
    ):
        with pytest.raises(InvalidInput) as caught:
            check()
        assert message in caught.value.message


def test_a_layer_too_few_in_the_config_is_told(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line, for the student and for the teacher, which computes with fewer layers too."""
    change_config(directory, num_hidden_layers=1, layer_types=["full_attention"])
    names = load_file(directory / "model.safetensors").keys()
    count = sum(name.startswith("model.layers.1.") for name in names)
    expected = f"has {count} tensors that its architecture does not use, such as model.layers.1."
    for load in (
        lambda: load_model(StudentConfig(model=str(directory))),
        lambda: load_teacher(directory, dtype="float32"),
    ):
        caplog.clear()
        load()
        [message] = [record.message for record in caplog.records if "tensors" in record.message]
        assert expected in message


def test_an_untied_head_that_is_away(directory: Path) -> None:
    head = torch.ones_like(load_file(directory / "model.safetensors")["model.embed_tokens.weight"])
    change_config(directory, tie_word_embeddings=False)
    assert "has no weights for lm_head.weight" in load_and_catch(directory).message
    change_weights(directory, lambda tensors: {**tensors, "lm_head.weight": head})
    model = load_model(StudentConfig(model=str(directory)))
    assert torch.equal(model.lm_head.weight, head)


def test_a_tied_head_needs_no_tensor_of_its_own(directory: Path) -> None:
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    model = load_model(StudentConfig(model=str(directory)))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_an_adapter_beside_the_weights(directory: Path, lora: object) -> None:
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    student = StudentConfig.model_validate({"model": str(directory), "lora": lora})
    for check in (check_directory, load_model):
        with pytest.raises(InvalidInput, match="has an adapter beside its weights"):
            check(student)
    with pytest.raises(InvalidInput, match="has an adapter beside its weights"):
        model_directory(str(directory), "hf")


def test_an_adapter_alone(directory: Path) -> None:
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}')
    (directory / "config.json").unlink()
    for check in (check_directory, load_model):
        with pytest.raises(InvalidInput, match="is an adapter of a/base, not a model") as caught:
            check(StudentConfig(model=str(directory)))
        assert f"merge it into its base model: {CONVERT} {directory} " in caught.value.hint
    with pytest.raises(InvalidInput, match="is an adapter of a/base, not a model"):
        model_directory(str(directory), "hf")


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "gptq"])
def test_quantised_students_are_refused(directory: Path, method: str) -> None:
    change_config(directory, quantization_config={"quant_method": method})
    for check in (check_directory, require_trainable):
        with pytest.raises(InvalidInput, match=rf"are quantised \({method}\)"):
            check(StudentConfig(model=str(directory)))


def test_a_shard_that_is_away(directory: Path, tmp_path: Path) -> None:
    load_model(StudentConfig(model=str(directory))).save_pretrained(
        tmp_path / "sharded", max_shard_size="2KB"
    )
    sharded = tmp_path / "sharded"
    for file in directory.glob("token*"):
        shutil.copy(file, sharded)
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    for check in (check_directory, load_model):
        with pytest.raises(InvalidInput, match=f"lacks {shards[1].name}, which"):
            check(StudentConfig(model=str(sharded)))
    with pytest.raises(InvalidInput, match=f"lacks {shards[1].name}, which"):
        model_directory(str(sharded), "hf")


def test_a_tokenizer_that_raises_for_a_text_is_refused(tmp_path: Path) -> None:
    """A Unigram model without an unknown token: the package raises a bare Exception."""
    file = write_tokenizer(tmp_path, "unigram") / "tokenizer.json"
    document = json.loads(file.read_text())
    document["model"] |= {"unk_id": None, "byte_fallback": False}
    file.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="unknown token") as caught:
        load_tokenizer(StudentConfig(model=str(tmp_path)))
    assert (caught.value.field, bool(caught.value.hint)) == ("student.model", True)


def add_scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store a weight as FP8 with scales by blocks, as DeepSeek does."""
    scale = tensors[DOWN].abs().max() / 448
    stored = {
        DOWN: (tensors[DOWN] / scale).to(torch.float8_e4m3fn),
        f"{DOWN}_scale_inv": scale[None],
    }
    return tensors | stored


def drop_scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in add_scales(tensors).items() if not name.endswith("_scale_inv")}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (add_scales, f"transformers does not use {DOWN}_scale_inv of "),
        (drop_scales, f"{DOWN} of .* is F8_E4M3, and config.json declares no quantisation"),
    ],
)
def test_scaled_numbers_are_not_taken_unscaled(
    directory: Path, change: Change, problem: str
) -> None:
    """Student and teacher refuse FP8 values whose scales config.json does not declare."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    with pytest.raises(InvalidInput, match=problem) as caught:
        load_model(StudentConfig(model=str(directory)))
    assert caught.value.field == "student.model"
    with pytest.raises(InvalidInput, match=problem) as caught:
        load_teacher(directory, dtype="float32")
    assert caught.value.field == "--model"


def test_a_tokenizer_that_panics_for_a_text_is_refused(tmp_path: Path) -> None:
    """A post-processor with an unknown token: the package raises what is no Exception."""
    file = write_tokenizer(tmp_path, "unigram") / "tokenizer.json"
    document = json.loads(file.read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<absent>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    file.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="cannot encode a text") as caught:
        load_tokenizer(StudentConfig(model=str(tmp_path)))
    assert (caught.value.field, bool(caught.value.hint)) == ("student.model", True)
