"""python -m student_trainer.exam < ExamConfig as JSON: the program of `distill eval`.

Its only output is one JSON object: the table's rows, or `error`, with which it exits as told by the
fault. Progress goes to stderr. Imports torch only where a model is to run here.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from clients.config.exam import ExamConfig
from protos.errors import DistillError, ExitCode, InvalidInput
from protos.extras import install_command
from student_trainer.exam.answer_store import Answer, AnswerStore
from student_trainer.exam.asking import Refusals
from student_trainer.exam.questions import Question, fingerprint, load_questions
from student_trainer.exam.report import GradedAnswers, cells, columns_of, judge, save, summary
from student_trainer.parallel.launcher import end_with_parent
from student_trainer.rewards import make_rewards

_SECONDS_BETWEEN_LINES = 10.0


def main() -> int:
    end_with_parent()  # or it would hold the directory against the next one
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
    """The rows of all models. Raises DistillError; answers that came are kept."""
    out = Path(config.out)
    # Answers are judged for what they say, however long they are.
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
) -> list[list[Answer | None]]:
    """All answers of a model, None where it refused; asks for those that its directory does not
    have yet. Raises DistillError where it refuses everything.
    """
    model = config.models[name]
    with AnswerStore(Path(config.out) / name, _settings(config, model)) as store:
        every = [(question, n) for question in questions for n in range(config.samples)]
        missing = [(q, n) for q, n in every if (q.number, n) not in store]
        if missing:
            there = len(every) - len(missing)
            progress = _Progress(name, there, len(every))
            refusals = Refusals(answered=there > 0)

            def keep(answer: Answer) -> None:
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
            from student_trainer.exam.endpoint import Endpoint
        except ImportError:
            raise InvalidInput(
                "needs the package httpx, which is not installed",
                field="--endpoint",
                hint=install_command("rl"),
            ) from None

        return Endpoint(config, model)
    from student_trainer.exam.local_model import LocalModel

    return LocalModel(config, model)


def _settings(config: ExamConfig, model: str) -> dict[str, Any]:
    """What decides an answer. The number of prompts and of samples does not: more can be asked."""
    said = config.model_dump(mode="json")
    of_answers = ("temperature", "top_p", "max_tokens", "seed", "endpoint")
    return {
        "model": model,
        **{key: said[key] for key in of_answers},
        "api": config.api if config.endpoint else None,
        "data": fingerprint(config),
        "template": config.data.template if config.data else config.reward.template,
        "prompt_column": config.data.prompt_column if config.data else None,
        "weights": None if config.endpoint else _weights(Path(model)),
    }


def _weights(model: Path) -> list[list[Any]]:
    """Names, sizes and times of the model's files: another training leaves other ones."""
    found = [(file, file.stat()) for file in sorted(model.glob("*.safetensors"))]
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in found]


class _Progress:
    """A line now and then."""

    def __init__(self, name: str, there: int, total: int) -> None:
        self._name, self._done, self._total = name, there, total
        self._told = time.monotonic()
        self._say()

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._told >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._told = time.monotonic()
            self._say()

    def _say(self) -> None:
        print(f"{self._name}: {self._done} of {self._total} answers", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
