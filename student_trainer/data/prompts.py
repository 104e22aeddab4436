"""The prompts of a job: training and held-out prompts, and the prompts of each step."""

from __future__ import annotations

import dataclasses
import logging
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
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from clients.data.records import DataSet
from protos.errors import InvalidInput
from student_trainer.data.images import SequenceImages, with_images
from student_trainer.data.order import permutation
from student_trainer.data.records import PromptRecord, RecordReader
from student_trainer.data.shares import counts_of, sources_of

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that the student completes.

    ids [T] int32: its token ids. answer: the reference answer, "" if there is none. teacher: the
    name of its teacher, "" if the job has one. text: the prompt before the template, for rewards.
    fields: the columns of its record, for rewards. weight: of its sequences in the loss. images:
    those whose tokens `ids` have; None if it has none.
    """

    ids: NDArray[np.int32]
    answer: str
    teacher: str = ""
    text: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    images: SequenceImages | None = None


class Encoder(Protocol[Made]):
    """Turns records into what a job trains on, such as prompts."""

    def is_doubtful(self, record: PromptRecord) -> bool:
        """Return whether `encode` may refuse the record, which is then tried before training."""

    def encode(self, record: PromptRecord, field: str) -> Made | None:
        """Return the item of a record; None if it is left out.

        Raises InvalidInput, naming `field`, if the record cannot be used.
        """

    def nothing_left(self, field: str) -> InvalidInput:
        """Return the error for data without an item that is not left out."""


class LeftOut:
    """Counts the records that are left out, and logs the count at 1, 2, 4, 8, ..."""

    def __init__(self, what: str) -> None:
        """`what`: the records, for the message, such as "prompts that are too long"."""
        self._what = what
        self._count = 0

    def add(self) -> None:
        """Count one record."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            log.warning("left out %d %s", self._count, self._what)


class _PromptEncoder:
    """Turns records into prompts, and counts those that are too long."""

    def __init__(
        self, form: PromptFormat, tokenizer: Any, max_tokens: int, reader: ImageReader | None = None
    ) -> None:
        """`reader`: of the images of the records; None: they have none."""
        self._form = form
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._reader = reader
        self._too_long = LeftOut(
            f"prompts so far that are longer than method.max_prompt_tokens = {max_tokens}"
        )

    def is_doubtful(self, record: PromptRecord) -> bool:
        """Return whether the prompt may have no tokens."""
        return not record.conversation.question.strip()

    def encode(self, record: PromptRecord, field: str) -> Prompt | None:
        """Return the prompt of a record; None if it is too long.

        Raises InvalidInput, naming `field`, if the prompt has no tokens.
        """
        ids = self._form.ids(self._tokenizer, record.conversation.unanswered(), record.where)
        require_tokens(ids, record.where, field)
        tokens, images = np.array(ids, dtype=np.int32), None
        if self._reader is not None:
            tokens, images = with_images(tokens, record.images, self._reader, record.where)
        if len(tokens) > self._max_tokens:
            self._too_long.add()
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

    def nothing_left(self, field: str) -> InvalidInput:
        """Return the error for data whose prompts are all too long."""
        return InvalidInput(
            f"no prompt of at most {self._max_tokens} tokens is left",
            field=field,
            hint="add data, lower eval.prompts, or raise method.max_prompt_tokens",
        )


def require_tokens(ids: Sequence[int], where: str, field: str) -> None:
    """Raise InvalidInput, naming `field`, if the prompt at `where` has no tokens."""
    if not ids:
        raise InvalidInput(
            f"the prompt of {where} has no tokens",
            field=field,
            hint="remove the row, or give it a prompt: the model needs at least one token",
        )


class ItemsOfSteps(Protocol[Item]):
    """Returns the items of each step, a pure function of the step."""

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1), independent of earlier calls."""


class PromptSet(Generic[Item]):
    """Prompts, or other items of records, in an order fixed by the seed; each epoch has another.

    A record is tokenized when a step first needs it. Records that turn out to be left out, such as
    long ones, are left out of every epoch, and the ones after them move up.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        encode: Callable[[PromptRecord], Item | None],
        seed: int,
    ) -> None:
        """`encode`: returns the item of a record, None if it is left out."""
        self._records = records
        self._encode = encode
        self._seed = seed
        self._prompts: dict[int, Item | None] = {}  # by the index of the record
        self._next = 0
        self._stream = self._prompts_from(0)

    @property
    def is_empty(self) -> bool:
        """Return whether every record is left out. Tokenizes until one is not."""
        order = permutation(len(self._records), self._seed, 0)
        return all(self._prompt(int(index)) is None for index in order)

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1), independent of earlier calls.

        Tokenizes the records of all earlier steps too, because some may be left out.
        """
        return self.taken((step - 1) * count, count)

    def taken(self, first: int, count: int) -> list[Item]:
        """Return `count` items from number `first` (from 0) on, as `of_step` does."""
        ahead = first - self._next
        # A skip within an epoch advances the stream; a new one passes over whole epochs at once.
        if not 0 <= ahead < len(self._records):
            self._stream, ahead = self._prompts_from(first), 0
        self._next = first + count
        return list(islice(self._stream, ahead, ahead + count))

    def _prompts_from(self, first: int) -> Iterator[Item]:
        """Yield the items of all epochs without the `first` ones; the set must not be empty."""
        for epoch in count_up():
            if len(self._prompts) == len(self._records):
                fitting = sum(prompt is not None for prompt in self._prompts.values())
                if first >= fitting:
                    first -= fitting
                    continue
            for index in permutation(len(self._records), self._seed, epoch):
                prompt = self._prompt(int(index))
                if prompt is None:
                    continue
                if first:
                    first -= 1
                else:
                    yield prompt

    def _prompt(self, index: int) -> Item | None:
        if index not in self._prompts:
            self._prompts[index] = self._encode(self._records[index])
        return self._prompts[index]


class MixedSets(Generic[Item]):
    """Several sets, of which each has its share of the items of every step.

    Shares are met as closely as whole numbers allow, over every run of steps (`data/shares.py`).
    """

    def __init__(self, sets: Sequence[PromptSet[Item]], shares: Sequence[Fraction]) -> None:
        """`shares`: of each set, positive, with the sum 1."""
        self._sets = sets
        self._shares = shares

    def of_step(self, step: int, count: int) -> list[Item]:
        """Return the `count` items of `step` (from 1), independent of earlier calls."""
        first = (step - 1) * count
        sources = sources_of(self._shares, first, count)
        taken = [
            iter(items.taken(before, sources.count(number)))
            for number, (items, before) in enumerate(
                zip(self._sets, counts_of(self._shares, first), strict=True)
            )
        ]
        return [next(taken[number]) for number in sources]


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    *,
    held_out: int,
    max_tokens: int,
    seed: int,
    teachers: Collection[str] = (),
    with_fields: bool = False,
    reader: ImageReader | None = None,
    seeing: Collection[str] = (),
) -> tuple[ItemsOfSteps[Prompt], list[Prompt]]:
    """Return the training prompts and the held-out prompts.

    Prompts of more than `max_tokens` tokens are left out, and counted in the log as they are met.
    `with_fields`: keep all columns of the records. `reader`: of their images, if the job has any.
    `seeing`: the teachers that read images, by name.

    Raises InvalidInput as `load_items` does, or if a prompt has no tokens, names a teacher that is
    not in `teachers` (checked if `teachers` is not empty), or needs another chat template.
    """
    check_chat_template(data.prompt_format, template_text(tokenizer.chat_template))
    encoder = _PromptEncoder(data.prompt_format, tokenizer, max_tokens, reader)
    records = RecordReader(data, teachers, with_fields, seeing=seeing)
    return load_items(records, encoder, held_out=held_out, seed=seed)


def load_items(
    reader: RecordReader, encoder: Encoder[Item], *, held_out: int, seed: int
) -> tuple[ItemsOfSteps[Item], list[Item]]:
    """Return the training items and the held-out ones.

    Reads all records and tokenizes the held-out ones. `held_out` items come from `data.eval_path`
    if it is set, otherwise out of `data.path`. Training has those of `data.path`, mixed with those
    of `data.mix`.

    Raises InvalidInput if a file or column is missing, a record cannot be used, or none is left.
    """
    data = reader.data

    def records(path: str, name: str | None, split: str, field: str) -> list[PromptRecord]:
        aside = field == "data.eval_path"
        of = replace(reader, data=data.without_weights()) if aside else reader
        found = list(of.read(DataSet(path, name, split, field)))
        for record in filter(encoder.is_doubtful, found):
            encoder.encode(record, field)  # may raise, and must do so before the first step
        return found

    def training(records: Sequence[PromptRecord], field: str) -> PromptSet[Item]:
        made = PromptSet(records, lambda record: encoder.encode(record, field), seed)
        if made.is_empty:
            raise encoder.nothing_left(field)
        return made

    field = "data.eval_path" if data.eval_path else "data.path"
    chosen = records(data.path, data.name, data.split, "data.path")
    others = records(data.eval_path, data.name, data.split, field) if data.eval_path else chosen
    order = [others[index] for index in permutation(len(others), seed, -1)]
    aside: list[Item] = []
    tried = 0
    while tried < len(order) and len(aside) < held_out:
        item = encoder.encode(order[tried], field)
        aside += [] if item is None else [item]
        tried += 1
    if not aside:
        raise encoder.nothing_left(field)
    sets = [training(order[tried:] if data.eval_path is None else chosen, "data.path")]
    for number, other in enumerate(data.mix):
        field = f"data.mix.{number}.path"
        sets.append(training(records(other.path, other.name, other.split, field), field))
    return (MixedSets(sets, data.shares) if data.mix else sets[0]), aside
