"""python -m student_trainer.preview [--records N] < job as JSON: the program of `distill preview`.

Records are processed by the functions that training uses: `data/examples.py`, `data/prompts.py`,
the readers of stores, and the prompts of teachers and anchors. The program loads tokenizers, but no
model.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from clients.config.kinds import AnyTraining, parse_job
from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.config.tables.job import TrainingJob
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
    messages_of_others,
    token_texts,
)
from clients.data.prompt_format import date_warning, template_text
from clients.data.tokens.answers import end_ids
from clients.data.tokens.tokenizer import default_template_in
from clients.preflight.limits import NO_LIMITS, Limits, fit_limits
from clients.preflight.teachers import ask_infos, contexts_of, services_of
from clients.runs.progress import print_reply
from clients.store.copies import files_on_disk
from clients.store.record_cache import open_records
from protos.errors import DistillError, InvalidInput
from student_trainer.cross_tokenizer.store import open_cross_tokenizer_store
from student_trainer.data.captured_stores import open_stores
from student_trainer.data.examples import example_encoding
from student_trainer.data.prompts import (
    ModelIds,
    Prompt,
    data_sets,
    epoch_size,
    prompt_encoding,
    surveyed_rows,
)
from student_trainer.data.record_table import Encoder, encode_or_omit, estimate_used
from student_trainer.data.records import RecordReader
from student_trainer.data.sequence import Rollout, TokenSequence
from student_trainer.loop.optimizer import schedule_warning
from student_trainer.methods.offline import choose_reader, split
from student_trainer.methods.rl_prompts import context_prompt, load_rl_prompts
from student_trainer.model.loading import (
    load_config,
    load_generation_config,
    load_image_reader,
    load_tokenizer,
)
from student_trainer.run.chat_templates import choose_chat_template, template_warnings
from student_trainer.teachers.teacher_input import teacher_prompt

Item = TypeVar("Item")
# Returns what each model reads of a prompt or an example.
ReadInputs = Callable[[Item], tuple[ModelInput, ...]]


def preview_with_teachers(config: AnyTraining, shown: int = SHOWN) -> Preview:
    """Return the preview of a job that has not started yet.

    The teachers that answer now give the limits and chat templates. Raises the same errors as
    `preview_of`, and a DistillError if the job selects a chat template that the teachers do not
    have.
    """
    infos = ask_infos(config)
    limits = fit_limits(config, contexts_of(infos), remote=True)
    config = limits.apply(config)
    tokenizer, warnings, has_all = None, None, len(infos) == len(services_of(config))
    if infos and has_all:
        tokenizer = load_tokenizer(config.student)
        warnings = choose_chat_template(config, tokenizer, infos)
    preview = preview_of(config, shown, tokenizer, warnings, limits)
    if not has_all:
        fact = ("teacher", "does not answer now, so its limits and chat template are not known")
        preview = replace(preview, facts=(*preview.facts, fact))
    return preview


def preview_of(
    config: AnyTraining,
    shown: int = SHOWN,
    tokenizer: Any = None,
    warnings: Sequence[str] | None = None,
    limits: Limits = NO_LIMITS,
) -> Preview:
    """Return the preview of a job.

    - shown: the number of records to show.
    - tokenizer: the student's tokenizer; if the job selects the teacher's chat template, with this
      template. None: load the student's tokenizer with its own template, and add a warning if the
      job selects the teacher's template.
    - warnings: the result of `choose_chat_template`. None: compare the student's template with that
      of a teacher whose model is in a local directory.
    - limits: the values that the job does not set; they are already applied to `config`.

    Raises a DistillError if the data, the chat template or the tokenizer of the job cannot be used.
    """
    data, has_own_template = config.data, tokenizer is None
    if tokenizer is None:
        tokenizer = load_tokenizer(config.student)
    if warnings is None:
        warnings = template_warnings(config, tokenizer, _teacher_templates(config))
    if has_own_template and config.student.chat_template == "teacher":
        warnings = [
            "prompts are in the student's own chat template: that of the teacher is known when"
            " the job starts, and the preview in its run directory has it"
        ]
    surveyed = list(_survey(config, tokenizer))
    ends = end_ids(load_generation_config(config.student), tokenizer)
    facts = [("student model", config.student.model)]
    if limits.values:
        facts.append(("values that the job does not set", str(limits)))
    if config.samples:
        facts.append(("sampled", f"at most {config.method.max_new_tokens} tokens an answer"))
    steps = config.max_steps
    if config.epochs is not None and not steps:
        size = _epoch_size(config, surveyed)
        steps = config.count_steps(size)
        facts.append(("steps", f"{steps:,}: {config.describe_epochs(size)}"))
    warnings = [*warnings, schedule_warning(config.train, steps)]
    if data is not None:
        warnings.append(date_warning(data.prompt_format, template_text(tokenizer.chat_template)))
    return build_preview(
        config.method.type,
        surveyed,
        shown=shown,
        ends=dict(zip(ends, token_texts(tokenizer, ends), strict=True)),
        facts=facts,
        warnings=[warning for warning in warnings if warning],
        max_left_out=getattr(data, "max_left_out", 1.0),
    )


def _epoch_size(config: AnyTraining, surveyed: Sequence[SurveyedRecord]) -> int:
    """Return the number of records or stored sequences that one epoch of the job uses."""
    if config.stores:
        return surveyed[0].records
    assert isinstance(config.data, DataConfig), "validation requires data"
    own = [record for record in surveyed if record.data_set == "data.path"]
    left_out = sum(bool(record.left_out) for record in own)
    used = estimate_used(own[0].records if own else 0, len(own), left_out)
    return epoch_size(config.data, used, config.eval.prompts)


def _teacher_templates(config: AnyTraining) -> Mapping[str, str | None]:
    """Return the chat template of the teacher that the job starts from a local directory, by its
    label.

    Returns {} if the job starts no such teacher.
    """
    model = config.teacher_link.model if config.teacher_link is not None else None
    if model is None or not Path(model).is_dir():
        return {}
    return {"teacher": default_template_in(Path(model))}


def _survey(config: AnyTraining, tokenizer: Any) -> Iterator[SurveyedRecord]:
    ids = ModelIds.of_tokenizer(tokenizer, load_config(config.student).get_text_config().vocab_size)
    if isinstance(config, OfflineJob):
        return _survey_store(config, tokenizer)
    if isinstance(config, SFTJob):
        examples = example_encoding(config, tokenizer, ids)
        return _survey_data(
            *examples,
            tokenizer,
            lambda item: (_sequence_input(item.sequence, tokenizer),),
            config.seed,
        )
    read_inputs = _prompt_reading(config, tokenizer)
    if config.data is None:
        prompts = load_rl_prompts(config, tokenizer, model_ids=ids).training.of_step(1, 32)
        return (
            SurveyedRecord(f"task {number}", read_inputs(prompt))
            for number, prompt in enumerate(prompts, 1)
        )
    teachers = tuple(name for name in config.teacher_addresses if name)
    encoding = prompt_encoding(
        config.data,
        tokenizer,
        max_tokens=config.method.max_prompt_tokens,
        teachers=teachers,
        vision_teachers=teachers,
        with_fields=config.reads_all_columns,
        reader=load_image_reader(config.student) if config.data.image_column else None,
        model_ids=ids,
    )
    return _survey_data(*encoding, tokenizer, read_inputs, config.seed)


def _survey_data(
    reader: RecordReader,
    encoder: Encoder[Item],
    tokenizer: Any,
    read_inputs: ReadInputs[Item],
    seed: int,
) -> Iterator[SurveyedRecord]:
    """Yield a sample of the records of each data set, as the job would read them.

    The sample is the same as the one from which the job decides whether it accepts the data set.
    """
    for source_reader, data_set in data_sets(reader):
        data, folder = source_reader.data, Path(data_set.path).parent
        records = open_records(data_set, source_reader.columns)
        for number in surveyed_rows(data, len(records), seed):
            where, row = records[number]
            left_out, refused, inputs = "", "", tuple[ModelInput, ...]()
            spelled = count_spelled_names(tokenizer)
            try:
                record = source_reader.build_record(row, where, folder)
                item, left_out = encode_or_omit(encoder, record, data_set.field)
                inputs = () if item is None else read_inputs(item)
            except InvalidInput as error:
                refused = str(error)
            spelled = count_spelled_names(tokenizer) - spelled
            is_answered = reader.needs_answers and data.messages_column is not None
            lost = lost_in_row(data.prompt_format, tokenizer, row, is_answered=is_answered)
            others = messages_of_others(data.prompt_format, row) if inputs else ()
            yield SurveyedRecord(
                *(where, inputs, left_out, refused, lost, others, tuple(spelled)),
                data_set=data_set.field,
                records=len(records),
            )


def _sequence_input(sequence: TokenSequence, tokenizer: Any) -> ModelInput:
    learned = np.zeros(len(sequence.token_ids), dtype=bool)
    learned[sequence.places.numpy()] = True
    return ModelInput(tokenizer, sequence.token_ids.numpy(), learned)


def _prompt_reading(config: OnPolicyJob | RLJob, tokenizer: Any) -> ReadInputs[Prompt]:
    """Return a function from a prompt to the inputs of all models that read it.

    The models are the student and, if they read other ids than the student, the teacher and the
    anchor.
    """
    readers: list[tuple[str, Any, Callable[[Rollout], Tensor]]] = []
    teacher = config.teacher
    if teacher is not None and teacher.tokenizer != "same":
        # With "auto" the service names its tokenizer, unless the job starts the teacher.
        if name := teacher.model if teacher.tokenizer == "auto" else teacher.tokenizer:
            teacher_tokenizer = load_tokenizer(StudentConfig(model=name))
            prompt = teacher_prompt(config, teacher_tokenizer)
            readers.append(("teacher", teacher_tokenizer, prompt))
    elif teacher is not None and config.has_other_teacher_prompt:
        readers.append(("teacher", tokenizer, teacher_prompt(config, tokenizer)))
    if anchor_prompt := context_prompt(config, tokenizer, None):
        readers.append(("anchor", tokenizer, anchor_prompt))
    sampled = f"the student samples at most {config.method.max_new_tokens} tokens here"

    def read_inputs(prompt: Prompt) -> tuple[ModelInput, ...]:
        rollout = Rollout(
            torch.from_numpy(prompt.ids).long(),
            len(prompt.ids),
            head_ids=torch.empty(0, 0),
            token_logprobs=torch.empty(0),
            truncated=True,
            answer=prompt.answer,
            fields=prompt.fields,
            text=prompt.text,
        )
        all_ids = [("student", tokenizer, rollout.token_ids)]
        all_ids += [(name, words, read_prompt(rollout)) for name, words, read_prompt in readers]
        return tuple(
            ModelInput(words, ids.numpy(), np.zeros(len(ids), dtype=bool), name, sampled)
            for name, words, ids in all_ids
        )

    return read_inputs


def _survey_store(config: OfflineJob, tokenizer: Any) -> Iterator[SurveyedRecord]:
    """Yield the first sequences of a store, in the form that the student reads."""
    stores = open_stores(config)
    store = stores.training
    longest = getattr(
        load_config(config.student).get_text_config(), "max_position_embeddings", None
    )
    other_store = open_cross_tokenizer_store(config, stores, tokenizer, longest)
    images = load_image_reader(config.student, "data.path") if store.has_images else None
    read = choose_reader(config, other_store, images)
    count = SURVEY if images is None else SURVEY_WITH_IMAGES
    trained_count = 0 if config.epochs is None else len(split(config, stores)[0])
    for index in range(min(count, len(store.data))):
        where = f"sequence {index} of {store.path}"
        try:
            sequence = read(store.data, index).sequence
        except DistillError as error:
            yield SurveyedRecord(where, refused=str(error), records=trained_count)
        else:
            inputs = (_sequence_input(sequence, tokenizer),)
            yield SurveyedRecord(where, inputs, records=trained_count)


def main() -> int:
    """Print the preview of the job on stdin as JSON, and return the exit code."""
    parser = argparse.ArgumentParser(prog="student_trainer.preview", description=__doc__)
    parser.add_argument("--records", type=int, default=SHOWN)
    shown = parser.parse_args().records
    logging.basicConfig(level=logging.ERROR)

    def work() -> str:
        config = parse_job(sys.stdin.read())
        assert isinstance(config, TrainingJob), "distill preview selects the program"
        return preview_with_teachers(files_on_disk(config), shown).to_json()

    return print_reply(work)


if __name__ == "__main__":
    sys.exit(main())
