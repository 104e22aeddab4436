"""Supervised fine-tuning: the learned tokens, and their cross-entropy as the loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from clients.config.sft import SFTJob
from clients.config.tables.common import ExportConfig, LoraConfig
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from protos.errors import Corrupt, InvalidInput
from student_trainer.assembly import assemble
from student_trainer.data.examples import example_encoding, load_examples
from student_trainer.data.order import permutation
from student_trainer.loop.trainer import Trainer, _require_finite
from tests.clients.data.test_prompt_format import CHARACTERS, MARKED, PLAIN
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tiny.Material:
    """A student with a chat template, and conversations of up to three answers."""
    material = tiny.Material.at(tmp_path_factory.mktemp("chats"))
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = MARKED
    tiny.save(tiny.model(seed=2, spread=0.2, characters=CHARACTERS), words, material.student)
    material.prompts.parent.mkdir()
    records = [
        {
            "messages": [
                {"role": role, "content": f"{n}+{turn}=" if role == "user" else f"{n + turn}"}
                for turn in range(1 + n % 3)
                for role in ("user", "assistant")
            ],
            "weight": [0.0, 0.5, 1.0, 2.5][n % 4],
        }
        for n in range(40)
    ]
    material.prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    return material


@contextmanager
def trainer_of(path: Path, config: SFTJob) -> Iterator[Trainer]:
    run = RunDirectory.create(path, config)
    progress = Progress(run, attempt=1, max_steps=9, main=True, terminated=lambda: False)
    trainer = assemble(config, run, {}, progress, 1, None)
    yield trainer
    assert trainer.metrics is not None
    trainer.metrics.close()


def learn_step(trainer: Trainer, step: int = 1) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return means and gradients of a step."""
    means = add_gradients(trainer, trainer.method.steps(step).updates[0])
    model = trainer.student.trained.model
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return means, grads


def segments(words: Any, record: Mapping[str, Any]) -> list[tuple[list[int], bool]]:
    """Return pieces of a sequence, made without a chat template, and whether they are learned."""

    def ids(text: str) -> list[int]:
        return [words.convert_tokens_to_ids(character) for character in text]

    end = words.eos_token_id
    if "prompt" in record:
        return [(ids(record["prompt"]), False), ([*ids(record["answer"]), end], True)]
    pieces = []
    for message in record["messages"]:
        if message["role"] == "user":
            pieces.append((ids("U" + message["content"] + "A"), False))
        else:
            pieces.append(([*ids(message["content"]), end], True))
    return pieces


def reference_losses(
    config: SFTJob, texts: Sequence[str], *, all_answers: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return cross-entropies [N] and weights [N] of learned tokens, by transformers in float64.

    `texts`: decoded sequences, which are looked up among the records; one forward pass for each.
    """
    words = AutoTokenizer.from_pretrained(config.student.model)
    model = AutoModelForCausalLM.from_pretrained(config.student.model, dtype=torch.float64)
    sequences = {}
    for line in Path(config.data.path).read_text().splitlines():
        record = json.loads(line)
        pieces = segments(words, record)
        tokens = [token for piece, _ in pieces for token in piece]
        last = len(pieces) - 1
        marks = [
            mark and (all_answers or n == last)
            for n, (piece, mark) in enumerate(pieces)
            for _ in piece
        ]
        sequences[words.decode(tokens)] = (tokens, marks, float(record.get("weight", 1.0)))
    losses, weights = [], []
    for text in texts:
        tokens, marks, weight = sequences[text]
        logits = model(torch.tensor([tokens])).logits[0]
        loss = torch.nn.functional.cross_entropy(
            logits[:-1], torch.tensor(tokens[1:]), reduction="none"
        )[torch.tensor(marks[1:])]
        losses.append(loss)
        weights.append(torch.full_like(loss, weight).detach())
    return torch.cat(losses), torch.cat(weights), model


@pytest.mark.parametrize("tokens", [1, 48, 100_000], ids=["one by one", "some", "packed"])
@pytest.mark.parametrize("kind", ["prompts", "last", "all", "weights"])
def test_the_loss_is_the_cross_entropy(
    material: tiny.Material, chats: tiny.Material, tmp_path: Path, kind: str, tokens: int
) -> None:
    changes: dict[str, Any] = {"train__tokens_per_micro_batch": tokens}
    if kind != "prompts":
        changes |= {"data__messages_column": "messages", "method__max_tokens": 64}
    if kind == "all":
        changes["method__train_on"] = "all"
    if kind == "weights":
        changes["data__weight_column"] = "weight"
    config = tiny.sft_job(material if kind == "prompts" else chats, **changes)
    with trainer_of(tmp_path / "run", config) as trainer:
        means, gradients = learn_step(trainer)
        step = [item.sequence.token_ids for item in trainer.method.steps(1).updates[0]]
        assert trainer.student.full.layout == "lines"
    words = AutoTokenizer.from_pretrained(config.student.model)
    texts = [words.decode(ids) for ids in step]
    losses, weights, model = reference_losses(config, texts, all_answers=kind == "all")
    if kind != "weights":
        weights = torch.ones_like(losses)
    loss = (losses * weights).sum() / len(losses)
    loss.backward()
    assert means["tokens"] == len(losses)
    assert means["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert means["cross_entropy"] == pytest.approx(losses.mean().item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        error = (gradients[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name


def test_held_out_loss(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.sft_job(material)
    with trainer_of(tmp_path / "run", config) as trainer:
        evaluated = trainer._evaluate()
        held_out_ids = [item.sequence.token_ids for item in trainer.method.evaluation._held_out()]
    words = AutoTokenizer.from_pretrained(config.student.model)
    losses, _, _ = reference_losses(config, [words.decode(ids) for ids in held_out_ids])
    assert len(held_out_ids) == config.eval.prompts
    assert evaluated["eval/cross_entropy"] == pytest.approx(losses.mean().item(), abs=1e-6)
    perplexity = math.exp(losses.mean().item())
    assert evaluated["eval/perplexity"] == pytest.approx(perplexity, rel=1e-6)
    names = {"eval/cross_entropy", "eval/cross_entropy_stderr", "eval/perplexity"}
    assert evaluated.keys() == names


def test_the_names_of_metrics(chats: tiny.Material, tmp_path: Path) -> None:
    from student_trainer.run import metrics
    from tests.end_to_end.processes import metrics_of

    config = tiny.sft_job(
        chats,
        max_steps=2,
        data__messages_column="messages",
        method__max_tokens=64,
        method__max_new_tokens=4,
        eval__every=1,
        eval__metric="exact_match",
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        assert trainer.train() == "succeeded"
    lines = metrics_of(RunDirectory(tmp_path / "run"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert metrics.__doc__ is not None
    explained = {line.split()[0].strip(",;") for line in metrics.__doc__.splitlines() if line}
    for line in lines:
        assert {"eval/cross_entropy", "eval/accuracy"} <= line.keys()
        assert not {"kl/teacher", "topk/student_mass", "ratio/mean", "eval/kl"} & line.keys()
        assert "time/teacher_wait" not in line, "there is no teacher"
        names = {name for name in line if not name.startswith("time/")}
        assert names - {"attempt", "step"} <= explained
    sample = json.loads((tmp_path / "run/samples/step-000002.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].endswith("=A"), "it ends where the last answer starts"
    assert sample["reference"].isdigit()


def test_what_is_left_out_is_counted(
    material: tiny.Material, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Long sequences are not cut, and empty answers are not learned as an end token."""
    words = tiny.tokenizer()
    records = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
    records += [{"prompt": "1+1=", "answer": ""}, {"prompt": "1+1=", "answer": "2" * 21}]
    records += [{"prompt": "1" * 24, "answer": "1"}, {"prompt": "2" * 20, "answer": "333"}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = tiny.sft_job(material, data__path=str(path), eval__prompts=2, data__max_left_out=0.5)
    training, held_out = load_examples(config, words)
    examples = training.of_step(1, 10) + held_out
    lengths = {len(example.token_ids) for example in examples}
    assert lengths == {6, 7, 24}, "24 tokens with the end token just fit"
    counts = [message for message in caplog.messages if message.startswith("left out")]
    assert sorted(counts) == [
        "left out so far: 1 records without an answer to learn",
        "left out so far: 1 sequences longer than method.max_tokens = 24",
        "left out so far: 2 sequences longer than method.max_tokens = 24",
    ]


def test_an_answer_of_megabytes_is_left_out_without_its_tokens(
    material: tiny.Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer needs gigabytes for 40 million characters."""
    reader, encoder = example_encoding(tiny.sft_job(material), tiny.tokenizer())
    record = reader.build_record({"prompt": "1+1=", "answer": "2" * (1 << 20)}, "row 1", tmp_path)
    encode_answer = Mock()
    monkeypatch.setattr("student_trainer.data.examples.completion_ids", encode_answer)
    assert encoder.encode(record, "data.path") is None
    assert not encode_answer.called
    assert [omission.count for omission in encoder.omissions] == [1, 0]


@pytest.mark.parametrize(
    ("changes", "record", "field", "says"),
    [
        ({}, {"prompt": "1+1="}, "data.answer_column", "no column 'answer' in row 1"),
        ({}, {"prompt": "", "answer": "1"}, "data.path", "the prompt of row 1 of"),
        ({"data__messages_column": "m"}, {"m": []}, "data.messages_column", "no chat template"),
        (
            {"method__max_tokens": 3},
            {"prompt": "1+1=", "answer": "2"},
            "data.path",
            "longer than method.max_tokens = 3",
        ),
        ({}, {"prompt": "1+1=", "answer": ""}, "data.path", "no sequence that can be used"),
    ],
)
def test_data_that_cannot_be_learned(
    material: tiny.Material, tmp_path: Path, changes: Any, record: Any, field: str, says: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n")
    config = tiny.sft_job(material, data__path=str(path), data__eval_path=str(path), **changes)
    with pytest.raises(InvalidInput) as caught:
        load_examples(config, tiny.tokenizer())
    assert says in caught.value.message
    assert (caught.value.field, bool(caught.value.hint)) == (field, True)


def test_all_answers_need_marks(chats: tiny.Material) -> None:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = PLAIN
    config = tiny.sft_job(chats, data__messages_column="messages", method__train_on="all")
    with pytest.raises(InvalidInput, match=r"^method.train_on: .* has no {% generation %}"):
        load_examples(config, words)


def test_a_conversation_that_starts_with_the_answer(
    material: tiny.Material, tmp_path: Path
) -> None:
    """The row is refused before training, though only the last step of an epoch has it."""
    words = tiny.tokenizer(CHARACTERS)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path, eval_path = tmp_path / "data.jsonl", tmp_path / "aside.jsonl"
    row = int(permutation(6, 0, 0)[-1]) + 1
    rows = [talk[::-1] if number == row else talk for number in range(1, 7)]
    path.write_text("".join(json.dumps({"m": messages}) + "\n" for messages in rows))
    eval_path.write_text(json.dumps({"m": talk}) + "\n")
    files = {
        "data__path": str(path),
        "data__eval_path": str(eval_path),
        "data__messages_column": "m",
    }
    words.chat_template = MARKED
    with pytest.raises(InvalidInput) as caught:
        load_examples(tiny.sft_job(material, **files), words)
    assert caught.value.message == (
        f"the conversation of row {row} of {path} has no message before the assistant's answer"
    )
    assert caught.value.field == "data.messages_column"
    assert caught.value.hint == "remove the row, or add a user message"

    all_answers_config = tiny.sft_job(material, **files, method__train_on="all")
    training, _ = load_examples(all_answers_config, words)
    learned_texts = {
        words.decode(example.token_ids[example.start :]) for example in training.of_step(1, 6)
    }
    assert learned_texts == {"2<|end|>"}, "the template starts an answer with a token of its own"

    words.chat_template = MARKED.replace("{{ m.role[0] | upper }}", "")
    with pytest.raises(
        InvalidInput, match=rf"^data.path: the prompt of row {row} of .* has no tokens"
    ):
        load_examples(all_answers_config, words)


def test_a_conversation_without_an_answer_is_left_out(
    chats: tiny.Material, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = AutoTokenizer.from_pretrained(chats.student)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"m": m}) + "\n" for m in (talk, talk[:1], talk)))
    config = tiny.sft_job(
        chats,
        data__path=str(path),
        data__messages_column="m",
        data__eval_path=str(path),
        data__max_left_out=0.5,
    )
    training, _ = load_examples(config, words)
    assert [words.decode(example.token_ids) for example in training.of_step(1, 2)] == [
        "U1+1=A2<|end|>"
    ] * 2
    assert "left out so far: 1 records without an answer to learn" in caplog.messages


def test_more_tokens_than_the_student_reads(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.sft_job(material, method__max_tokens=10**6)
    with (
        pytest.raises(InvalidInput, match=r"^method.max_tokens: 1000000 is more than the"),
        trainer_of(tmp_path / "run", config),
    ):
        pass


def test_a_student_with_nan_is_refused(material: tiny.Material, tmp_path: Path) -> None:
    config = student_with(material, tmp_path, torch.nan)
    with (
        pytest.raises(InvalidInput, match="the logits are not finite"),
        trainer_of(tmp_path / "run", config),
    ):
        pass
    with pytest.raises(InvalidInput, match="eval/cross_entropy of the student is not a number"):
        _require_finite({"eval/cross_entropy": math.nan})


def test_a_run_without_an_update_fails(
    material: tiny.Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer steps than skipped updates are allowed in a row."""
    config = tiny.sft_job(material, max_steps=3, train__max_skipped_updates=10)
    norm = torch.tensor(math.nan)
    monkeypatch.setattr("student_trainer.loop.learner.clip_gradients", lambda *_: norm)
    with (
        trainer_of(tmp_path / "run", config) as trainer,
        pytest.raises(Corrupt, match="nothing was learned"),
    ):
        trainer.train()
    assert not (tmp_path / "run" / "export").exists()


def test_a_run_whose_tokens_all_have_the_weight_0_fails(
    material: tiny.Material, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so at the first step, and fails after as many as skipped updates are allowed."""
    records = [{"prompt": f"{n}+1=", "answer": str(n + 1), "w": 0} for n in range(20)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = tiny.sft_job(
        material, data__path=str(path), data__weight_column="w", train__max_skipped_updates=2
    )
    with (
        trainer_of(tmp_path / "run", config) as trainer,
        pytest.raises(Corrupt, match=r"^data.path: step 3: the gradient is zero"),
    ):
        trainer.train()
    assert "step 1: the gradient is zero: no token is learned; update skipped" in caplog.messages
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.parametrize("where", ["weights", "adapters"])
def test_a_float16_export_has_no_infinity(
    material: tiny.Material, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """A number beyond float16, also one of merged adapters, makes the export bfloat16, by name."""
    config = student_with(material, tmp_path, 1e5 if where == "weights" else 1.0)
    changes: dict[str, Any] = {"max_steps": 1, "export": ExportConfig(dtype="float16")}
    if where == "adapters":
        lora = LoraConfig(rank=2)
        changes["student"] = config.student.model_copy(update={"lora": lora})
    with trainer_of(tmp_path / "run", config.model_copy(update=changes)) as trainer:
        if where == "adapters":
            for name, weight in trainer.student.trained.model.named_parameters():
                if "layers.0.mlp.up_proj.lora_" in name:
                    weight.data.fill_(1e3)
        trainer.train()
    weights = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(weight.isfinite().all() for weight in weights.values())
    name = "norm.weight" if where == "weights" else "up_proj.weight"
    assert f"{name} has a value above 65504" in caplog.text


def student_with(material: tiny.Material, root: Path, value: float) -> SFTJob:
    """Return a job whose student has `value` in the weight of its last norm."""
    model = AutoModelForCausalLM.from_pretrained(material.student)
    model.model.norm.weight.data[0] = value
    words = AutoTokenizer.from_pretrained(material.student)
    path = tiny.save(model, words, root / "student")
    return tiny.sft_job(material, student__model=str(path), max_steps=2)
