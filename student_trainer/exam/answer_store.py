"""The answers of one model on disk, from which a killed evaluation can continue.

    answers.jsonl   first line: the settings that determine the answers; each other line: the
                    answers of one call of `add`

`add` returns after the operating system has received the line, so a kill of the process loses no
stored answer. Only one process can open the file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clients.runs.file_system import lock_file
from protos.errors import DistillError, InvalidInput, WrongState
from student_trainer.exam.questions import Question

log = logging.getLogger(__name__)

AnswerRequest = tuple[Question, int]  # a question, and the number of the answer to sample


@dataclass(frozen=True)
class StoredAnswer:
    """One answer to a question.

    - prompt: the number of the question.
    - sample: the number of the answer among the answers to this question.
    - text: the text of the answer.
    - tokens: the number of tokens of the answer.
    - truncated: whether the answer was cut at the maximum number of tokens.
    """

    prompt: int
    sample: int
    text: str
    tokens: int
    truncated: bool


class ExamStopped(Exception):
    """The evaluation ended because a stop was requested.

    The answers received until then are on disk.
    """


class AnswerStore:
    """The stored answers of one model, and the prompts that the model has refused.

    A context manager.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        on_answers: Callable[[Sequence[StoredAnswer]], None] = lambda answers: None,
    ) -> None:
        """Open the file answers.jsonl in `directory`, and read its answers.

        `settings`: the settings that determine the answers. `on_answers`: a function that gets the
        answers of each `add`, after they are stored. Raises InvalidInput if the file has other
        settings, and WrongState if another process has opened the file.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "answers.jsonl"
        self._on_answers = on_answers
        self._answers: dict[tuple[int, int], StoredAnswer] = {}
        self._refusals: dict[int, DistillError] = {}
        self._file = self._path.open("a+b", buffering=0)
        try:
            lock_file(self._file.fileno(), self._path, wait=False)
            self._read(settings)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise WrongState(
                    f"another evaluation is writing to {directory}",
                    hint="wait until that evaluation ends, or use another directory",
                ) from None
            raise

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, prompt: int, sample: int) -> StoredAnswer | None:
        """Return answer number `sample` to question number `prompt`; None if it is not stored."""
        return self._answers.get((prompt, sample))

    def add(self, *answers: StoredAnswer) -> None:
        """Store all of `answers` in one write, so that either all are stored or none.

        After the return, a kill of the process loses none of them.
        """
        self._write([asdict(answer) for answer in answers])
        self._answers |= {(answer.prompt, answer.sample): answer for answer in answers}
        self._on_answers(answers)

    @property
    def refused(self) -> int:
        """The number of prompts that the model has refused in this process."""
        return len(self._refusals)

    def is_refused(self, question: Question) -> bool:
        """Return whether the model has refused the prompt in this process."""
        return question.number in self._refusals

    def refuse(self, question: Question, error: DistillError) -> None:
        """Record that the model refused a prompt, for example because the prompt is too long.

        If the prompt has been refused before, the first error is kept.
        """
        self._refusals.setdefault(question.number, error)

    def require_answers(self, least_refusals: int = 1) -> None:
        """Raise the first refusal if the model has refused prompts and has given no answer at all.

        `least_refusals`: the number of refused prompts from which the error is raised.
        """
        if self.refused >= least_refusals and not self._answers:
            raise next(iter(self._refusals.values()))

    def warn_of_refusals(self, model: str) -> None:
        """Log a warning if the model has refused prompts."""
        if self._refusals:
            error = next(iter(self._refusals.values()))
            message = "%s refused %d prompts, which count as wrong; first: %s"
            log.warning(message, model, self.refused, error)

    def _write(self, content: object) -> None:
        line = json.dumps(content).encode() + b"\n"
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _read(self, settings: Mapping[str, Any]) -> None:
        self._file.seek(0)
        data = self._file.read()
        complete_bytes = data.rfind(b"\n") + 1  # the last line may be incomplete
        if complete_bytes < len(data):
            self._file.truncate(complete_bytes)
        header, *lines = data[:complete_bytes].split(b"\n")
        if not header:
            self._write(settings)
            return
        stored_settings = json.loads(header)
        for key, value in settings.items():
            if stored_settings.get(key) != value:
                raise InvalidInput(
                    f"{self._path.parent} holds answers for {key} = {stored_settings.get(key)},"
                    f" not {value}",
                    field="--out",
                    hint="use another directory, or the settings of these answers",
                )
        for line in filter(None, lines):
            for fields in json.loads(line):
                answer = StoredAnswer(**fields)
                self._answers[answer.prompt, answer.sample] = answer


def derive_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed for answer number `sample` to question number `prompt`.

    `seed`: the seed of the evaluation. The result is less than 2**31, because some inference
    servers accept only seeds that fit in a signed 32-bit integer.
    """
    return (seed * 1_000_003 + prompt * 8191 + sample) % (1 << 31)
