"""An evaluation: models answer prompts, and the answers are scored.

Answers are stored as they come, so an evaluation that was interrupted requests the missing ones
only. Imports torch only if a model runs in this process.
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
from student_trainer.exam.answer_store import AnswerStore, StoredAnswer
from student_trainer.exam.asking import Refusals
from student_trainer.exam.questions import Question, fingerprint, load_questions
from student_trainer.exam.report import GradedAnswers, judge, save, summary
from student_trainer.rewards import make_rewards

RESULT = "result.json"
_SECONDS_BETWEEN_LINES = 10.0


class Watcher(Protocol):
    """Follows an evaluation."""

    def begin(self, model: str, stored: int, total: int) -> None:
        """A model begins: `stored` of its `total` answers are on the disk."""

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """The model has given answers, which are on the disk. May raise to end the evaluation."""

    def is_stopped(self) -> bool:
        """Return whether the evaluation must stop; asked for each token of a local model."""


class PrintedProgress:
    """Prints a line of progress to stderr, at most one every 10 s. A Watcher."""

    def begin(self, model: str, stored: int, total: int) -> None:
        """Print how many answers of the model are on the disk, unless all are."""
        self._name, self._done, self._total = model, stored, total
        self._printed = time.monotonic()
        if stored < total:
            self._say()

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """Count the answers."""
        self._done += len(answers)
        if time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._printed = time.monotonic()
            self._say()

    def is_stopped(self) -> bool:
        """Return False: an interrupt ends the process."""
        return False

    def _say(self) -> None:
        print(f"{self._name}: {self._done} of {self._total} answers", file=sys.stderr, flush=True)


def run(config: ExamConfig, watcher: Watcher | None = None) -> list[dict[str, Any]]:
    """Let all models answer, score the answers, and return the rows of the table.

    Writes result.json and, for each model, its answers and judged.parquet into `config.out`.
    `watcher`: a PrintedProgress if it is None. Raises a DistillError if the evaluation cannot
    finish, and Stopped if the watcher says so; the answers so far stay on disk.
    """
    watcher = watcher or PrintedProgress()
    out = Path(config.out)
    # A length penalty is part of training, not of the quality of an answer.
    with make_rewards(config.reward.model_copy(update={"length": None})) as rewards:
        questions = load_questions(config)
        answered = {name: _answered(config, name, questions, watcher) for name in config.models}
        rows = []
        first: GradedAnswers | None = None
        for name, answers in answered.items():
            judged = judge(questions, answers, rewards)
            save(judged, out / name / "judged.parquet")
            rows.append(summary(name, judged, first))
            first = first or judged
    fresh = out / f"{RESULT}.tmp"
    fresh.write_text(json.dumps({"models": rows}, indent=2) + "\n")
    fresh.replace(out / RESULT)
    return rows


def _answered(
    config: ExamConfig, name: str, questions: list[Question], watcher: Watcher
) -> list[list[StoredAnswer | None]]:
    """Return all answers of a model, requesting those that are not on disk yet.

    An answer is None if the model refused its prompt. Raises a DistillError if it refuses all.
    """
    model = config.models[name]
    with AnswerStore(Path(config.out) / name, _settings(config, model)) as store:
        every = [(question, n) for question in questions for n in range(config.samples)]
        missing = [(q, n) for q, n in every if (q.number, n) not in store]
        there = len(every) - len(missing)
        watcher.begin(name, there, len(every))
        if missing:
            refusals = Refusals(answered=there > 0)

            def keep(*answers: StoredAnswer) -> None:
                store.add(*answers)
                failpoint("answers-stored")
                refusals.answered = True
                watcher.add(answers)

            _examinee(config, model, watcher).answer(missing, keep, refusals)
            store.write_part()
            refusals.conclude(name)
        return [[store.get(q.number, n) for n in range(config.samples)] for q in questions]


def _examinee(config: ExamConfig, model: str, watcher: Watcher) -> Any:
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


def _settings(config: ExamConfig, model: str) -> dict[str, Any]:
    """Return the settings that an answer depends on: a directory keeps answers of one setting.

    The numbers of prompts and samples are not among them, so they can be raised later.
    """
    said = config.model_dump(mode="json")
    of_answers = ("temperature", "top_p", "max_tokens", "seed", "endpoint")
    return {
        "model": model,
        **{key: said[key] for key in of_answers},
        "api": config.api if config.endpoint else None,
        "data": fingerprint(config),
        "template": config.data.template if config.data else config.reward.template,
        "prompt_column": config.data.prompt_column if config.data else None,
        **_of_prompts(config.data),
        "weights": None if config.endpoint else _weights(Path(model)),
    }


def _of_prompts(data: DataConfig | None) -> dict[str, Any]:
    """Return the keys of the prompt's format; None for a default, as in older directories."""
    keys = ("messages_column", "system", "chat_template", "template_arguments")
    fields = DataConfig.model_fields
    said = {key: getattr(data, key, None) for key in keys}
    return {key: None if of == fields[key].default else of for key, of in said.items()}


def _weights(model: Path) -> list[list[Any]]:
    """Return names, sizes and times of the model's files, which change when it is trained again."""
    found = [(file, file.stat()) for file in sorted(model.glob("*.safetensors"))]
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in found]
