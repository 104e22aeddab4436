"""python -m teacher_service.capture.preview [--records N] < job: `distill preview` of a capture.

The records go through the reader of the capture. The program loads a tokenizer, and no model.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from clients.config.capture import CaptureData, CaptureJob
from clients.data.control_tokens import count_spelled_names
from clients.data.preview import (
    SHOWN,
    SURVEY,
    SURVEY_WITH_IMAGES,
    ModelInput,
    Preview,
    SurveyedRecord,
    build_preview,
    lost_in_row,
    token_texts,
)
from clients.data.prompt_format import check_chat_template, date_warning, template_text
from clients.data.tokens.answers import end_ids
from clients.preflight.limits import NO_LIMITS, Limits, fit_limits
from clients.preflight.teachers import ask_infos, contexts_of
from clients.runs.progress import print_reply
from clients.store.copies import files_on_disk
from protos.errors import InvalidInput
from teacher_service.capture.sequences import CaptureSequence, SequenceReader
from teacher_service.capture.tokenizing import load_tokenizer


def preview_of(
    job: CaptureJob, tokenizer: Any, shown: int = SHOWN, limits: Limits = NO_LIMITS
) -> Preview:
    """Return the preview of a capture. Raises a DistillError if its data cannot be read.

    `shown` is the number of records in the preview. `limits` are the values that the program chose
    for keys that the job does not set; `job` already has these values.
    """
    data, is_text = job.data, job.data.form == "text"
    template = template_text(tokenizer.chat_template)
    if not is_text:
        check_chat_template(data.prompt_format, template)
    reader = SequenceReader(data, tokenizer, job.method.max_tokens, 1, job.teacher.context)
    surveyed = (
        _survey_text(reader, tokenizer) if is_text else _survey_records(reader, data, tokenizer)
    )
    ends = end_ids(None, tokenizer)
    warning = date_warning(data.prompt_format, template)
    facts = [("learned tokens", "the tokens that the teacher scores and a student learns later")]
    if limits.values:
        facts.append(("values that the job does not set", str(limits)))
    return build_preview(
        job.method.type,
        surveyed,
        shown=shown,
        ends=dict(zip(ends, token_texts(tokenizer, ends), strict=True)),
        facts=facts,
        warnings=[warning] * (bool(warning) and not is_text),
        max_left_out=data.max_left_out,
        are_ended=not is_text,
    )


def _survey_text(reader: SequenceReader, tokenizer: Any) -> Iterator[SurveyedRecord]:
    for number, sequence in enumerate(islice(reader, SURVEY), 1):
        yield SurveyedRecord(f"piece {number} of the text", _inputs(sequence, tokenizer))


def _survey_records(
    reader: SequenceReader, data: CaptureData, tokenizer: Any
) -> Iterator[SurveyedRecord]:
    count = SURVEY_WITH_IMAGES if data.image_column else SURVEY
    for where, record in islice(reader.located_records(), count):
        empty, spelled = reader.empty, count_spelled_names(tokenizer)
        lost = lost_in_row(
            data.prompt_format, tokenizer, record, is_answered=data.form == "messages"
        )
        try:
            sequences = list(reader.read(iter([(where, record)])))
        except InvalidInput as error:
            yield SurveyedRecord(where, refused=str(error), lost=lost)
            continue
        left_out = "with nothing to score" if reader.empty > empty else "too long"
        yield SurveyedRecord(
            where,
            _inputs(sequences[0], tokenizer) if sequences else (),
            "" if sequences else left_out,
            lost=lost,
            spelled=tuple(count_spelled_names(tokenizer) - spelled),
        )


def _inputs(sequence: CaptureSequence, tokenizer: Any) -> tuple[ModelInput, ...]:
    student = ModelInput.from_start(tokenizer, sequence.token_ids, sequence.start)
    if not len(sequence.teacher_prompt):
        return (student,)
    return student, ModelInput.from_start(tokenizer, *sequence.teacher_input, "teacher")


def main() -> int:
    """Print the preview of the job on stdin as JSON, and return the exit code."""
    parser = argparse.ArgumentParser(prog="teacher_service.capture.preview", description=__doc__)
    parser.add_argument("--records", type=int, default=SHOWN)
    shown = parser.parse_args().records
    logging.basicConfig(level=logging.ERROR)

    def work() -> str:
        job = files_on_disk(CaptureJob.model_validate_json(sys.stdin.read()))
        limits = fit_limits(job, contexts_of(ask_infos(job)), remote=True)
        job = limits.apply(job)
        return preview_of(job, load_tokenizer(job), shown, limits).to_json()

    return print_reply(work)


if __name__ == "__main__":
    sys.exit(main())
