"""Students with images: sampling, rows and gradients, compared with passes of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.data.images import ImageReader
from protos.errors import Corrupt, InvalidInput
from student_trainer.checkpoints.export import export_model
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.prompts import Prompt, load_prompts
from student_trainer.data.sequence import Rollout
from student_trainer.losses import Rows
from student_trainer.model.loading import load_image_reader, load_model
from student_trainer.model.student import Student
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler
from tests import tiny_vision
from tests.student_trainer import tiny

WORDS = tiny_vision.tokenizer()
PLACEHOLDER = WORDS.convert_tokens_to_ids(tiny_vision.IMAGE)
# Prompts with an image, without one, with two, and with the first one again.
RECORDS = [
    {"prompt": "1+2=", "image": "0.png"},
    {"prompt": "34+5=", "image": None},
    {"prompt": "6=", "image": ["1.png", "0.png"]},
    {"prompt": "1+2=", "image": "0.png"},
]


@pytest.fixture(scope="module", params=tiny_vision.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.save(tmp_path_factory.mktemp(kind) / "student", kind)


@pytest.fixture
def reader(path: Path) -> ImageReader:
    return load_image_reader(StudentConfig(model=str(path)))


@pytest.fixture
def student(path: Path, reader: ImageReader) -> Student:
    model = load_model(StudentConfig(model=str(path)), images=reader)
    return Student(model.eval(), placeholder=PLACEHOLDER)


def prompts_in(root: Path, records: list[dict[str, Any]], reader: ImageReader) -> list[Prompt]:
    import json

    for number, size in enumerate([(24, 16), (40, 48)]):
        (root / f"{number}.png").write_bytes(tiny_vision.image(number, *size))
    file = root / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(path=str(file), eval_path=str(file), image_column="image")
    _, prompts = load_prompts(
        data, WORDS, held_out=len(records), max_tokens=200, seed=0, reader=reader
    )
    return sorted(prompts, key=lambda prompt: prompt.text)


def sample_rollouts(student: Student, prompts: list[Prompt], **options: Any) -> list[Rollout]:
    rollouts = HuggingFaceRollouts(
        Sampler(student.model, WORDS, top_k=4, temperature=1.0, never=PLACEHOLDER, **options),
        max_new_tokens=8,
        batch_tokens=2000,
    )
    numbers = range(len(prompts))
    return [rollout for batch in rollouts.generate(prompts, numbers, seed=3) for rollout in batch]


def batch_of(rollouts: list[Rollout]) -> Batch:
    sequences = [
        ScoredSequence(rollout, placeholder_rows(rollout.head_ids.numpy())) for rollout in rollouts
    ]
    return make_batch(sequences, torch.device("cpu"))


def short_ids(rollout: Rollout) -> tuple[list[int], list[bytes]]:
    if rollout.images is None:
        return rollout.token_ids.tolist(), []
    ids, start = rollout.images.collapse(rollout.token_ids.numpy(), rollout.start)
    assert ids[start:].tolist() == rollout.completion.tolist()
    return ids.tolist(), list(rollout.images.load_encoded())


def expected_logprobs(kind: str, rollout: Rollout) -> torch.Tensor:
    """Return log-probs of the completion from a plain pass, [learned, V]."""
    logits = tiny_vision.plain_logits(tiny_vision.model(kind), *short_ids(rollout))
    return logits.log_softmax(-1)[-1 - rollout.learned : -1]


def test_the_sampler_sees_the_images(
    student: Student, reader: ImageReader, kind: str, tmp_path: Path
) -> None:
    for rollout in sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader)):
        logprobs = expected_logprobs(kind, rollout)
        token_logprobs = logprobs.gather(1, rollout.completion[:, None])[:, 0]
        torch.testing.assert_close(rollout.token_logprobs, token_logprobs, atol=1e-5, rtol=1e-5)
        assert torch.equal(rollout.head_ids.long().sort(1)[0], logprobs.topk(4, 1)[1].sort(1)[0])


def test_no_placeholder_is_sampled(student: Student, reader: ImageReader, tmp_path: Path) -> None:
    """Even where it has nearly all probability; the records are those of the unmasked policy."""
    with torch.no_grad():
        student.model.lm_head.weight[PLACEHOLDER] += 5 * student.model.lm_head.weight.abs().max()
    prompts = prompts_in(tmp_path, RECORDS, reader)
    rollouts = sample_rollouts(student, prompts)
    assert all(PLACEHOLDER not in rollout.completion for rollout in rollouts)
    assert any((rollout.head_ids == PLACEHOLDER).any() for rollout in rollouts)
    batch_of(rollouts)


def test_rows_are_those_of_a_plain_pass(
    student: Student, reader: ImageReader, kind: str, tmp_path: Path
) -> None:
    rollouts = sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader))
    _, rows = student.rows(batch_of(rollouts), 1.0)
    parts = rows.token_logprobs.split([rollout.learned for rollout in rollouts])
    for rollout, part in zip(rollouts, parts, strict=True):
        expected = expected_logprobs(kind, rollout).gather(1, rollout.completion[:, None])[:, 0]
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)


def test_the_gradient_is_that_of_a_plain_pass(
    student: Student, reader: ImageReader, kind: str, tmp_path: Path
) -> None:
    """For all weights, including those of the vision encoder."""
    rollouts = sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader))

    def loss(rows: Rows, _: slice) -> torch.Tensor:
        return -rows.token_logprobs

    student(batch_of(rollouts), loss, 1.0).loss_sum.backward()
    plain_model = tiny_vision.model(kind)
    total = torch.zeros(())
    for rollout in rollouts:
        images = None if rollout.images is None else rollout.images.load_pixels()
        inputs: dict[str, torch.Tensor] = {}
        if images is not None:
            inputs = {
                "pixel_values": torch.from_numpy(images.values),
                "image_grid_thw": torch.from_numpy(images.grid),
                "mm_token_type_ids": (rollout.token_ids == PLACEHOLDER).int()[None],
            }
        logits = plain_model(input_ids=rollout.token_ids[None], use_cache=False, **inputs).logits[0]
        logprobs = logits.log_softmax(-1)[-1 - rollout.learned : -1]
        total = total - logprobs.gather(1, rollout.completion[:, None]).sum()
    total.backward()
    plain_weights = dict(plain_model.named_parameters())
    for name, weight in student.model.named_parameters():
        plain_gradient = plain_weights[name].grad
        if plain_gradient is None:
            continue
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad, plain_gradient, atol=2e-4, rtol=2e-4, msg=name)
    vision_weights = [w for name, w in student.model.named_parameters() if "visual" in name]
    assert sum(float(w.grad.abs().sum()) > 0 for w in vision_weights if w.grad is not None) > 10


def test_a_batch_without_images_has_a_gradient_for_every_weight(
    student: Student, reader: ImageReader, tmp_path: Path
) -> None:
    """Weights of the vision encoder have a zero gradient, as DDP waits for all gradients."""
    rollouts_without_images = [
        rollout
        for rollout in sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader))
        if not rollout.images
    ]
    batch = batch_of(rollouts_without_images)
    assert batch.images is None
    student(batch, lambda rows, _: -rows.token_logprobs, 1.0).loss_sum.backward()
    assert all(weight.grad is not None for weight in student.model.parameters())
    assert all(
        not weight.grad.any()
        for name, weight in student.model.named_parameters()
        if "visual" in name and weight.grad is not None
    )


def test_a_batch_without_rows_has_no_images(
    student: Student, reader: ImageReader, tmp_path: Path
) -> None:
    batch = batch_of(sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader)))
    assert batch.images is not None
    assert batch.without_rows().images is None
    assert batch.to(torch.device("cpu")).images is not None


def test_prompts_count_the_tokens_of_images(reader: ImageReader, tmp_path: Path) -> None:
    prompts = prompts_in(tmp_path, RECORDS, reader)
    assert [int((prompt.ids == PLACEHOLDER).sum()) for prompt in prompts] == [6, 6, 0, 36]
    assert prompts[0].images is not None
    assert prompts[0].images.tokens == (6,)
    assert prompts[2].images is None


def test_images_may_be_parts_of_messages(reader: ImageReader, tmp_path: Path) -> None:
    content = [{"type": "text", "text": "1"}, {"type": "image"}, {"type": "text", "text": "2="}]
    record = {"messages": [{"role": "user", "content": content}], "image": "0.png"}
    prompts_in(tmp_path, RECORDS, reader)  # writes the images
    file = tmp_path / "messages.jsonl"
    data = {"path": str(file), "eval_path": str(file), "messages_column": "messages"}

    def load(record: dict[str, Any]) -> list[Prompt]:
        import json

        file.write_text(json.dumps(record) + "\n")
        config = DataConfig.model_validate(data | {"image_column": "image"})
        options = {"held_out": 1, "max_tokens": 50, "seed": 0}
        return load_prompts(config, WORDS, reader=reader, **options)[1]

    (prompt,) = load(record)
    text = WORDS.decode(prompt.ids)
    assert (
        text.replace(" ", "") == f"1{tiny_vision.START}{tiny_vision.IMAGE * 6}{tiny_vision.END}2="
    )
    assert prompt.text == "1\n2="
    with pytest.raises(InvalidInput, match=r"has 2 images, but its messages have 1 parts"):
        load(record | {"image": ["0.png", "1.png"]})
    with pytest.raises(InvalidInput, match="which is not a file"):
        load(record | {"image": "2.png"})
    content[0]["text"] = tiny_vision.IMAGE
    (prompt,) = load(record)  # a text that names the token is text: no second image
    assert list(prompt.ids).count(WORDS.convert_tokens_to_ids(tiny_vision.IMAGE)) == 6


def test_a_file_that_changes_is_noticed(reader: ImageReader, tmp_path: Path) -> None:
    (prompt, *_) = prompts_in(tmp_path, RECORDS[:1], reader)
    assert prompt.images is not None
    (tmp_path / "0.png").write_bytes(tiny_vision.image(9))
    from student_trainer.data import images

    images._load_encoded.cache_clear()
    with pytest.raises(Corrupt, match="has changed since the job"):
        prompt.images.load_encoded()


def test_parquet_may_hold_the_images(reader: ImageReader, tmp_path: Path) -> None:
    """As in data sets of the hub; a reward gets the other columns."""
    import pyarrow as pa
    import pyarrow.parquet

    image = tiny_vision.image(0)
    records = [
        {"prompt": "1=", "image": {"bytes": image, "path": "0.png"}},
        {"prompt": "2=", "image": None},
    ]
    file = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), file)
    data = DataConfig(path=str(file), eval_path=str(file), image_column="image")
    options: dict[str, Any] = {"held_out": 2, "max_tokens": 50, "seed": 0, "with_fields": True}
    _, prompts = load_prompts(data, WORDS, reader=reader, **options)
    with_image, without_image = sorted(prompts, key=lambda prompt: prompt.text)
    assert with_image.images is not None
    assert with_image.images.load_encoded() == (image,)
    assert without_image.images is None
    assert dict(with_image.fields) == {"prompt": "1="}


def test_without_pillow(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job is refused in one sentence, and a teacher still serves text."""
    import sys

    from teacher_service.engines.hf import HfEngine

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidInput, match="needs the package pillow") as error:
        load_image_reader(StudentConfig(model=str(path)))
    assert "pip install" in error.value.hint
    assert HfEngine(str(path), device="cpu").info.placeholder is None
    assert "the package pillow is not installed" in caplog.text


def test_a_student_in_bfloat16_sees(
    path: Path, reader: ImageReader, kind: str, tmp_path: Path
) -> None:
    """The sampler and the rows of a batch, both under autocast."""
    config = StudentConfig(model=str(path), dtype="bfloat16")
    model = load_model(config, images=reader).eval()
    student = Student(model, bf16=True, placeholder=PLACEHOLDER)
    rollouts = sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader), bf16=True)
    _, rows = student.rows(batch_of(rollouts), 1.0)
    parts = rows.token_logprobs.split([rollout.learned for rollout in rollouts])
    for rollout, part in zip(rollouts, parts, strict=True):
        expected = expected_logprobs(kind, rollout).gather(1, rollout.completion[:, None])[:, 0]
        assert float((rollout.token_logprobs - expected).abs().max()) < 0.3
        assert float((part - expected).abs().max()) < 0.3


@pytest.mark.parametrize("recomputed", [True, 2, "selective"])
def test_recomputation_keeps_the_gradient(
    path: Path, reader: ImageReader, tmp_path: Path, recomputed: Any
) -> None:
    gradients = []
    for setting in (False, recomputed):
        config = StudentConfig(model=str(path), gradient_checkpointing=setting)
        student = Student(load_model(config, images=reader).eval(), placeholder=PLACEHOLDER)
        batch = batch_of(sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader)))
        student.train()
        student(batch, lambda rows, _: -rows.token_logprobs, 1.0).loss_sum.backward()
        gradients.append({name: w.grad for name, w in student.model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_adapters_beside_frozen_weights_in_bfloat16(path: Path, reader: ImageReader) -> None:
    values = {"model": str(path), "lora": {"rank": 2}, "dtype": "bfloat16"}
    model = load_model(StudentConfig.model_validate(values), images=reader)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16, torch.float32}


def test_adapters_see(path: Path, reader: ImageReader, kind: str, tmp_path: Path) -> None:
    """New adapters change nothing, and each has a gradient."""
    config = StudentConfig.model_validate({"model": str(path), "lora": {"rank": 2}})
    student = Student(load_model(config, images=reader).eval(), placeholder=PLACEHOLDER)
    rollouts = sample_rollouts(student, prompts_in(tmp_path, RECORDS, reader))
    batch = batch_of(rollouts)
    _, rows = student.rows(batch, 1.0)
    expected = expected_logprobs(kind, rollouts[0]).gather(1, rollouts[0].completion[:, None])
    logprobs = rows.token_logprobs[: rollouts[0].learned]
    torch.testing.assert_close(logprobs, expected[:, 0], atol=1e-5, rtol=1e-5)
    student(batch, lambda rows, _: -rows.token_logprobs, 1.0).loss_sum.backward()
    trained_weights = [w for w in student.model.parameters() if w.requires_grad]
    assert all(weight.grad is not None for weight in trained_weights)


def test_a_student_that_reads_no_images_is_refused(tmp_path: Path) -> None:
    path = tiny.save(tiny.model(), tiny.tokenizer(), tmp_path / "blind")
    with pytest.raises(InvalidInput, match="reads no images") as error:
        load_image_reader(StudentConfig(model=str(path)))
    assert error.value.field == "data.image_column"


def test_a_student_that_does_not_see_is_refused(kind: str, tmp_path: Path) -> None:
    path = tiny_vision.save(tmp_path / "student", kind)
    model = tiny_vision.model(kind)
    for name, weight in model.named_parameters():
        if "merger" in name:
            weight.data.zero_()
    model.save_pretrained(path)
    config = StudentConfig(model=str(path))
    with pytest.raises(InvalidInput, match="images do not change the output of"):
        load_model(config, images=load_image_reader(config))


def test_an_export_reads_images(
    student: Student, reader: ImageReader, tmp_path: Path, kind: str
) -> None:
    export_model(tmp_path / "export", model=student.model, tokenizer=WORDS)
    config = StudentConfig(model=str(tmp_path / "export"))
    exported = load_model(config, images=load_image_reader(config))
    ids = WORDS(tiny_vision.START + tiny_vision.IMAGE + tiny_vision.END + "1=")["input_ids"]
    logits = tiny_vision.plain_logits(exported.eval(), ids, [tiny_vision.image(0)])
    expected_logits = tiny_vision.plain_logits(tiny_vision.model(kind), ids, [tiny_vision.image(0)])
    np.testing.assert_allclose(logits, expected_logits, atol=1e-6)
