"""The prompts of a job: training and held-out prompts, and the prompts of each step."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count as count_up
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from clients.config.tables.data import DataConfig
from clients.data.images import ImageReader
from clients.data.preview import SURVEY, SURVEY_WITH_IMAGES
from clients.data.prompt_format import (
    PromptFormat,
    check_chat_template,
    template_text,
    warn_of_date,
)
from clients.data.records import DataSet, check_left_out
from clients.data.template_parts import TemplateParts
from protos.errors import InvalidInput
from student_trainer.data.images import SequenceImages, with_images
from student_trainer.data.order import assign_sets, count_per_set, permutation
from student_trainer.data.records import PromptRecord, RecordReader

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Encoded = TypeVar("Encoded", covariant=True)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that the student completes.

    ids [T] int32: its token ids. answer: the reference answer, "" if there is none. teacher: the
    name of its teacher, "" if the job has one. text: the prompt before the template, for rewards.
    fields: the columns of its record, for rewards. weight: of its sequences in the loss. images:
    the images whose tokens are in `ids`; None without images.
    """

    ids: NDArray[np.int32]
    answer: str
    teacher: str = ""
    text: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    images: SequenceImages | None = None


class OmissionCounter:
    """Counts the records skipped for one reason, and logs the count at 1, 2, 4, 8, ...

    shortest: tokens of the shortest one; 0: it has none, or none is counted.
    """

    def __init__(self, description: str) -> None:
        """`description`: the records, for the message, such as "prompts that are too long"."""
        self.description = description
        self.count = 0
        self.shortest = 0

    def add(self, tokens: int = 0) -> None:
        """Count one record of `tokens` tokens."""
        self.shortest = min(self.shortest or tokens, tokens)
        self.count += 1
        if self.count & (self.count - 1) == 0:
            log.warning("left out so far: %d %s", self.count, self.description)


class Encoder(Protocol[Encoded]):
    """Converts records to the training items of a job, such as prompts."""

    @property
    def omissions(self) -> Sequence[OmissionCounter]:
        """The counts of the records without an item, by reason."""

    def is_doubtful(self, record: PromptRecord) -> bool:
        """Return whether `encode` might refuse the record. Such records are encoded before
        training.
        """

    def encode(self, record: PromptRecord, field: str) -> Encoded | None:
        """Return the item of a record; None if the record is skipped.

        Raises InvalidInput, naming `field`, if the record cannot be used.
        """

    def no_items_error(self, field: str) -> InvalidInput:
        """Return the error for data whose records are all left out."""


@dataclass(frozen=True)
class ModelIds:
    """The token ids that a model has embeddings for: 0 to count - 1; None: all.

    extra_tokens: tokens of the tokenizer with higher ids, by id. These are often added tokens that
    no text uses, such as [PAD].
    """

    count: int | None = None
    extra_tokens: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, count: int) -> ModelIds:
        """Return the ids of a model with `count` embeddings."""
        vocabulary = tokenizer.get_vocab()
        return cls(count, {i: token for token, i in vocabulary.items() if i >= count})

    def may_lack(self, record: PromptRecord) -> bool:
        """Return whether the texts of a record name a token that the model does not have."""
        if not self.extra_tokens:
            return False
        conversation = record.conversation
        texts = [record.answer, *map(str, conversation.messages), str(conversation.tools)]
        return any(token in text for token in self.extra_tokens.values() for text in texts)

    def require(self, ids: Sequence[int], where: str, field: str) -> None:
        """Raise InvalidInput, naming `field` and the record `where`, if the model lacks an id."""
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


class _PromptEncoder:
    """Converts records to prompts, and counts those that are too long."""

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
        self._max_tokens = max_tokens
        self._parts = TemplateParts(form, tokenizer)
        self._reader = reader
        self._too_long = OmissionCounter(
            f"prompts longer than method.max_prompt_tokens = {max_tokens}"
        )
        self.omissions = (self._too_long,)

    def is_doubtful(self, record: PromptRecord) -> bool:
        """Return whether the prompt may have no tokens, or parts that cannot be used."""
        return (
            not record.conversation.question.strip()
            or self._model_ids.may_lack(record)
            or self._parts.has_new(record.conversation.unanswered())
        )

    def encode(self, record: PromptRecord, field: str) -> Prompt | None:
        """Return the prompt of a record; None if it is too long.

        Raises InvalidInput, naming `field`, if the prompt has no tokens.
        """
        conversation = record.conversation.unanswered()
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
    """Return the error for data of which every record is left out, `too_long` ones by `key`.

    `item`: what the records are, in one word.
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
    """Raise InvalidInput, naming `field`, if the prompt at `where` has no tokens."""
    if not ids:
        raise InvalidInput(
            f"the prompt of {where} has no tokens",
            field=field,
            hint="remove the row, or add a prompt: the model needs at least one token",
        )


class ItemsOfSteps(Protocol[Item]):
    """Returns the items of each step, a pure function of the step."""

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1), independent of earlier calls."""


class PromptSet(Generic[Item]):
    """Prompts or other items, in an order fixed by the seed; each epoch has a new permutation.

    A record is tokenized when a step first needs it. Records without an item, such as long records,
    are skipped in every epoch, and the next records take their place.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        encode: Callable[[PromptRecord], Item | None],
        seed: int,
    ) -> None:
        """`encode`: returns the item of a record; None if the record is skipped."""
        self._records = records
        self._encode = encode
        self._seed = seed
        self._prompts: dict[int, Item | None] = {}  # by the index of the record
        self._next_number = 0
        self._stream = self._iterate_from(0)

    def has_items(self) -> bool:
        """Return whether a record has an item, which is encoded then; only then use the set."""
        order = permutation(len(self._records), self._seed, 0)
        return any(self._encode_prompt(int(index)) is not None for index in order)

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1), independent of earlier calls.

        Also tokenizes the records of all earlier steps, because some may be left out.
        """
        return self.items_from((step - 1) * count, count)

    def items_from(self, first: int, count: int) -> list[Item]:
        """Return `count` items from number `first` (from 0) on, as `of_step` does."""
        skipped_count = first - self._next_number
        # A skip within an epoch advances the stream; a new stream skips full epochs at once.
        if not 0 <= skipped_count < len(self._records):
            self._stream, skipped_count = self._iterate_from(first), 0
        self._next_number = first + count
        return list(islice(self._stream, skipped_count, skipped_count + count))

    def _iterate_from(self, first: int) -> Iterator[Item]:
        """Yield the items of all epochs from number `first` on; the set must not be empty."""
        for epoch in count_up():
            if len(self._prompts) == len(self._records):
                usable_count = sum(prompt is not None for prompt in self._prompts.values())
                if first >= usable_count:
                    first -= usable_count
                    continue
            for index in permutation(len(self._records), self._seed, epoch):
                prompt = self._encode_prompt(int(index))
                if prompt is None:
                    continue
                if first:
                    first -= 1
                else:
                    yield prompt

    def _encode_prompt(self, index: int) -> Item | None:
        if index not in self._prompts:
            self._prompts[index] = self._encode(self._records[index])
        return self._prompts[index]


class MixedSets(Generic[Item]):
    """Several sets; each has its share of the items of every step.

    Shares are met as closely as integers allow, over any range of steps (`data/order.py`).
    """

    def __init__(self, sets: Sequence[PromptSet[Item]], shares: Sequence[Fraction]) -> None:
        """`shares` has the share of each set; the shares are positive and have the sum 1."""
        self._sets = sets
        self._shares = shares

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1), independent of earlier calls."""
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
    """Return a reader of the job's records, and an encoder of records as prompts.

    Prompts of more than `max_tokens` tokens are skipped and counted. With `with_fields`, all
    columns of the records are kept. `reader` reads the images, if the job has images.
    `vision_teachers` are the names of the teachers that accept images. Raises InvalidInput if the
    chat template does not suit the prompts.
    """
    check_chat_template(data.prompt_format, template_text(tokenizer.chat_template))
    encoder = _PromptEncoder(data.prompt_format, tokenizer, max_tokens, reader, model_ids)
    return RecordReader(data, teachers, with_fields, vision_teachers=vision_teachers), encoder


def load_prompts(
    data: DataConfig, tokenizer: Any, *, held_out: int, seed: int, **options: Any
) -> tuple[ItemsOfSteps[Prompt], list[Prompt]]:
    """Return the training prompts and the held-out prompts. `options`: see `prompt_encoding`.

    Raises InvalidInput as `load_items` and `prompt_encoding` do. Also raises InvalidInput if a
    prompt has no tokens, has a token that is not in `model_ids`, or names a teacher that is not in
    `teachers` (unless `teachers` is empty).
    """
    warn_of_date(data.prompt_format, template_text(tokenizer.chat_template))
    return load_items(*prompt_encoding(data, tokenizer, **options), held_out=held_out, seed=seed)


def data_sets(reader: RecordReader) -> list[tuple[RecordReader, DataSet]]:
    """Return the data sets of a job, each with its reader: held-out prompts have no weights.

    They are data.path, those of data.mix, and data.eval_path.
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


def surveyed_rows(data: DataConfig, count: int, seed: int) -> list[int]:
    """Return the rows (from 0) of a data set of `count` rows that decide whether it can be used.

    The preview counts the same rows: all rows, or a sample of SURVEY rows in their order.
    """
    limit = SURVEY_WITH_IMAGES if data.image_column else SURVEY
    return sorted(permutation(count, seed, -2)[:limit].tolist())


def encode_or_omit(
    encoder: Encoder[Item], record: PromptRecord, field: str
) -> tuple[Item | None, str]:
    """Return the item of a record and "", or None and why it is left out; raises as `encode`."""
    counts = [omission.count for omission in encoder.omissions]
    item = encoder.encode(record, field)
    reasons = [
        omission.description
        for omission, count in zip(encoder.omissions, counts, strict=True)
        if omission.count > count
    ]
    return item, reasons[0] if item is None else ""


def load_items(
    reader: RecordReader, encoder: Encoder[Item], *, held_out: int, seed: int
) -> tuple[ItemsOfSteps[Item], list[Item]]:
    """Return the training items and the held-out items.

    Reads all records, and tokenizes only the held-out records. Held-out items come from
    `data.eval_path` if this key is set, otherwise from `data.path`. Training items come from
    `data.path`, mixed with those of `data.mix`.

    Raises InvalidInput if a file or column is missing, a record cannot be used, no record is left,
    or more than `data.max_left_out` of the `surveyed_rows` of a data set are skipped.
    """
    data = reader.data
    encoded: dict[int, tuple[Item | None, str]] = {}  # by the id of the record, each is kept

    def encode(record: PromptRecord, field: str) -> tuple[Item | None, str]:
        if id(record) not in encoded:
            encoded[id(record)] = encode_or_omit(encoder, record, field)
        return encoded[id(record)]

    def read_records(source_reader: RecordReader, data_set: DataSet) -> list[PromptRecord]:
        field, records = data_set.field, list(source_reader.read(data_set))
        for record in filter(encoder.is_doubtful, records):
            encode(record, field)  # may raise, and must do so before the first step
        rows = surveyed_rows(data, len(records), seed)
        reasons = Counter(reason for row in rows if (reason := encode(records[row], field)[1]))
        if reasons.total() == len(records):
            raise encoder.no_items_error(field)
        check_left_out(reasons, len(rows), data.max_left_out, field)
        return records

    def build_set(records: Sequence[PromptRecord], field: str) -> PromptSet[Item]:
        prompt_set = PromptSet(records, lambda record: encode(record, field)[0], seed)
        if not prompt_set.has_items():
            raise encoder.no_items_error(field)
        return prompt_set

    records_of = {
        data_set.field: read_records(source_reader, data_set)
        for source_reader, data_set in data_sets(reader)
    }
    field = "data.eval_path" if data.eval_path else "data.path"
    candidates = records_of.pop(field)
    order = [candidates[index] for index in permutation(len(candidates), seed, -1)]
    held_out_items: list[Item] = []
    encoded_count = 0
    while encoded_count < len(order) and len(held_out_items) < held_out:
        item, _ = encode(order[encoded_count], field)
        held_out_items += [] if item is None else [item]
        encoded_count += 1
    if not held_out_items:
        raise encoder.no_items_error(field)
    if data.eval_path is None and encoded_count == len(order):
        most = len(held_out_items) - 1
        raise InvalidInput(
            f"eval.prompts = {held_out} leaves none of the {len(order)} records to train on",
            field="eval.prompts",
            hint=f"set eval.prompts to at most {most}" if most else "add records",
        )
    if not data.eval_path:
        records_of = {field: order[encoded_count:], **records_of}
    sets = [build_set(records, name) for name, records in records_of.items()]
    return (MixedSets(sets, data.shares) if data.mix else sets[0]), held_out_items
