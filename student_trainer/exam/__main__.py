"""python -m student_trainer.exam < ExamConfig as JSON: the program of `distill eval`.

Prints one JSON object to stdout: the rows of the table, or `error` with the fields of the error.
Exits with the exit code of the error. Progress goes to stderr. Imports torch only if a model runs
in this process.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from clients.config.exam import ExamConfig
from clients.config.tables.data import DataConfig
from protos.errors import DistillError, ExitCode, InvalidInput
from protos.extras import install_command
from student_trainer.exam.answer_store import AnswerStore, StoredAnswer
from student_trainer.exam.asking import Refusals
from student_trainer.exam.questions import Question, fingerprint, load_questions
from student_trainer.exam.report import GradedAnswers, cells, columns_of, judge, save, summary
from student_trainer.parallel.launcher import end_with_parent
from student_trainer.rewards import make_rewards

_SECONDS_BETWEEN_LINES = 10.0


def main() -> int:
    """Run the evaluation that stdin describes, and return the exit code."""
    end_with_parent()  # otherwise it would keep the lock of the directory after its parent ended
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        rows = run(ExamConfig.model_validate_json(sys.stdin.read()))
    except DistillError as error:
        told = {
            "code": error.code.value,
            "message": error.message,
            "field": error.field,
            "hint": error.hint,
        }
        print(json.dumps({"error": told}))
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    columns = columns_of(rows)
    table = [cells(row, columns) for row in rows]
    print(json.dumps({"models": rows, "columns": columns, "table": table}))
    return int(ExitCode.OK)


def run(config: ExamConfig) -> list[dict[str, Any]]:
    """Let all models answer, score the answers, and return the rows of the table.

    Writes result.json and, for each model, its answers and judged.parquet into `config.out`. Raises
    a DistillError if the evaluation cannot finish; the answers so far stay on disk.
    """
    out = Path(config.out)
    # A length penalty is part of training, not of the quality of an answer.
    with make_rewards(config.reward.model_copy(update={"length": None})) as rewards:
        questions = load_questions(config)
        answered = {name: _answered(config, name, questions) for name in config.models}
        rows = []
        first: GradedAnswers | None = None
        for name, answers in answered.items():
            judged = judge(questions, answers, rewards)
            save(judged, out / name / "judged.parquet")
            rows.append(summary(name, judged, first))
            first = first or judged
    (out / "result.json").write_text(json.dumps({"models": rows}, indent=2) + "\n")
    return rows


def _answered(
    config: ExamConfig, name: str, questions: list[Question]
) -> list[list[StoredAnswer | None]]:
    """Return all answers of a model, requesting those that are not on disk yet.

    An answer is None if the model refused its prompt. Raises a DistillError if it refuses all.
    """
    model = config.models[name]
    with AnswerStore(Path(config.out) / name, _settings(config, model)) as store:
        every = [(question, n) for question in questions for n in range(config.samples)]
        missing = [(q, n) for q, n in every if (q.number, n) not in store]
        if missing:
            there = len(every) - len(missing)
            progress = _Progress(name, there, len(every))
            refusals = Refusals(answered=there > 0)

            def keep(answer: StoredAnswer) -> None:
                store.add(answer)
                refusals.answered = True
                progress.step()

            _examinee(config, model).answer(missing, keep, refusals)
            store.write_part()
            refusals.conclude(name)
        return [[store.get(q.number, n) for n in range(config.samples)] for q in questions]


def _examinee(config: ExamConfig, model: str) -> Any:
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

    return LocalModel(config, model)


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


class _Progress:
    """Prints a line of progress to stderr, at most one every 10 s."""

    def __init__(self, name: str, there: int, total: int) -> None:
        self._name, self._done, self._total = name, there, total
        self._printed = time.monotonic()
        self._say()

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._printed = time.monotonic()
            self._say()

    def _say(self) -> None:
        print(f"{self._name}: {self._done} of {self._total} answers", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
