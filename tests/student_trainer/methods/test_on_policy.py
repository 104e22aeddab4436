"""A step of the trainer: the gradient is that of the mean over all tokens, in any micro-batches."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from clients.runs.directory import RunDirectory, Verdict
from clients.runs.progress import Progress, run_to_verdict
from protos.errors import Corrupt, InvalidInput
from student_trainer.checkpoints.copies import RunCopies
from student_trainer.data.prompts import load_prompts
from student_trainer.loop.evaluation import Evaluation, TaskEvaluation
from student_trainer.loop.learner import Method
from student_trainer.loop.trainer import Trainer
from student_trainer.losses import exact_kl
from student_trainer.methods.on_policy import OnPolicySteps, prepare
from student_trainer.methods.preparation import Inputs
from student_trainer.model.loading import load_model, load_tokenizer
from student_trainer.model.student import Student
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.sharding import Replicated
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler
from student_trainer.run.metrics import open_metrics
from student_trainer.teachers.scored_rollouts import ScoredRollouts
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.model_teacher import ModelTeacher, completion_logprobs

VOCABULARY = len(tiny.ALPHABET) + 1


def make_trainer(
    material: tiny.Material, run: RunDirectory, *, top_k: int = 4, log: bool = False
) -> tuple[Trainer, Student, ModelTeacher]:
    """Return a trainer with all real parts except the network."""
    config = run.config()
    words = load_tokenizer(config.student)
    model = load_model(config.student)
    prompts, held_out = load_prompts(
        config.data, words, held_out=config.eval.prompts, max_tokens=16, seed=0
    )
    rollouts = HuggingFaceRollouts(
        Sampler(model, words, top_k=top_k, temperature=1.0, draws=config.draws),
        max_new_tokens=config.method.max_new_tokens,
        batch_tokens=10_000,
    )
    teacher = ModelTeacher(
        load_model(config.student.model_copy(update={"model": str(material.teacher)}))
    )
    accelerator = Accelerator(cpu=True)
    student = Student(model)
    replicated = Replicated(accelerator, student)
    objective = DistillationObjective.on_policy(config.method)
    answers = ScoredRollouts(replicated, rollouts, teacher, config.seed)
    steps = OnPolicySteps(config, accelerator, prompts, held_out, answers, answers)
    progress = Progress(
        run, attempt=1, max_steps=config.max_steps, main=True, terminated=lambda: False
    )
    evaluation = Evaluation(
        accelerator,
        objective,
        steps.held_out,
        TaskEvaluation(held_out, accelerator, words, rollouts),
        tokenizer=words,
        samples=rollouts.in_process,
        tokens_per_micro_batch=48,
    )
    trainer = Trainer(
        config,
        run,
        progress,
        Method(objective, steps.of_step, evaluation),
        step=0,
        accelerator=accelerator,
        student=replicated,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        tokenizer=words,
        copies=RunCopies(config, run, 1, accelerator, progress),
        metrics=open_metrics(run, attempt=1, last_step=None, track=config.track) if log else None,
    )
    return trainer, student, teacher


def gradients(student: Student) -> dict[str, Tensor]:
    grads = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    return grads


def new_run(material: tiny.Material, path: Path, **changes: Any) -> RunDirectory:
    return RunDirectory.create(path, tiny.job(material, **changes))


@pytest.mark.parametrize("tokens", [1, 48, 100])
def test_micro_batches_change_nothing(material: tiny.Material, tmp_path: Path, tokens: int) -> None:
    """8 rollouts in one micro-batch, in one each, and in between."""
    results = []
    for number, size in enumerate((100_000, tokens)):
        run = new_run(material, tmp_path / str(number), train__tokens_per_micro_batch=size)
        trainer, student, _ = make_trainer(material, run)
        metrics = add_gradients(trainer, trainer.method.steps(1).updates[0])
        results.append((metrics, gradients(student)))
    (whole_metrics, whole_grads), (cut_metrics, cut_grads) = results
    assert whole_metrics["tokens"] == cut_metrics["tokens"]
    for name, value in whole_metrics.items():
        assert cut_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert whole_grads.keys() == cut_grads.keys()
    for name, grad in whole_grads.items():
        assert float((grad - cut_grads[name]).norm() / grad.norm()) < 1e-5, name


def test_the_gradient_is_that_of_the_mean_kl(material: tiny.Material, tmp_path: Path) -> None:
    """With k = |V|, the pipeline equals the KL of two plain forward passes, token by token."""
    trainer, student, teacher = make_trainer(
        material, new_run(material, tmp_path / "run"), top_k=VOCABULARY
    )
    pending = trainer.method.steps(1).updates[0]
    means = add_gradients(trainer, pending)
    found_gradients = gradients(student)

    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for item in pending:
        rollout = item.sequence
        logits = student.model(input_ids=rollout.token_ids[None]).logits[0, rollout.start - 1 : -1]
        q = completion_logprobs(teacher._model, rollout)
        total = total + exact_kl(logits.double().log_softmax(1), q, direction="reverse").sum()
        count += len(q)
    (total / count).backward()
    expected = gradients(student)
    assert means["tokens"] == count
    assert means["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-4)
    for name, grad in expected.items():
        assert float((found_gradients[name] - grad).norm() / grad.norm()) < 1e-3, name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_changes_nothing(
    material: tiny.Material, tmp_path: Path, bad: float
) -> None:
    """Two updates in a row may be skipped, a third raises; a finite gradient resets the count."""
    run = new_run(material, tmp_path / "run", train__max_skipped_updates=2)
    trainer, student, _ = make_trainer(material, run)
    pending = trainer.method.steps(1).updates[0]

    def update(bad: float | None) -> dict[str, float]:
        learn = trainer.learner.add_gradients

        def learn_spoiled(items: Any) -> Any:
            sums = learn(items)
            if bad is not None:
                next(student.parameters()).grad.view(-1)[3] = bad  # type: ignore[union-attr]
            return sums

        trainer.learner.add_gradients = learn_spoiled  # type: ignore[method-assign]
        try:
            return trainer.learner.learn(1, pending, 0.1)
        finally:
            trainer.learner.add_gradients = learn  # type: ignore[method-assign]

    for _ in range(2):
        weights_before = {name: p.detach().clone() for name, p in student.named_parameters()}
        for _ in range(2):
            assert update(bad)["grad_norm/skipped"] == 1
        for name, parameter in student.named_parameters():
            assert torch.equal(parameter, weights_before[name])
            assert parameter.grad is None
        assert update(None)["grad_norm/skipped"] == 0
    assert update(bad)["grad_norm/skipped"] == update(bad)["grad_norm/skipped"] == 1
    with pytest.raises(Corrupt, match="is not finite; 3 consecutive updates were skipped"):
        update(bad)


def test_metrics_are_those_of_the_table(material: tiny.Material, tmp_path: Path) -> None:
    """In a run in this process, the written names are exactly the documented ones."""
    from student_trainer.run import metrics
    from tests.end_to_end.processes import metrics_of

    run = new_run(material, tmp_path / "run", max_steps=3, eval__every=2)
    trainer, _, _ = make_trainer(material, run, log=True)
    assert trainer.train() == "succeeded"
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    written_names = {name for line in lines for name in line} - {"attempt", "step"}
    assert metrics.__doc__ is not None
    table = metrics.__doc__.split("\n\n")[1]
    explained = {row.split()[0] for row in table.splitlines()}
    explained |= {word.strip(",;") for word in table.split() if word.startswith("time/")}
    assert written_names == explained
    assert (run.export / "model.safetensors").is_file()
    assert len((run.samples / "step-000002.jsonl").read_text().splitlines()) == 8
    assert len((run.token_logprobs / "step-000002.jsonl").read_text().splitlines()) == 4


def test_the_logprobs_of_held_out_tokens(
    material: tiny.Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is a plain forward pass of both models for each sequence."""
    monkeypatch.setattr("student_trainer.loop.evaluation._WRITTEN_TOKENS", 5)
    trainer, student, teacher = make_trainer(material, new_run(material, tmp_path / "run"))
    held_out = [item.wait().sequence for item in trainer.method.evaluation._held_out()]
    _, _, records = trainer.method.evaluation(trainer.student)
    assert len(records) == 4
    prompts = {trainer.tokenizer.decode(one.token_ids[: one.start]): one for one in held_out}
    for record in records:
        sequence = prompts[record["prompt"]]
        ids = sequence.token_ids[sequence.start :][:5]
        assert record["tokens"] == [trainer.tokenizer.decode([token]) for token in ids.tolist()]
        for name, model in (("student", student.model), ("teacher", teacher._model)):
            logprobs = completion_logprobs(model, sequence)[: len(ids)]
            expected = logprobs.gather(1, ids.long()[:, None])[:, 0].tolist()
            assert record[name] == pytest.approx(expected, abs=2e-4)
    excluded = torch.full((held_out[0].learned,), -torch.inf)
    record = trainer.method.evaluation._describe_tokens(held_out[0], {"teacher": excluded})
    assert record["teacher"] == [None] * len(record["tokens"]), "JSON has no infinity"


def test_weights_multiply_the_loss_of_their_sequences(
    material: tiny.Material, tmp_path: Path
) -> None:
    """The sum is divided by the number of tokens, not of weights; metrics count tokens once."""
    run = RunDirectory.create(tmp_path / "run", tiny.job(material))
    trainer, student, _ = make_trainer(material, run)
    pending = trainer.method.steps(1).updates[0]
    weights = [0.0, 0.5, 1.0, 3.0] * 2
    assert len(pending) == len(weights)
    weighted_items = [
        replace(item, sequence=replace(item.sequence, weight=weight))
        for item, weight in zip(pending, weights, strict=True)
    ]

    def learn_items(items: Any) -> tuple[dict[str, float], Tensor]:
        means = add_gradients(trainer, items)
        gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        student.zero_grad()
        return means, gradient

    plain_means, _ = learn_items(pending)
    means, gradient = learn_items(weighted_items)
    loss, expected = 0.0, torch.zeros_like(gradient)
    for item, weight in zip(pending, weights, strict=True):
        item_means, item_gradient = learn_items([item])
        share = weight * item.sequence.learned / plain_means["tokens"]
        loss += share * item_means["loss"]
        expected += share * item_gradient
    assert means["loss"] == pytest.approx(loss, rel=1e-5)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    assert means["kl/teacher"] == pytest.approx(plain_means["kl/teacher"], rel=1e-6)
    assert means["tokens"] == plain_means["tokens"]


def test_a_prompt_with_a_token_that_the_student_lacks_is_refused(material: tiny.Material) -> None:
    words = tiny.tokenizer()
    inputs = Inputs(words, len(words) - 1, max_length=None, teachers={}, rewards=None)
    with pytest.raises(InvalidInput, match="has the token '='"):
        prepare(tiny.job(material), inputs)


def test_an_export_in_another_dtype_is_the_reason_of_the_verdict(
    material: tiny.Material, tmp_path: Path
) -> None:
    run = new_run(material, tmp_path / "run", export__dtype="float16")
    trainer, student, _ = make_trainer(material, run)
    with torch.no_grad():
        student.model.get_input_embeddings().weight[3, 4] = 1e5

    def attempt() -> Verdict:
        trainer._export()
        return "succeeded"

    assert run_to_verdict(trainer.progress, attempt, run.held()) == 0
    status = run.read_status()
    assert status is not None
    assert re.fullmatch(
        r"the export is in bfloat16, not float16: \S+ has a value above 65504, .*", status.reason
    )
    assert json.loads((run.export / "config.json").read_text())["dtype"] == "bfloat16"
