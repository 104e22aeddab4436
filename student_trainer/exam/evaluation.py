"""An evaluation: models answer prompts, and the answers are scored.

Answers are stored when they arrive, so a resumed evaluation requests only the missing ones. Imports
torch only if a model runs in this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from clients.config.exam import ExamConfig
from clients.config.tables.data import DataConfig
from protos.errors import InvalidInput
from protos.extras import install_command
from protos.rpc.failpoints import failpoint
from student_trainer.exam.answer_requests import Refusals
from student_trainer.exam.answer_store import AnswerStore, StoredAnswer
from student_trainer.exam.questions import Question, fingerprint, load_questions
from student_trainer.exam.report import GradedAnswers, judge, save, summarize
from student_trainer.rewards import make_rewards

RESULT = "result.json"
_SECONDS_BETWEEN_LINES = 10.0


class Watcher(Protocol):
    """Follows the progress of an evaluation."""

    def begin(self, model: str, stored_count: int, total: int) -> None:
        """Start to follow a model, which has `stored_count` of its `total` answers on disk."""

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """Record answers of the model, already on disk. May raise to end the evaluation."""

    def is_stopped(self) -> bool:
        """Return whether the evaluation must stop; called for each token of a local model."""


class PrintedProgress:
    """Prints a line of progress to stderr, at most one every 10 s. A Watcher."""

    def begin(self, model: str, stored_count: int, total: int) -> None:
        """Print how many answers of the model are on disk, unless all are."""
        self._model, self._answer_count, self._total = model, stored_count, total
        self._printed_at = time.monotonic()
        if stored_count < total:
            self._print_progress()

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """Count the answers."""
        self._answer_count += len(answers)
        if (
            time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES
            or self._answer_count == self._total
        ):
            self._printed_at = time.monotonic()
            self._print_progress()

    def is_stopped(self) -> bool:
        """Return False: an interrupt ends the process."""
        return False

    def _print_progress(self) -> None:
        print(
            f"{self._model}: {self._answer_count} of {self._total} answers",
            file=sys.stderr,
            flush=True,
        )


def run(config: ExamConfig, watcher: Watcher | None = None) -> list[dict[str, Any]]:
    """Collect and score the answers of all models, and return the rows of the table.

    Writes result.json and, for each model, its answers and judged.parquet into `config.out`.
    `watcher`: None is a PrintedProgress. Raises a DistillError if the evaluation cannot finish, and
    ExamStopped if the watcher requests it; stored answers stay on disk.
    """
    watcher = watcher or PrintedProgress()
    out = Path(config.out)
    # A length penalty is part of training, not of the quality of an answer.
    with make_rewards(config.reward.model_copy(update={"length": None})) as rewards:
        questions = load_questions(config)
        answers_by_model = {
            model_name: _answer_questions(config, model_name, questions, watcher)
            for model_name in config.models
        }
        rows = []
        first_graded: GradedAnswers | None = None
        for model_name, answers in answers_by_model.items():
            graded = judge(questions, answers, rewards)
            save(graded, out / model_name / "judged.parquet")
            rows.append(summarize(model_name, graded, first_graded))
            first_graded = first_graded or graded
    temporary_path = out / f"{RESULT}.tmp"
    temporary_path.write_text(json.dumps({"models": rows}, indent=2) + "\n")
    temporary_path.replace(out / RESULT)
    return rows


def _answer_questions(
    config: ExamConfig, name: str, questions: list[Question], watcher: Watcher
) -> list[list[StoredAnswer | None]]:
    """Return all answers of a model, requesting those that are not on disk yet.

    An answer is None if the model refused its prompt. Raises a DistillError if it refuses all.
    """
    model = config.models[name]
    with AnswerStore(Path(config.out) / name, _collect_settings(config, model)) as store:
        requests = [
            (question, sample) for question in questions for sample in range(config.samples)
        ]
        missing_requests = [
            (question, sample)
            for question, sample in requests
            if (question.number, sample) not in store
        ]
        stored_count = len(requests) - len(missing_requests)
        watcher.begin(name, stored_count, len(requests))
        if missing_requests:
            refusals = Refusals(answered=stored_count > 0)

            def store_answers(*answers: StoredAnswer) -> None:
                store.add(*answers)
                failpoint("answers-stored")
                refusals.answered = True
                watcher.add(answers)

            _make_examinee(config, model, watcher).answer(missing_requests, store_answers, refusals)
            store.write_part()
            refusals.conclude(name)
        return [
            [store.get(question.number, sample) for sample in range(config.samples)]
            for question in questions
        ]


def _make_examinee(config: ExamConfig, model: str, watcher: Watcher) -> Any:
    if config.endpoint is not None:
        try:
            from student_trainer.exam.endpoint import ModelEndpoint
        except ImportError:
            raise InvalidInput(
                "an endpoint needs the package httpx, which is not installed",
                field="--endpoint",
                hint=install_command("rl"),
            ) from None

        return ModelEndpoint(config, model)
    from student_trainer.exam.local_model import LocalModel

    return LocalModel(config, model, watcher.is_stopped)


def _collect_settings(config: ExamConfig, model: str) -> dict[str, Any]:
    """Return the settings that determine the answers, of which a directory has one set.

    The numbers of prompts and samples are not included, so they can be raised later.
    """
    config_values = config.model_dump(mode="json")
    answer_keys = ("temperature", "top_p", "max_tokens", "seed", "endpoint")
    return {
        "model": model,
        **{key: config_values[key] for key in answer_keys},
        "api": config.api if config.endpoint else None,
        "data": fingerprint(config),
        "template": config.data.template if config.data else config.reward.template,
        "prompt_column": config.data.prompt_column if config.data else None,
        **_collect_prompt_settings(config.data),
        "weights": None if config.endpoint else _list_weight_files(Path(model)),
    }


def _collect_prompt_settings(data: DataConfig | None) -> dict[str, Any]:
    """Return the prompt format's settings; defaults are None, as in older directories."""
    keys = ("messages_column", "system", "chat_template", "template_arguments")
    fields = DataConfig.model_fields
    prompt_values = {key: getattr(data, key, None) for key in keys}
    return {
        key: None if prompt_value == fields[key].default else prompt_value
        for key, prompt_value in prompt_values.items()
    }


def _list_weight_files(model: Path) -> list[list[Any]]:
    """Return [name, size, modification time] of each weight file, to detect a changed model."""
    weight_files = [(file, file.stat()) for file in sorted(model.glob("*.safetensors"))]
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in weight_files]
