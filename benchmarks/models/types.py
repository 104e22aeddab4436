"""Every causal language model of the installed transformers as teacher and as student.

    python -m benchmarks.models.types [--only TYPE...] [--out docs/models.md] [--resume FILE]

For each type a tiny random model is made, saved and loaded. As a teacher: rows of the hf engine
against log_softmax of the model's own logits, in float64. As a student: the gradient of a Top-k KL
through the fused operator against the gradient through the model's own logits; the self-test of a
job's start; the log-probs that sampling records in a ragged batch against a plain forward pass;
the gradients of LoRA adapters; and exports, with and without adapters, against what was trained.
Writes a page with the share that works, and the reason for each type that does not. Takes twenty
minutes. `--resume`: a file with an outcome a line, to which each new one is appended.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.models.tiny_configs import VOCAB, make_tiny_config
from benchmarks.shared.pages import format_table, write_page
from clients.config.tables.common import LoraConfig, StudentConfig
from clients.teacher.query import ScoreQuery
from protos.errors import DistillError
from protos.rows.codec import RowBlock
from student_trainer.checkpoints.export import export_model
from student_trainer.data.batch import Batch, ScoredSequence, make_batch
from student_trainer.data.sequence import TokenSequence
from student_trainer.model.loading import load_model
from student_trainer.model.student import Student
from student_trainer.objectives.distillation import DistillationObjective, distillation_loss
from student_trainer.parallel.sharding import Replicated
from student_trainer.rollouts.sampler import Sampler, rollout_noise
from student_trainer.run import self_test
from teacher_service.engines.hf import HfEngine
from teacher_service.serving.self_test import run_self_test

SECONDS = 300  # a type takes seconds on a free core
TOKENS, START, TOP_K = 12, 4, 8
# Of rows in nats, and of gradients relative to their norm: the rounding of float32.
ROWS_WITHIN, GRADIENTS_WITHIN = 1e-4, 1e-4
WORKS, SLOW = "works", "works, with all logits in memory"
PAGE = """\
# Models

This page lists the {total} types of causal language models of transformers {version}. Each type was
tested as a tiny model with random weights by `python -m benchmarks.models.types`. A cell that does
not begin with "works" is the error message that refuses the model.

"works" means:

- **Teacher**: the rows of the hf engine equal `log_softmax` of the model's own logits, within
  {rows_within:g} nats.
- **Student**: the gradient of the fused operator equals the gradient through the model's own
  logits, within {gradients_within:g} of its norm. "With all logits in memory": the head is no
  scaled or capped linear layer, and the gradient through all logits is finite.
- **Sampling**: the self-test of a job passes. The log-probs recorded in a batch of prompts of
  several lengths equal those of a plain forward pass, within {rows_within:g} nats.
- **LoRA**: each adapter gets a gradient. The merged export computes the same as the trained model.
- **Export**: transformers loads the export without missing weights. The loaded model computes the
  same as the trained model.

{shares}

{types}
"""


@dataclass
class Outcome:
    """The outcome of a type. head: `scale` and `cap` of its head, if a probe found them."""

    type: str
    model: str
    teacher: str = ""
    student: str = ""
    sampling: str = ""
    adapters: str = ""
    export: str = ""
    head: str = ""
    rows_error: float | None = None
    gradient_error: float | None = None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="these types, and print only")
    parser.add_argument("--resume", type=Path, help="a file with the outcomes so far")
    parser.add_argument("--out", type=Path, default=Path("docs/models.md"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    outcomes: dict[str, Outcome] = {}
    if options.resume and options.resume.exists():
        lines = map(json.loads, options.resume.read_text().splitlines())
        outcomes = {values["type"]: Outcome(**values) for values in lines}
    for name in options.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name in outcomes:
            continue
        outcomes[name] = examine_in_process(name)
        line = json.dumps(asdict(outcomes[name]))
        print(line, flush=True)
        if options.resume:
            with options.resume.open("a") as file:
                file.write(line + "\n")
    if not options.only:
        write_page(options.out, format_page([*outcomes.values()]))


def examine_in_process(name: str) -> Outcome:
    """Examine a type in a forked process, which may die or hang."""
    fork = multiprocessing.get_context("fork")
    reads, writes = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: writes.send(examine(name)), daemon=True)
    process.start()
    writes.close()
    try:
        if reads.poll(SECONDS):
            outcome: Outcome = reads.recv()
            return outcome
        reason = f"took more than {SECONDS} s"
    except EOFError:
        reason = "its process died"
    finally:
        process.kill()
        process.join()
    return Outcome(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], *[reason] * 5)


def examine(name: str) -> Outcome:
    """Return the outcome of a model type."""
    outcome = Outcome(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        path = Path(root)
        try:
            save_tiny_model(name, path)
        except Exception as error:
            reason = f"no tiny model: {reason_of(error)}"
            return Outcome(name, outcome.model, *[reason] * 5)
        ids = np.random.default_rng(0).integers(5, VOCAB - 5, TOKENS).astype(np.int32)
        try:
            outcome.rows_error = rows_error(path, ids)
            is_near = outcome.rows_error < ROWS_WITHIN
            outcome.teacher = WORKS if is_near else f"rows are off by {outcome.rows_error:.2g} nats"
        except Exception as error:
            outcome.teacher = reason_of(error)
        try:
            compare_gradients(path, ids, outcome)
        except Exception as error:
            outcome.student = reason_of(error)
        for part, check in CHECKS.items():
            try:
                result = check(path, root)
            except Exception as error:
                result = reason_of(error)
            setattr(outcome, part, result)
    return outcome


def save_tiny_model(name: str, path: Path) -> None:
    """Save a tiny model with random weights, and a tokenizer of its ids."""
    config = make_tiny_config(transformers.CONFIG_MAPPING[name], name)
    model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            head.weight.normal_(std=0.1)
    model.save_pretrained(path)
    inner = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0").save_pretrained(path)
    try:
        AutoModelForCausalLM.from_pretrained(path)
    except ValueError as error:
        raise ValueError(f"transformers does not load what it has saved: {error}") from error


def rows_error(path: Path, ids: np.ndarray[Any, Any]) -> float:
    """Return the largest error of a log-prob of the hf engine's rows, in nats."""
    engine = HfEngine(str(path), device="cpu")
    run_self_test(engine)
    (rows,) = engine.score([ScoreQuery(ids, START, top_k=TOP_K, f32=True)])
    if not isinstance(rows, RowBlock):
        raise rows
    with torch.no_grad():
        logits = engine._model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits
    exact = logits[0, START - 1 : -1].double().log_softmax(1).numpy()
    head = np.take_along_axis(exact, rows.head_ids, 1)
    outside = np.exp(exact)
    np.put_along_axis(outside, rows.head_ids, 0, 1)
    tail = np.log(outside.sum(1))
    token = np.take_along_axis(exact, ids[START:, None], 1)[:, 0]
    pairs = ((rows.head_logprobs, head), (rows.tail_logmass, tail), (rows.token_logprobs, token))
    return max(float(np.abs(logprobs - exact_logprobs).max()) for logprobs, exact_logprobs in pairs)


def compare_gradients(path: Path, ids: np.ndarray[Any, Any], outcome: Outcome) -> None:
    """Compare the two gradients of a student, and note the result in `outcome`."""
    student = Student(load_model(StudentConfig(model=str(path), dtype="float32")).train())
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(TOKENS - START, VOCAB)))
    logprobs = logits.log_softmax(1)
    head = logprobs.topk(TOP_K).indices
    rows = RowBlock(
        head.numpy().astype(np.int32),
        logprobs.gather(1, head).float().numpy(),
        logprobs.exp().scatter(1, head, 0).sum(1).log().float().numpy(),
        logprobs.gather(1, torch.from_numpy(ids[START:, None]).long())[:, 0].float().numpy(),
    )
    sequence = TokenSequence(torch.from_numpy(ids).long(), START)
    batch = make_batch([ScoredSequence(sequence, rows)], torch.device("cpu"))
    fused_gradients = compute_gradients(student, batch)
    if student._logit_map is None:
        finite = bool(fused_gradients) and all(
            bool(grad.isfinite().all()) for grad in fused_gradients
        )
        outcome.student = SLOW if finite else "no gradient"
        return
    scale, cap = student._logit_map.scale, student._logit_map.cap
    parts = (f"scale {scale:.4g}" if scale != 1 else "", f"cap {cap:g}" if cap else "")
    outcome.head = " ".join(filter(None, parts))
    student._logit_map = None
    plain_gradients = compute_gradients(student, batch)
    distance = (
        sum(
            float((a - b).square().sum())
            for a, b in zip(fused_gradients, plain_gradients, strict=True)
        )
        ** 0.5
    )
    size = sum(float(b.square().sum()) for b in plain_gradients) ** 0.5
    outcome.gradient_error = distance / size
    is_near = outcome.gradient_error < GRADIENTS_WITHIN
    outcome.student = WORKS if is_near else f"the gradient is off by {outcome.gradient_error:.2g}"


def check_sampling(path: Path, _: str) -> str:
    """Run the self-test, sample in a ragged batch, and compare with plain forward passes."""
    model = load_model(StudentConfig(model=str(path), dtype="float32")).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    accelerator = Accelerator(cpu=True)
    student = Replicated(accelerator, Student(model))
    student.choose_attention(StudentConfig(model=str(path)))
    result = self_test.run_self_test(student, tokenizer, accelerator, samples=True)
    sampler = Sampler(
        model, tokenizer, top_k=0, temperature=1.0, equal_lengths=result.equal_lengths
    )
    before = [torch.arange(5, 5 + length) for length in (3, 9, 6)]
    limits = [6, 5, 6]
    noise = [rollout_noise(number, 0, 6) for number in range(len(before))]
    samples = sampler.write(before, limits, noise)
    error = 0.0
    for prompt_ids, sample in zip(before, samples, strict=True):
        ids = torch.cat([prompt_ids, sample.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].double()
        logprobs = logits.log_softmax(1).gather(1, ids[1:, None])[len(prompt_ids) - 1 :, 0]
        error = max(error, float((logprobs - sample.token_logprobs).abs().max()))
    if not error < ROWS_WITHIN:
        return f"sampled log-probs are off by {error:.2g} nats"
    notes = ["one sequence a line"] if result.layout == "padded" else []
    notes += ["prompts of one length"] if result.equal_lengths else []
    notes += [f"no gradient: {result.untrained[0]}"] if result.untrained else []
    return ", ".join([WORKS, *notes])


def check_adapters(path: Path, root: str) -> str:
    """Give adapters random values, check that each gets a gradient, and export the merged model."""
    model = load_model(StudentConfig(model=str(path), dtype="float32", lora=LoraConfig(rank=2)))
    adapters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    generator = torch.Generator().manual_seed(0)
    for weight in adapters.values():
        weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    ids = torch.arange(5, 5 + TOKENS)[None]
    logits = model.train()(input_ids=ids, use_cache=False).logits
    logits[0, :-1].log_softmax(1).gather(1, ids[0, 1:, None]).sum().backward()
    for name, weight in adapters.items():
        if weight.grad is None or not bool(weight.grad.isfinite().all()):
            return f"{name} gets no finite gradient"
    return _compare_export(model.eval(), path, Path(root, "merged"))


def check_export(path: Path, root: str) -> str:
    """Export the student, load it again, and compare."""
    model = load_model(StudentConfig(model=str(path), dtype="float32")).eval()
    return _compare_export(model, path, Path(root, "export"))


def _compare_export(model: Any, path: Path, out: Path) -> str:
    export_model(out, model=model, tokenizer=AutoTokenizer.from_pretrained(path))
    exported, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    if loading["missing_keys"]:
        return f"the export lacks {min(loading['missing_keys'])}"
    ids = torch.arange(5, 5 + TOKENS)[None]
    with torch.no_grad():
        logprobs, exported_logprobs = (
            loaded(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            for loaded in (model, exported.eval())
        )
    error = float((logprobs - exported_logprobs).abs().max())
    return WORKS if error < ROWS_WITHIN else f"the export is off by {error:.2g} nats"


CHECKS: dict[str, Callable[[Path, str], str]] = {
    "sampling": check_sampling,
    "adapters": check_adapters,
    "export": check_export,
}


def compute_gradients(student: Student, batch: Batch) -> list[torch.Tensor]:
    """Return the gradients of a reverse Top-k KL in the weights, in order."""
    student.zero_grad()
    objective = DistillationObjective("reverse", "bucket+sampled", 1.0)
    student(batch, distillation_loss(batch, objective), 1.0).loss_sum.backward()
    return [p.grad.clone() for p in student.parameters() if p.grad is not None]


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error, without paths."""
    message = error.message if isinstance(error, DistillError) else str(error)
    words = " ".join(message.split()) or type(error).__name__
    temporary_path = re.escape(tempfile.gettempdir()) + r"/\w+"
    words = re.sub(temporary_path, "the model", words)
    words = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", words)
    return re.split(r"[.!] (?=[A-Z])| for this kind of", words)[0][:160].rstrip(".")


def list_cells(outcome: Outcome) -> list[str]:
    """Return the cells of a type's row in docs/models.md."""
    parts = (outcome.teacher, outcome.student, outcome.sampling, outcome.adapters, outcome.export)
    cells = [f"`{outcome.type}`", outcome.head or "plain", *parts]
    return [cell.replace("|", "/") for cell in cells]


def format_page(outcomes: list[Outcome]) -> str:
    """Return docs/models.md."""
    total = len(outcomes)
    counts = {
        "teacher": sum(outcome.teacher == WORKS for outcome in outcomes),
        "student, fused": sum(outcome.student == WORKS for outcome in outcomes),
        "student, with all logits in memory": sum(outcome.student == SLOW for outcome in outcomes),
        "teacher and fused student": sum(
            outcome.teacher == WORKS and outcome.student == WORKS for outcome in outcomes
        ),
        **{
            label: sum(getattr(outcome, part).startswith(WORKS) for outcome in outcomes)
            for part, label in (
                ("sampling", "sampling"),
                ("adapters", "LoRA"),
                ("export", "export"),
            )
        },
    }
    shares = [
        [label, f"{count} of {total}", f"{100 * count / total:.0f}%"]
        for label, count in counts.items()
    ]
    types = [list_cells(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.type)]
    return PAGE.format(
        total=total,
        version=transformers.__version__,
        rows_within=ROWS_WITHIN,
        gradients_within=GRADIENTS_WITHIN,
        shares=format_table(["", "types", "share"], shares),
        types=format_table(
            ["type", "head", "teacher", "student", "sampling", "LoRA", "export"], types
        ),
    )


if __name__ == "__main__":
    main()
