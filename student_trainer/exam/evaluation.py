"""An evaluation: samples answers from models, and scores them.

Each answer is stored when it arrives, so a resumed evaluation requests only the missing answers.
torch is imported only if a model runs in this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.config.evaluation import ExamConfig
from clients.config.tables.data import DataConfig
from clients.data.tokens.tokenizer import read_template
from clients.preflight.columns import with_columns
from protos.errors import InvalidInput
from protos.extras import install_command
from protos.rpc.failpoints import failpoint
from student_trainer.exam.answer_store import AnswerStore, StoredAnswer
from student_trainer.exam.questions import Question, fingerprint, load_questions
from student_trainer.exam.report import GradedAnswers, judge, save, summarize
from student_trainer.rewards import make_rewards

RESULT = "result.json"
_SECONDS_BETWEEN_LINES = 10.0
_PROMPT_KEYS = ("messages_column", "system", "chat_template", "template_arguments")
# Left out if they are not set, because the answers of earlier versions do not have them.
_ADDED_KEYS = ("input_column", "completion_column")


class Watcher:
    """Follows the progress of an evaluation, and prints a line to stderr at most every 10 s."""

    def begin(self, model: str, stored_count: int, total: int) -> None:
        """Start to follow a model. `stored_count` of its `total` answers are already on disk."""
        self._model, self._answer_count, self._total = model, stored_count, total
        self._printed_at = 0.0
        if stored_count < total:
            self.add(())

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """Count further answers of the model, which are now on disk.

        May raise to end the evaluation.
        """
        self._answer_count += len(answers)
        now = time.monotonic()
        is_complete = self._answer_count == self._total
        if is_complete or now - self._printed_at >= _SECONDS_BETWEEN_LINES:
            self._printed_at = now
            progress = f"{self._model}: {self._answer_count} of {self._total} answers"
            print(progress, file=sys.stderr, flush=True)

    def is_stopped(self) -> bool:
        """Return whether the evaluation must stop.

        A local model calls this method for each token.
        """
        return False


def run(config: ExamConfig, watcher: Watcher | None = None) -> list[dict[str, Any]]:
    """Collect and score the answers of all models, and return the rows of the table, one per model.

    The directory `config.out` gets result.json and, for each model, its answers and judged.parquet.
    Raises a DistillError if the evaluation cannot finish, and ExamStopped if the watcher requests a
    stop. In both cases, the stored answers stay on disk.
    """
    out, config = Path(config.out), with_columns(config)
    # A length penalty is part of training, not of the quality of an answer.
    with make_rewards(config.reward.model_copy(update={"length": None})) as rewards:
        questions = load_questions(config)
        answers_by_model = {
            name: _answer_questions(config, name, questions, watcher or Watcher())
            for name in config.models
        }
        rows = []
        first_graded: GradedAnswers | None = None
        for name, answers in answers_by_model.items():
            graded = judge(questions, answers, rewards)
            save(graded, out / name / "judged.parquet")
            rows.append(summarize(name, graded, first_graded))
            first_graded = first_graded or graded
    temporary_path = out / f"{RESULT}.tmp"
    temporary_path.write_text(json.dumps({"models": rows}, indent=2) + "\n")
    temporary_path.replace(out / RESULT)
    return rows


def _answer_questions(
    config: ExamConfig, name: str, questions: list[Question], watcher: Watcher
) -> list[list[StoredAnswer | None]]:
    """Return the answers of a model: for each question, a list of answers.

    Only answers that are not on disk are requested. An answer is None if the model refused its
    prompt. Raises a DistillError if the model refused all prompts.
    """
    model, samples = config.models[name], range(config.method.samples)

    def on_answers(answers: Sequence[StoredAnswer]) -> None:
        failpoint("answers-stored")
        watcher.add(answers)

    settings = _collect_settings(config, model)
    with AnswerStore(Path(config.out) / name, settings, on_answers) as store:
        requests = [(question, sample) for question in questions for sample in samples]
        missing_requests = [
            (question, sample)
            for question, sample in requests
            if store.get(question.number, sample) is None
        ]
        watcher.begin(name, len(requests) - len(missing_requests), len(requests))
        if missing_requests:
            _load_examinee(config, model, watcher).answer(missing_requests, store)
            store.require_answers()
            store.warn_of_refusals(name)
        return [[store.get(question.number, n) for n in samples] for question in questions]


def _load_examinee(config: ExamConfig, model: str, watcher: Watcher) -> Any:
    if config.endpoint is None:
        from student_trainer.exam.local_model import LocalModel

        return LocalModel(config, model, watcher.is_stopped)
    try:
        from student_trainer.exam.endpoint import ModelEndpoint
    except ImportError:
        raise InvalidInput(
            "an endpoint needs the package httpx, which is not installed",
            field="--endpoint",
            hint=install_command("rl"),
        ) from None
    return ModelEndpoint(config, model)


def _collect_settings(config: ExamConfig, model: str) -> dict[str, Any]:
    """Return the settings that determine the answers of a model.

    All answers in a directory must have the same settings. The numbers of prompts and of samples
    are not included, so that a user can increase them later. `weights` contains name, size and
    modification time of each file, to detect a changed model.
    """
    data, method, is_local = config.data, config.method, config.endpoint is None
    weights = [(file.name, file.stat()) for file in sorted(Path(model).glob("*.safetensors"))]
    format_values = (data or DataConfig(path="-")).model_dump()
    added_values = {key: format_values[key] for key in _ADDED_KEYS if format_values[key]}
    if config.student.chat_template is not None:
        added_values["student_template"] = read_template(Path(config.student.chat_template))
    return {
        "model": model,
        "temperature": method.temperature,
        "top_p": method.top_p,
        "max_tokens": method.max_new_tokens,
        "seed": config.seed,
        "endpoint": config.endpoint,
        "api": None if is_local else config.api,
        "data": fingerprint(config),
        "template": data.template if data else config.reward.template,
        "prompt_column": data.prompt_column if data else None,
        **{key: format_values[key] for key in _PROMPT_KEYS},
        **added_values,
        "weights": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in weights]
        if is_local
        else None,
    }
