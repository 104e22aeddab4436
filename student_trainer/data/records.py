"""Reads and checks the records of a job's data before tokenization."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.config.tables.data import DataConfig
from clients.data.conversation import Conversation, require_question
from clients.data.images import image_file
from clients.data.records import images_of, text_of, weight_of
from protos.errors import InvalidInput
from student_trainer.data.images import Source


@dataclass(frozen=True)
class PromptRecord:
    """A record of the data before tokenization.

    - conversation: the messages; the last may be the assistant's answer.
    - text: the text of the prompt before the chat template is applied, for rewards.
    - answer: the reference answer, "" if there is none.
    - teacher: the name of the teacher of the record, "" if the job has only one teacher.
    - weight: the weight in the loss of the record's sequences.
    - fields: all columns of the record; empty without `RecordReader.with_fields`.
    - where: the file and row, for error messages.
    - images: the path of each image file, or the encoded image as bytes.
    """

    conversation: Conversation
    text: str
    answer: str
    teacher: str
    weight: float
    fields: Mapping[str, Any]
    where: str
    images: tuple[Source, ...] = ()


@dataclass(frozen=True)
class RecordReader:
    """Reads the data sets of one job.

    - teachers: the allowed teacher names; if empty, the column of teachers is not read.
    - with_fields: keep all columns.
    - needs_answers: the records must have an answer. A text prompt without an answer is refused. A
      conversation is cut after its last answer.
    - needs_questions: refuse a conversation that has no message before its last answer.
    - vision_teachers: names of the teachers that accept images.
    """

    data: DataConfig
    teachers: Collection[str] = ()
    with_fields: bool = False
    needs_answers: bool = False
    needs_questions: bool = True
    vision_teachers: Collection[str] = ()

    @property
    def columns(self) -> list[str]:
        """The names of the columns to read; empty if all columns are read."""
        if self.with_fields:
            return []
        columns = [*self.data.prompt_format.columns, self.data.answer_column]
        if self.teachers:
            columns.append(self.data.teacher_column)
        if self.data.weight_column is not None:
            columns.append(self.data.weight_column)
        return columns

    def build_record(self, record: Mapping[str, Any], where: str, folder: Path) -> PromptRecord:
        """Check a row of the data, and return it as a PromptRecord.

        `folder`: the folder of the data file, for relative image paths. Raises InvalidInput if the
        row cannot be used.
        """
        data, prompt_format = self.data, self.data.prompt_format
        conversation = prompt_format.conversation(record, where)
        if self.needs_answers and prompt_format.messages_column is not None:
            conversation = conversation.up_to_answer()
        # The encoder leaves out a conversation that lacks a required answer.
        if self.needs_questions and (conversation.messages or not self.needs_answers):
            require_question(conversation, where)
        teacher = (
            _read_teacher_name(record, data.teacher_column, self.teachers, where)
            if self.teachers
            else ""
        )
        images = self._image_sources(record, where, folder)
        if images and self.teachers and teacher not in self.vision_teachers:
            raise InvalidInput(
                f"{where} has images, but its teacher {teacher!r} does not read images",
                field="data.teacher_column",
                hint="name a teacher that reads images, or remove the images",
            )
        return PromptRecord(
            conversation,
            prompt_format.text(record, conversation),
            self._read_answer(record, conversation, where),
            teacher,
            1.0 if data.weight_column is None else weight_of(record, data.weight_column, where),
            self._select_fields(record, images),
            where,
            images,
        )

    def _select_fields(
        self, record: Mapping[str, Any], images: Sequence[Source]
    ) -> Mapping[str, Any]:
        """Return the columns that rewards receive, without the bytes of images."""
        if not self.with_fields:
            return {}
        if not any(isinstance(image, bytes) for image in images):
            return record
        return {name: value for name, value in record.items() if name != self.data.image_column}

    def _image_sources(
        self, record: Mapping[str, Any], where: str, folder: Path
    ) -> tuple[Source, ...]:
        """Return the images of a record. Relative paths start at `folder`."""
        column = self.data.image_column
        sources = () if column is None else images_of(record, column, where)
        return tuple(
            source if isinstance(source, bytes) else image_file(folder, source, where)
            for source in sources
        )

    def _read_answer(
        self, record: Mapping[str, Any], conversation: Conversation, where: str
    ) -> str:
        column = self.data.answer_column
        is_required = self.needs_answers and self.data.messages_column is None
        if is_required or record.get(column) is not None:
            return text_of(record, column, "data.answer_column", where)
        return conversation.answer


def _read_teacher_name(
    record: Mapping[str, Any], column: str, teachers: Collection[str], where: str
) -> str:
    name = text_of(record, column, "data.teacher_column", where)
    if name not in teachers:
        raise InvalidInput(
            f"{where} names the teacher {name!r}; the job has {', '.join(sorted(teachers))}",
            field="data.teacher_column",
            hint="add the teacher's address to [teachers], or correct the data",
        )
    return name
