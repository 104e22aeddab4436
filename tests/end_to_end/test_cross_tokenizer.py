"""A teacher with another tokenizer: the trainer and the teacher service, from end to end.

The tokenizers are trained here, on the same texts with other sizes; the teacher learns the texts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish, run_attempt
from tests.end_to_end.processes import metrics_of, new_run
from tests.real_tokenizers import fetch_tokenizer

PROMPT = "say: "
NOUNS = ["cat", "dog", "bird", "horse"]
VERBS = ["sat down", "ate it", "sang", "ran off"]
# The teacher prefers the first noun and verb, the student the last ones.
WEIGHTS = [0.6, 0.25, 0.1, 0.05]
SLOW_MATCHES = pytest.mark.parametrize(
    "match",
    [
        "row",
        pytest.param("chunk", marks=pytest.mark.slow),
        pytest.param("word", marks=pytest.mark.slow),
    ],
)
STEPS = 100


def answers_of(name: str) -> list[str]:
    """Return 400 answers with the word frequencies that the model `name` is to learn."""
    random = Random(0)
    weights = WEIGHTS if name == "teacher" else WEIGHTS[::-1]
    nouns, verbs = (random.choices(words, weights, k=400) for words in (NOUNS, VERBS))
    return [f"the {noun} {verb}" for noun, verb in zip(nouns, verbs, strict=True)]


@pytest.fixture(scope="module")
def models_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from student_trainer.tools import pretrain

    torch.set_num_threads(1)
    models_directory = tmp_path_factory.mktemp("other")
    for seed, (name, size) in enumerate([("teacher", 290), ("student", 274)]):
        torch.manual_seed(seed)
        texts = answers_of(name)
        tokenizer = pretrain.make_tokenizer("bpe", texts, size)
        model = pretrain.make_model(len(tokenizer), tokenizer, 2, 32)
        prompt_ids = tokenizer(PROMPT)["input_ids"]
        of_answers = [tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id] for answer in texts]
        texts_with_prompts = [
            pretrain.Text(prompt_ids + answer, len(prompt_ids)) for answer in of_answers
        ]
        options = pretrain._build_parser().parse_args(
            ["--data", "x", "--columns", "x", "--out", "x", "--steps", "150"]
        )
        options.learning_rate, options.batch = 1e-2, 16
        pretrain.train(model, texts_with_prompts, options)
        model.save_pretrained(models_directory / name)
        tokenizer.save_pretrained(models_directory / name)
    line = json.dumps({"prompt": PROMPT, "answer": "the cat sat down"}) + "\n"
    (models_directory / "prompts.jsonl").write_text(line * 40)
    return models_directory


@pytest.fixture
def teacher(models_directory: Path, tmp_path: Path) -> Iterator[str]:
    arguments = [
        "--model",
        str(models_directory / "teacher"),
        "--no-cache",
        "--device",
        "cpu",
        "--batch-invariant",
    ]
    process = ForkedTeacher(arguments, log=tmp_path / "teacher.log")
    yield process.address
    process.close()


def material_of(models_directory: Path) -> Any:
    from tests.student_trainer import tiny

    names = ("prompts.jsonl", "teacher", "student")
    return tiny.Material(*(models_directory / name for name in names))


def make_job(models_directory: Path, address: str, **changes: Any) -> Any:
    from tests.student_trainer import tiny

    return tiny.job(
        material_of(models_directory),
        address,
        **{
            "teacher__tokenizer": "auto",
            "max_steps": STEPS,
            "eval__every": STEPS,
            "eval__prompts": 8,
            "eval__metric": "none",
            "checkpoint__every": STEPS,
            "train__learning_rate": 1e-3,
            "train__tokens_per_micro_batch": 4000,
            "method__max_new_tokens": 20,
            "method__rollouts_per_prompt": 16,
            **changes,
        },
    )


def measure_string_cost(models_directory: Path, student: Path) -> float:
    """Return the mean of log p(a) - log q(t(x)) over sampled answers, computed by plain models."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    models = [
        AutoModelForCausalLM.from_pretrained(path)
        for path in (student, models_directory / "teacher")
    ]
    tokenizers = [
        AutoTokenizer.from_pretrained(path)
        for path in (models_directory / "student", models_directory / "teacher")
    ]
    prompt_ids = torch.tensor([tokenizers[0](PROMPT)["input_ids"]]).repeat(200, 1)
    sampled_ids = models[0].generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=24,
        pad_token_id=tokenizers[0].eos_token_id,
    )[:, prompt_ids.shape[1] :]
    costs = []
    for row in sampled_ids.tolist():
        ids = (
            row[: row.index(tokenizers[0].eos_token_id)]
            if tokenizers[0].eos_token_id in row
            else row
        )
        text = tokenizers[0].decode(ids)
        student_ids = [*ids, tokenizers[0].eos_token_id][: len(row)]
        has_end = len(student_ids) > len(ids)
        teacher_ids = tokenizers[1](text)["input_ids"] + [tokenizers[1].eos_token_id] * has_end
        costs.append(
            answer_logprob(models[0], tokenizers[0], student_ids)
            - answer_logprob(models[1], tokenizers[1], teacher_ids)
        )
    return sum(costs) / len(costs)


def answer_logprob(model: Any, tokenizer: Any, answer: list[int]) -> float:
    import torch

    prompt_ids = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + answer])).logits[0, len(prompt_ids) - 1 : -1]
    return float(logits.log_softmax(1).gather(1, torch.tensor(answer)[:, None]).sum())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("horizon", ["word", "answer"])
def test_the_student_learns_what_the_teacher_likes(
    models_directory: Path, teacher: str, tmp_path: Path, horizon: str
) -> None:
    run = finish(
        new_run(tmp_path / "run", make_job(models_directory, teacher, method__horizon=horizon))
    )
    cost_before, cost_after = (
        measure_string_cost(models_directory, models_directory / "student"),
        measure_string_cost(models_directory, run.export),
    )
    print(f"{horizon}: log p - log q of an answer {cost_before:.2f} -> {cost_after:.2f} nats")
    assert cost_after < 0.7 * cost_before
    lines = metrics_of(run)
    costs = [line["kl/teacher"] for line in lines if "kl/teacher" in line]
    assert sum(costs[-10:]) < 0.5 * sum(costs[:10])
    assert lines[-1]["eval/kl"] < 0.6 * lines[0]["eval/kl"]
    step_lines = [line for line in lines if "pair/one_to_one" in line]
    assert 0 < step_lines[0]["pair/one_to_one"] < 1
    assert all(line["pair/left_out"] == 0 for line in step_lines)
    assert step_lines[-1]["pair/other_spelling"] < 0.1
    assert "are one token of it" in run.log_file(1).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("horizon", ["word", pytest.param("answer", marks=pytest.mark.slow)])
def test_two_processes_and_small_batches_change_nothing(
    models_directory: Path, teacher: str, tmp_path: Path, horizon: str
) -> None:
    last_lines = []
    for processes, tokens in ((1, 4000), (2, 4000), (1, 60)):
        steps = dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 1)
        changes: dict[str, Any] = {
            **steps,
            "method__horizon": horizon,
            "train__processes": processes,
            "train__tokens_per_micro_batch": tokens,
        }
        path = tmp_path / f"{processes}-{tokens}"
        run = finish(new_run(path, make_job(models_directory, teacher, **changes)))
        last_lines.append(metrics_of(run)[-1])
    for name in ("loss", "grad_norm", "kl/teacher", "pair/one_to_one", "pair/other_spelling"):
        values = [line[name] for line in last_lines]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_logits_without_a_token_are_left_out(
    models_directory: Path, teacher: str, tmp_path: Path
) -> None:
    """An untrained student would sample such ids in two of five cases."""
    from transformers import PreTrainedTokenizerFast

    from student_trainer.tools.pretrain import make_model
    from tests.student_trainer import tiny

    tokenizer = PreTrainedTokenizerFast.from_pretrained(models_directory / "student")
    wide_student = tiny.save(
        make_model(len(tokenizer) + 200, tokenizer, 1, 32), tokenizer, tmp_path / "wide"
    )
    steps = dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 2)
    changes: dict[str, Any] = {"student__model": str(wide_student), **steps}
    run = finish(new_run(tmp_path / "run", make_job(models_directory, teacher, **changes)))
    assert all(line.get("pair/left_out", 0) == 0 for line in metrics_of(run))


@pytest.fixture(scope="module")
def renamed_directory(models_directory: Path) -> Path:
    """A copy of the student whose end token has another name."""
    renamed_directory = shutil.copytree(models_directory / "student", models_directory / "renamed")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (renamed_directory / file).read_text()
        assert "<|end|>" in text
        (renamed_directory / file).write_text(text.replace("<|end|>", "<stop>"))
    return renamed_directory


@pytest.fixture
def renamed_teacher(renamed_directory: Path, tmp_path: Path) -> Iterator[str]:
    arguments = ["--model", str(renamed_directory), "--no-cache", "--device", "cpu"]
    process = ForkedTeacher(arguments, log=tmp_path / "log")
    yield process.address
    process.close()


@pytest.mark.slow
def test_a_teacher_with_other_special_tokens(
    models_directory: Path, renamed_teacher: str, tmp_path: Path
) -> None:
    """The KL is 0; with a context, it is the effect of the context alone."""
    steps = dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 1)
    first_lines = {}
    for name, context in (("plain", None), ("context", "{answer}. ")):
        changes = {**steps, "teacher__context": context, "teacher__logprob_format": "f32"}
        run = finish(
            new_run(tmp_path / name, make_job(models_directory, renamed_teacher, **changes))
        )
        first_lines[name] = metrics_of(run)[0]
        assert "<|end|> is <stop>" in run.log_file(1).read_text()
    assert abs(first_lines["plain"]["eval/kl"]) < 1e-5
    assert first_lines["context"]["eval/kl"] > 0.01


def make_rl_job(models_directory: Path, address: str, **changes: Any) -> Any:
    from tests.student_trainer import tiny

    return tiny.rl_job(
        material_of(models_directory),
        **{
            "teacher": {"address": address, "tokenizer": "auto", "logprob_format": "f32"},
            "method__teacher_beta": 0.5,
            "method__max_new_tokens": 20,
            "train__tokens_per_micro_batch": 4000,
            **dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 1),
            **changes,
        },
    )


@pytest.mark.parametrize(
    "divergence", ["reverse_kl", pytest.param("forward_kl", marks=pytest.mark.slow)]
)
def test_rl_with_a_teacher_of_other_special_tokens(
    models_directory: Path, renamed_teacher: str, tmp_path: Path, divergence: str
) -> None:
    run = make_rl_job(
        models_directory, renamed_teacher, method__divergence=divergence, method__temperature=1.0
    )
    run = finish(new_run(tmp_path / "run", run))
    [line] = [line for line in metrics_of(run) if "kl/teacher" in line]
    # In the first of two updates the student has the weights of the teacher.
    assert abs(line["kl/teacher"]) < 1e-3
    assert "<|end|> is <stop>" in run.log_file(1).read_text()


def test_rl_refuses_a_teacher_with_other_words(
    models_directory: Path, teacher: str, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", make_rl_job(models_directory, teacher))
    assert run_attempt(run, 1) != [0]
    status = run.read_status()
    assert status is not None
    assert "teacher.tokenizer: the tokenizers of student and teacher differ" in status.reason


def test_by_default_another_tokenizer_is_refused(
    models_directory: Path, teacher: str, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", make_job(models_directory, teacher, teacher__tokenizer="same"))
    assert run_attempt(run, 1) != [0]
    status = run.read_status()
    assert status is not None
    assert "the tokenizers differ: id" in status.reason


def test_a_tokenizer_that_is_not_the_teachers(
    models_directory: Path, teacher: str, tmp_path: Path
) -> None:
    other_tokenizer = models_directory / "other"
    if not other_tokenizer.exists():
        from student_trainer.tools import pretrain

        pretrain.make_tokenizer("bpe", ["another text"], 262).save_pretrained(other_tokenizer)
    run = new_run(
        tmp_path / "run",
        make_job(models_directory, teacher, teacher__tokenizer=str(other_tokenizer)),
    )
    assert run_attempt(run, 1) != [0]
    status = run.read_status()
    assert status is not None
    assert "is not that of the teacher" in status.reason


@pytest.mark.slow
def test_real_tokenizers_and_their_chat_templates(tmp_path: Path) -> None:
    """Random models with the tokenizers of Qwen3 and Llama 3.2; the prompts are conversations."""
    import torch
    from transformers import AutoTokenizer

    from student_trainer.tools.pretrain import make_model
    from tests.student_trainer import tiny

    for name, source in (("teacher", "qwen3"), ("student", "llama3_2")):
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(fetch_tokenizer(source, tmp_path / source))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        tiny.save(make_model(len(tokenizer), tokenizer, 1, 32), tokenizer, tmp_path / name)
    messages = [{"role": "user", "content": "How many apples are 12 + 34 apples?"}]
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 24)
    arguments = [
        "--model",
        str(tmp_path / "teacher"),
        "--no-cache",
        "--device",
        "cpu",
        "--batch-invariant",
    ]
    process = ForkedTeacher(arguments, log=tmp_path / "teacher.log")
    options = {"data__messages_column": "messages", "method__max_prompt_tokens": 64}
    steps = dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 3)
    try:
        run = finish(
            new_run(tmp_path / "run", make_job(tmp_path, process.address, **options, **steps))
        )
    finally:
        process.close()
    first_line, *_, last_line = (line for line in metrics_of(run) if "kl/teacher" in line)
    # Random text is seldom changed by Qwen's normalization.
    assert first_line["pair/left_out"] + last_line["pair/left_out"] < 0.1
    # Random models mostly sample tokens of both vocabularies, or bytes.
    assert 0.1 < first_line["pair/one_to_one"] < 1
    assert all(abs(line["kl/teacher"]) < 50 for line in (first_line, last_line))


def capture_answers(
    models_directory: Path,
    name: str,
    prompt: str,
    *,
    teacher: str = "teacher",
    form: str = "completion",
) -> Path:
    """Capture the teacher's rows of its preferred answers; return the store."""
    from clients.config.capture import CaptureJob
    from tests.teacher_service.capture.material import capture_here

    records = [{"prompt": prompt, "answer": answer} for answer in answers_of("teacher")]
    if form == "text":
        records = [{"text": record["prompt"] + record["answer"]} for record in records]
    (models_directory / f"{name}.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    config = CaptureJob.model_validate(
        {
            "data": {"path": str(models_directory / f"{name}.jsonl"), "form": form},
            "teacher": {
                "model": str(models_directory / teacher),
                "top_k": 4,
                "logprob_format": "f32",
            },
            "method": {"type": "capture", "store": str(models_directory / name), "max_tokens": 60},
        }
    )
    assert capture_here(models_directory / f"{name}-run", config)[0] == "succeeded"
    return models_directory / name


@pytest.fixture(scope="module")
def store(models_directory: Path) -> Path:
    """A store for training; the held-out store `aside` has another prompt, so that no rows are
    equal.
    """
    capture_answers(models_directory, "aside", f"now {PROMPT}")
    return capture_answers(models_directory, "store", PROMPT)


def make_offline_job(models_directory: Path, store: Path, **changes: Any) -> Any:
    from tests.student_trainer import tiny

    return tiny.offline_job(
        material_of(models_directory),
        store,
        **{
            "data__tokenizer": "auto",
            "data__eval_path": str(models_directory / "aside"),
            "max_steps": STEPS,
            "eval__every": STEPS,
            "eval__prompts": 8,
            "checkpoint__every": STEPS,
            "train__learning_rate": 1e-3,
            "train__prompts_per_step": 16,
            "train__tokens_per_micro_batch": 4000,
            **changes,
        },
    )


@SLOW_MATCHES
def test_the_student_learns_from_a_store(
    models_directory: Path, store: Path, tmp_path: Path, match: str
) -> None:
    # ALM compares likelihoods, and needs more steps than rows do.
    steps = dict.fromkeys(
        ("max_steps", "eval__every", "checkpoint__every"), STEPS if match == "row" else 2 * STEPS
    )
    run = finish(
        new_run(
            tmp_path / "run",
            make_offline_job(models_directory, store, method__match=match, **steps),
        )
    )
    cost_before, cost_after = (
        measure_string_cost(models_directory, models_directory / "student"),
        measure_string_cost(models_directory, run.export),
    )
    print(f"{match}: log p - log q of an answer {cost_before:.2f} -> {cost_after:.2f} nats")
    assert cost_after < 0.7 * cost_before
    costs = [line["kl/teacher"] for line in metrics_of(run) if "kl/teacher" in line]
    assert sum(costs[-10:]) < 0.3 * sum(costs[:10])


@pytest.mark.slow
@SLOW_MATCHES
def test_two_processes_and_small_batches_change_nothing_of_a_store(
    models_directory: Path, store: Path, tmp_path: Path, match: str
) -> None:
    last_lines = []
    for processes, tokens in ((1, 4000), (2, 4000), (1, 60)):
        steps = dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 1)
        changes: dict[str, Any] = {
            **steps,
            "method__match": match,
            "method__cross_entropy": 0.5,
            "train__processes": processes,
            "train__tokens_per_micro_batch": tokens,
        }
        path = tmp_path / f"{processes}-{tokens}"
        run = finish(new_run(path, make_offline_job(models_directory, store, **changes)))
        last_lines.append(metrics_of(run)[-1])
    for name in ("loss", "grad_norm", "cross_entropy", "kl/teacher", "eval/kl"):
        values = [line[name] for line in last_lines]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("form", ["completion", "text"])
def test_a_store_of_other_special_tokens(
    models_directory: Path, renamed_directory: Path, tmp_path: Path, form: str
) -> None:
    """A store captured with the student's weights: the KL of head and tail is 0."""
    path = capture_answers(
        models_directory, f"renamed-{form}", PROMPT, teacher=renamed_directory.name, form=form
    )
    steps = dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 1)
    config = make_offline_job(models_directory, path, data__eval_path=None, **steps)
    run = finish(new_run(tmp_path / "run", config))
    line = metrics_of(run)[0]
    assert abs(line["eval/kl_bound"]) < 1e-5
    assert "topk/student_mass" in metrics_of(run)[-1]
    assert "<|end|> is <stop>" in run.log_file(1).read_text()


@pytest.mark.slow
def test_a_store_of_packed_text(models_directory: Path, tmp_path: Path) -> None:
    path = capture_answers(models_directory, "text", PROMPT, form="text")
    steps = dict.fromkeys(("max_steps", "eval__every", "checkpoint__every"), 20)
    config = make_offline_job(models_directory, path, data__eval_path=None, **steps)
    run = finish(new_run(tmp_path / "run", config))
    lines = metrics_of(run)
    assert lines[-1]["eval/kl"] < 0.9 * lines[0]["eval/kl"]
    assert all(line.get("pair/left_out", 0) == 0 for line in lines)
    assert 0 < lines[-1]["pair/one_to_one"] < 1
