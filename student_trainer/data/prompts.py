"""Loads the training and held-out prompts of a job, and selects the prompts of each step."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count as count_up
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from clients.config.tables.data import DataConfig
from clients.data.images import ImageReader
from clients.data.preview import SURVEY, SURVEY_WITH_IMAGES
from clients.data.prompt_format import (
    PromptFormat,
    check_chat_template,
    date_warning,
    template_text,
    warn_of_date,
)
from clients.data.records import DataSet, check_left_out
from clients.data.template_parts import TemplateParts
from clients.data.tokens.lower_bound import tokens_by_length
from clients.data.tokens.tokenizer import tokenizer_facts
from protos.errors import InvalidInput
from student_trainer.data.images import SequenceImages, with_images
from student_trainer.data.order import Indices, assign_sets, count_per_set, permutation
from student_trainer.data.record_table import (
    Encoder,
    OmissionCounter,
    RecordTable,
)
from student_trainer.data.records import PromptRecord, RecordReader

log = logging.getLogger(__name__)

_MAX_SKIP = 4096  # items that a step skips one by one
_CHUNK_ROWS = 1 << 16  # rows whose states are read at once

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that the student completes.

    - ids [T] int32: the token ids of the prompt.
    - answer: the reference answer, "" if there is none.
    - teacher: the name of the teacher of the prompt, "" if the job has only one teacher.
    - text: the text of the prompt before the chat template is applied, for rewards.
    - fields: the columns of the prompt's record, for rewards.
    - weight: the weight in the loss of the sequences sampled from the prompt.
    - images: the images whose tokens are in `ids`; None without images.
    """

    ids: NDArray[np.int32]
    answer: str
    teacher: str = ""
    text: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    images: SequenceImages | None = None


@dataclass(frozen=True)
class ModelIds:
    """The token ids for which a model has embeddings.

    - count: the model has the ids 0 to count - 1; None if the model has all ids.
    - extra_tokens: the tokens of the tokenizer with ids from `count` on, by id. Often these are
      added tokens that no text uses, such as [PAD].
    """

    count: int | None = None
    extra_tokens: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, count: int) -> ModelIds:
        """Return the ModelIds of a model that has `count` embeddings."""
        vocabulary = tokenizer.get_vocab()
        return cls(count, {i: token for token, i in vocabulary.items() if i >= count})

    @property
    def facts(self) -> tuple[object, ...]:
        """`count` and `extra_tokens` as JSON values."""
        return self.count, sorted(self.extra_tokens.items())

    def may_lack(self, record: PromptRecord) -> bool:
        """Return whether a text of the record contains a token that the model does not have."""
        if not self.extra_tokens:
            return False
        conversation = record.conversation
        texts = [record.answer, *map(str, conversation.messages), str(conversation.tools)]
        return any(token in text for token in self.extra_tokens.values() for text in texts)

    def require(self, ids: Sequence[int], where: str, field: str) -> None:
        """Raise InvalidInput if one of `ids` is not an id of the model.

        `where`: the row of the data, for the message. `field`: the job key of the error.
        """
        if self.count is None or not len(ids) or max(ids) < self.count:
            return
        missing = next(token_id for token_id in ids if token_id >= self.count)
        raise InvalidInput(
            f"{where} has the token {self.extra_tokens.get(missing, missing)!r} (id {missing}),"
            f" but the student has {self.count} ids",
            field=field,
            hint="remove the token from the row, or resize the student's embeddings to its"
            " tokenizer",
        )


ALL_IDS = ModelIds()


def encoding_facts(prompt_format: PromptFormat, tokenizer: Any) -> tuple[object, ...]:
    """Return the facts besides the keys of `data` that change the tokens of a record.

    These are the facts of the tokenizer and, if the chat template writes the date, the present
    date. All are JSON values.
    """
    today = date_warning(prompt_format, template_text(tokenizer.chat_template)) and time.strftime(
        "%Y-%m-%d"
    )
    return today, *tokenizer_facts(tokenizer)


class _PromptEncoder:
    """Converts records to prompts, and counts the prompts that are too long."""

    def __init__(
        self,
        form: PromptFormat,
        tokenizer: Any,
        max_tokens: int,
        reader: ImageReader | None,
        model_ids: ModelIds,
    ) -> None:
        """`reader` reads the images of the records; None without images."""
        self._prompt_format = form
        self._model_ids = model_ids
        self._tokenizer = tokenizer
        self.settings = ("prompt", max_tokens, *model_ids.facts, *encoding_facts(form, tokenizer))
        self._max_tokens = max_tokens
        self._parts = TemplateParts(form, tokenizer)
        self._reader = reader
        self._too_long = OmissionCounter(
            f"prompts longer than method.max_prompt_tokens = {max_tokens}"
        )
        self.omissions = (self._too_long,)

    def is_doubtful(self, record: PromptRecord) -> bool:
        """Return whether `encode` may raise InvalidInput for this record.

        This is the case if:

        - the question is empty,
        - a text may contain a token that the model does not have, or
        - the record has a kind of message part that no earlier record had. `encode` checks each new
          kind against the chat template.
        """
        return (
            not record.conversation.question.strip()
            or self._model_ids.may_lack(record)
            or self._parts.has_new(record.conversation.unanswered())
        )

    def encode(self, record: PromptRecord, field: str) -> Prompt | None:
        """Return the prompt of a record; None if it is too long.

        Raises InvalidInput, with `field`, if the record cannot be used, such as a prompt without
        tokens.
        """
        conversation = record.conversation.unanswered()
        if least_tokens := tokens_by_length(conversation.characters, self._max_tokens):
            self._too_long.add(least_tokens)
            return None
        self._parts.check(conversation, record.where)
        ids = self._prompt_format.ids(self._tokenizer, conversation, record.where)
        require_tokens(ids, record.where, field)
        self._model_ids.require(ids, record.where, field)
        tokens, images = np.array(ids, dtype=np.int32), None
        if self._reader is not None:
            tokens, images = with_images(tokens, record.images, self._reader, record.where)
        if len(tokens) > self._max_tokens:
            self._too_long.add(len(tokens))
            return None
        return Prompt(
            tokens,
            record.answer,
            record.teacher,
            record.text,
            record.fields,
            record.weight,
            images,
        )

    def no_items_error(self, field: str) -> InvalidInput:
        """Return the error for data whose prompts are all too long."""
        return no_items_error(field, "prompt", self._too_long, "method.max_prompt_tokens")


def no_items_error(field: str, item: str, too_long: OmissionCounter, key: str) -> InvalidInput:
    """Return the error for data without a usable record.

    - item: the kind of item in one word, such as "prompt".
    - too_long: the counter of the records that are longer than the limit.
    - key: the job key that sets this limit.
    """
    if not too_long.count:
        return InvalidInput(
            f"the data has no {item} that can be used", field=field, hint="add records"
        )
    return InvalidInput(
        f"all {item}s are left out: {too_long.count} {too_long.description}",
        field=field,
        hint=f"the shortest has {too_long.shortest} tokens: set {key} to at least that, or more",
    )


def require_tokens(ids: Sequence[int], where: str, field: str) -> None:
    """Raise InvalidInput, with `field`, if `ids` is empty. `where`: the row of the prompt."""
    if not ids:
        raise InvalidInput(
            f"the prompt of {where} has no tokens",
            field=field,
            hint="remove the row, or add a prompt: the model needs at least one token",
        )


class ItemsOfSteps(Protocol[Item]):
    """Selects the training items of each step. The items depend only on the step.

    epoch_size: the number of items in one epoch; see the function `epoch_size`.
    """

    epoch_size: int

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1); earlier calls do not change the result."""


class PromptSet(Generic[Item]):
    """Prompts or other items, in an order fixed by the seed; each epoch has a new permutation.

    A record is tokenized when a step first needs it. Some records have no item, such as a prompt
    that is too long. They are skipped in every epoch, and the next records replace them. The table
    stores which tokenized records are skipped, so selecting the items of a late step takes no
    longer than those of an early step.
    """

    def __init__(self, table: RecordTable[Item], rows: Indices | None, seed: int) -> None:
        """`rows`: the row numbers of `table` that belong to the set; None: all."""
        self._table = table
        self._rows = rows
        self._size = len(table) if rows is None else len(rows)
        self._seed = seed
        self.epoch_size = 0
        self._next_number = 0
        self._stream = self._iterate_from(0)

    def has_items(self) -> bool:
        """Return whether at least one record has an item. Do not use a set without items."""
        return any(self._table.is_used(self._row(index)) for index in self._order(0))

    def _order(self, epoch: int) -> Indices:
        """Return the order of an epoch, as indices (from 0) within the set."""
        return permutation(self._size, self._seed, epoch, self._table.directory)

    def _row(self, index: int) -> int:
        """Return the row number in the table of the record with this index (from 0) in the set."""
        return int(index if self._rows is None else self._rows[index])

    def _states(self, indices: Indices) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two masks: which records have an item, and for which records this is known."""
        return self._table.states_of(indices if self._rows is None else self._rows[indices])

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1); earlier calls do not change the result.

        The number of skipped records before this step must be known. Records of earlier steps that
        were never tokenized with these settings are therefore tokenized first.
        """
        return self.items_from((step - 1) * count, count)

    def items_from(self, first: int, count: int) -> list[Item]:
        """Return `count` items, starting with the item of number `first` (from 0)."""
        skipped_count = first - self._next_number
        # A short skip advances the stream; a new stream skips records and full epochs at once.
        if not 0 <= skipped_count < _MAX_SKIP:
            self._stream, skipped_count = self._iterate_from(first), 0
        self._next_number = first + count
        items = list[Item]()
        for row in islice(self._stream, skipped_count, skipped_count + count):
            item = self._table.item(row)
            assert item is not None, "_iterate_from yields only rows with items"
            items.append(item)
        return items

    def _iterate_from(self, first: int) -> Iterator[int]:
        """Yield the table rows with an item, epoch after epoch, starting with item number `first`.

        The set must have an item. Otherwise the iteration does not end.
        """
        epoch = 0
        if first and (used_count := self._count_used()):
            epoch, first = divmod(first, used_count)
        for later_epoch in count_up(epoch):
            order = self._order(later_epoch)
            position = 0
            if first:
                position, passed = self._skip_known(order, first)
                first -= passed
            for index in range(position, self._size):
                row = self._row(order[index])
                if not self._table.is_used(row):
                    continue
                if first:
                    first -= 1
                else:
                    yield row

    def _count_used(self) -> int:
        """Return the number of records with an item; 0 if the state of a record is not known."""
        count = 0
        for start in range(0, self._size, _CHUNK_ROWS):
            is_used, is_known = self._states(np.arange(start, min(start + _CHUNK_ROWS, self._size)))
            if not is_known.all():
                return 0
            count += int(is_used.sum())
        return count

    def _skip_known(self, order: Indices, first: int) -> tuple[int, int]:
        """Return how many records of an epoch to skip, and how many of these have an item.

        At most `first` of the skipped records have an item. Records are skipped up to the first one
        for which it is not known whether it has an item.
        """
        passed = 0
        for start in range(0, self._size, _CHUNK_ROWS):
            is_used, is_known = self._states(order[start : start + _CHUNK_ROWS])
            known_count = len(is_known) if is_known.all() else int(is_known.argmin())
            used_counts = passed + np.cumsum(is_used[:known_count])
            position = int(np.searchsorted(used_counts, first, side="left"))
            if position < known_count:
                return start + position + 1, first
            passed = int(used_counts[-1]) if known_count else passed
            if known_count < len(is_known):
                position = start + known_count
                log.info(
                    "tokenizing %s records of earlier steps, because it is not known here which of"
                    " them are left out",
                    f"{min(first - passed, self._size - position):,}",
                )
                return position, passed
        return self._size, passed


class MixedSets(Generic[Item]):
    """Several prompt sets that share the items of every step in fixed proportions.

    In every range of steps, the number of items of each set is as close to its share as integers
    allow (`data/order.py`).
    """

    def __init__(self, sets: Sequence[PromptSet[Item]], shares: Sequence[Fraction]) -> None:
        """`shares`: the share of each set, positive, with the sum 1."""
        self._sets = sets
        self._shares = shares
        self.epoch_size = 0

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1); earlier calls do not change the result."""
        first = (step - 1) * count
        sources = assign_sets(self._shares, first, count)
        items_of_sets = [
            iter(item_set.items_from(set_first, sources.count(number)))
            for number, (item_set, set_first) in enumerate(
                zip(self._sets, count_per_set(self._shares, first), strict=True)
            )
        ]
        return [next(items_of_sets[number]) for number in sources]


def prompt_encoding(
    data: DataConfig,
    tokenizer: Any,
    *,
    max_tokens: int,
    teachers: Collection[str] = (),
    with_fields: bool = False,
    reader: ImageReader | None = None,
    vision_teachers: Collection[str] = (),
    model_ids: ModelIds = ALL_IDS,
) -> tuple[RecordReader, Encoder[Prompt]]:
    """Return a reader of the job's records, and an encoder that converts records to prompts.

    - max_tokens: prompts with more tokens are skipped and counted.
    - teachers: the names of the job's teachers; empty if it has one.
    - with_fields: keep all columns of the records.
    - reader: reads the images, if the job has images.
    - vision_teachers: the names of the teachers that accept images.
    - model_ids: the token ids of the model.

    Raises InvalidInput if the chat template does not suit the prompts.
    """
    check_chat_template(data.prompt_format, template_text(tokenizer.chat_template))
    encoder = _PromptEncoder(data.prompt_format, tokenizer, max_tokens, reader, model_ids)
    return RecordReader(data, teachers, with_fields, vision_teachers=vision_teachers), encoder


def load_prompts(
    data: DataConfig, tokenizer: Any, *, held_out: int, seed: int, **options: Any
) -> tuple[ItemsOfSteps[Prompt], list[Prompt]]:
    """Return the training prompts and the held-out prompts. `options`: see `prompt_encoding`.

    Raises InvalidInput for the reasons of `load_items` and `prompt_encoding`, and if a prompt:

    - has no tokens,
    - has a token that is not in `model_ids`, or
    - names a teacher that is not in `teachers`, if `teachers` is not empty.
    """
    warn_of_date(data.prompt_format, template_text(tokenizer.chat_template))
    return load_items(*prompt_encoding(data, tokenizer, **options), held_out=held_out, seed=seed)


def data_sets(reader: RecordReader) -> list[tuple[RecordReader, DataSet]]:
    """Return the data sets of data.path, data.mix and data.eval_path, each with its reader.

    The reader of data.eval_path ignores the column of weights.
    """
    data = reader.data
    sets = [(reader, DataSet(data.path, data.name, data.split))]
    sets += [
        (reader, DataSet(mixed.path, mixed.name, mixed.split, f"data.mix.{number}.path"))
        for number, mixed in enumerate(data.mix)
    ]
    if data.eval_path:
        unweighted = replace(reader, data=data.model_copy(update={"weight_column": None}))
        sets.append((unweighted, DataSet(data.eval_path, data.name, data.split, "data.eval_path")))
    return sets


def surveyed_rows(
    data: DataConfig, count: int, seed: int, directory: Path | None = None
) -> list[int]:
    """Return the row numbers (from 0) that are checked to decide whether a data set can be used.

    `count` is the number of rows of the data set. The result is all rows if there are at most
    SURVEY, otherwise a sample of SURVEY rows in ascending order; for data with images, the limit is
    SURVEY_WITH_IMAGES. The preview checks the same rows. `directory`: see `permutation`.
    """
    limit = SURVEY_WITH_IMAGES if data.image_column else SURVEY
    return sorted(permutation(count, seed, -2, directory)[:limit].tolist())


def epoch_size(data: DataConfig, used: int, held_out: int) -> int:
    """Return the number of items of all data sets in one pass over the records of `data.path`.

    - used: the number of records of `data.path` with an item, see `estimate_used`.
    - held_out: the number of items of the evaluation.

    With `data.mix`, the result includes the items of the other data sets in these steps.
    """
    return round(max(used - (0 if data.eval_path else held_out), 1) / data.shares[0])


def load_items(
    reader: RecordReader, encoder: Encoder[Item], *, held_out: int, seed: int
) -> tuple[ItemsOfSteps[Item], list[Item]]:
    """Return the training items and the held-out items.

    The held-out items come from `data.eval_path` if this key is set, otherwise from `data.path`.
    The training items come from `data.path`, mixed with items from `data.mix`. All records are read
    and checked. Only the held-out records, the `surveyed_rows` and the doubtful records are
    tokenized.

    Raises InvalidInput if:

    - a file or column is missing,
    - a record cannot be used,
    - no record is left, or
    - the share of skipped records among the `surveyed_rows` of a data set exceeds
      `data.max_left_out`.
    """
    data = reader.data
    tables = {
        data_set.field: _open_table(data_set, source_reader, encoder, seed)
        for source_reader, data_set in data_sets(reader)
    }
    field = "data.eval_path" if data.eval_path else "data.path"
    candidates = tables[field]
    rows_of: dict[str, Indices | None] = dict.fromkeys(name for name in tables if name != field)
    order = permutation(len(candidates), seed, -1, candidates.directory)
    held_out_items: list[Item] = []
    encoded_count = 0
    while encoded_count < len(order) and len(held_out_items) < held_out:
        item = candidates.item(int(order[encoded_count]))
        held_out_items += [] if item is None else [item]
        encoded_count += 1
    if not held_out_items:
        raise candidates.no_items_error()
    if data.eval_path is None and encoded_count == len(order):
        max_prompts = len(held_out_items) - 1
        raise InvalidInput(
            f"eval.prompts = {held_out} leaves no training record: the data have {len(order)}",
            field="eval.prompts",
            hint=f"set eval.prompts to at most {max_prompts}" if max_prompts else "add records",
        )
    if not data.eval_path:
        rows_of = {field: order[encoded_count:], **rows_of}
    sets = [PromptSet(tables[name], rows, seed) for name, rows in rows_of.items()]
    for name, item_set in zip(rows_of, sets, strict=True):
        if not item_set.has_items():
            raise tables[name].no_items_error()
    items = MixedSets(sets, data.shares) if data.mix else sets[0]
    items.epoch_size = epoch_size(data, tables["data.path"].used_count, len(held_out_items))
    return items, held_out_items


def _open_table(
    data_set: DataSet, reader: RecordReader, encoder: Encoder[Item], seed: int
) -> RecordTable[Item]:
    """Check the records of a data set, and return its table.

    Raises InvalidInput for the reasons that `load_items` lists.
    """
    table = RecordTable(data_set, reader, encoder, seed)
    rows = surveyed_rows(reader.data, len(table), seed, table.directory)
    reasons = table.check(rows)
    if reasons.total() == len(table):
        raise table.no_items_error()
    check_left_out(reasons, len(rows), reader.data.max_left_out, data_set.field)
    return table
