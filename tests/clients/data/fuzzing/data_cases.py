"""Cases of records and chat templates: the tokens of training against those of the renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from clients.config.capture import CaptureData
from clients.config.sft import SFTJob
from clients.data.prompt_format import check_chat_template, template_text
from clients.data.records import DataSet
from clients.preflight.data_files import check_data
from student_trainer.data.examples import Example, load_examples
from student_trainer.data.prompts import ALL_IDS, ItemsOfSteps, ModelIds, Prompt, load_prompts
from teacher_service.capture.tokenizing import RecordEncoder
from tests.clients.data.fuzzing import records as files
from tests.clients.data.fuzzing.renderer import Reader, Refusal
from tests.clients.data.fuzzing.templates import make_template
from tests.clients.data.fuzzing.tokenizer_files import KINDS, make_backend, write_tokenizer

# (token ids, learned or not, weight or reference answer): what a record becomes.
Item = tuple[tuple[int, ...], tuple[bool, ...], Any]


@dataclass(frozen=True)
class DataCase:
    """A file of records and how a job reads it.

    purpose: sft, prompts or capture. form: text, last or all. ids: the number of the student's ids;
    None: as many as the tokenizer has.
    """

    purpose: str
    form: str
    kind: str
    template: Any
    system: str | None
    user: str
    max_tokens: int
    is_weighted: bool
    ids: int | None
    suffix: str
    data: bytes

    @property
    def reader(self) -> Reader:
        """The oracle's tokenizer."""
        continuation = make_backend(self.kind, puts_space=False)
        return Reader(make_backend(self.kind), continuation, self.template)

    def table(self, path: Path) -> dict[str, Any]:
        """Return the table `data` of a job file."""
        table: dict[str, Any] = {"path": str(path), "template": self.user}
        if self.form != "text":
            table["messages_column"] = "messages"
        if self.system is not None:
            table["system"] = self.system
        if self.is_weighted:
            table["weight_column"] = "weight"
        return table

    def sft_job(self, path: Path, model: str = "model") -> SFTJob:
        """Return the job that trains on the file at `path`."""
        method: dict[str, Any] = {"type": "sft", "max_tokens": self.max_tokens}
        if self.form != "text":
            method["train_on"] = self.form
        return SFTJob.model_validate(
            {
                "student": {"model": model},
                "data": self.table(path) | {"max_left_out": 1.0},
                "method": method,
                "eval": {"prompts": 1, "every": 1},
            }
        )


def make_data_case(random: Random, *, is_right: bool = False) -> DataCase:
    """Return a random case. `is_right`: a job can train on it, apart from a template's gaps."""
    form = random.choice(["text", "last", "last", "all"])
    purpose = "sft" if form == "all" or is_right else random.choice(["sft", "prompts", "capture"])
    has_template = random.random() < (0.7 if form == "text" else 1.0 if is_right else 0.97)
    marks = form == "all" and (is_right or random.random() < 0.95)
    template = make_template(random, marks_answers=marks) if has_template else None
    make_record = files.make_pair if form == "text" else files.make_conversation
    count = random.randrange(4, 9) if is_right else random.randrange(0, 9)
    records: list[Any] = [make_record(random) for _ in range(count)]
    is_weighted = purpose == "sft" and random.random() < 0.1
    for record in records if is_weighted else ():
        record["weight"] = random.choice([0, 1, 0.5, 2])
    if records and not is_right and random.random() < 0.35:
        place = random.randrange(len(records))
        records[place] = files.spoil(random, records[place])
    suffix, data = ".jsonl", None
    if random.random() < 0.3:
        suffix, data = ".parquet", files.write_table(random, records)
    if data is None or is_right:
        suffix, data = ".jsonl", files.write_lines(random, records)
    return DataCase(
        purpose=purpose,
        form=form,
        kind=random.choice(KINDS),
        template=template,
        system="Be brief, 42." if random.random() < 0.1 else None,
        user=random.choice(["{prompt}", "{prompt}", "Q: {prompt}\nA: ", "{prompt} {prompt}"])
        if form == "text"
        else "{prompt}",
        max_tokens=random.randrange(2, 60) if random.random() < 0.1 else 4096,
        is_weighted=is_weighted,
        ids=None if is_right or random.random() < 0.9 else random.randrange(200, 360),
        suffix=suffix,
        data=data,
    )


def expect_items(case: DataCase) -> list[Item]:
    """Return what the records become, without those that are left out. Raises Refusal."""
    if case.template is None and (case.form != "text" or case.system is not None):
        raise Refusal("no chat template")
    if case.form == "all" and "{% generation %}" not in str(case.template):
        raise Refusal("no {% generation %}")
    read = files.read_lines if case.suffix == ".jsonl" else files.read_table
    records = read(case.data)
    # A field of a record must be right even if the record is left out.
    texts = [_read_record(case, record) for record in records]
    items = [_make_item(case, *text) for text in texts]
    usable = [item for item in items if item is not None]
    if case.purpose == "capture":
        return usable
    if len(usable) < 2:
        raise Refusal("one is held out, and none is left")
    return usable


def read_items(case: DataCase, folder: Path) -> list[Item]:
    """Return what the product makes of the file; it is written into `folder`. Raises its errors."""
    path = folder / f"data{case.suffix}"
    path.write_bytes(case.data)
    tokenizer = _load_tokenizer(case.kind)
    tokenizer.chat_template = case.template
    if case.purpose == "capture":
        return _capture_items(case, path, tokenizer)
    job = case.sft_job(path)
    ids = ALL_IDS if case.ids is None else ModelIds.of_tokenizer(tokenizer, case.ids)
    expected_count = _count_items(case)
    if case.purpose == "prompts":
        training, held_out = load_prompts(
            job.data, tokenizer, held_out=1, max_tokens=case.max_tokens, seed=3, model_ids=ids
        )
        prompts: list[Prompt] = [*held_out, *_take_epoch(training, expected_count - 1)]
        return [_item_of_prompt(prompt) for prompt in prompts]
    check_data(job)
    examples_of_steps, held_out_examples = load_examples(job, tokenizer, ids)
    examples = [*held_out_examples, *_take_epoch(examples_of_steps, expected_count - 1)]
    return [_item_of_example(example) for example in examples]


def _take_epoch(items: ItemsOfSteps[Any], count: int) -> Sequence[Any]:
    """Return the first `count` items, after each record was looked at."""
    return items.of_step(1, max(count, 0) + 1)[:-1]


def _count_items(case: DataCase) -> int:
    """Return the number of items; if a record is to be refused, more than any file has."""
    try:
        return len(expect_items(case))
    except Refusal:
        return 100


def _capture_items(case: DataCase, path: Path, tokenizer: Any) -> list[Item]:
    table = case.table(path)
    form = "completion" if case.form == "text" else "messages"
    data = CaptureData.model_validate(table | {"form": form})
    check_chat_template(data.prompt_format, template_text(tokenizer.chat_template))
    encoder = RecordEncoder(data, tokenizer, 1 << 20)
    located = [
        (f"row {number}", record)
        for number, record in enumerate(DataSet(str(path)).records(encoder.columns), 1)
    ]
    items: list[Item] = []
    for ids, start, *_ in encoder.encode(located).records():
        if len(ids):
            learned = tuple(place >= start for place in range(len(ids)))
            items.append((tuple(ids.tolist()), learned, None))
    return items


def _item_of_prompt(prompt: Prompt) -> Item:
    return tuple(prompt.ids.tolist()), (), prompt.answer


def _item_of_example(example: Example) -> Item:
    learned = np.arange(len(example.token_ids)) >= example.start
    if example.mask is not None:
        learned[example.start :] = example.mask
    return tuple(example.token_ids.tolist()), tuple(learned.tolist()), example.prompt.weight


def _read_record(case: DataCase, record: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return messages, tools, answer and weight of a record. Raises Refusal."""
    weight: Any = 1.0
    if case.is_weighted:
        weight = record.get("weight")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise Refusal("no weight")
        if not 0 <= weight < float("inf") or weight > 10**300:
            raise Refusal("no weight")
    if case.form == "text":
        text = case.user.replace("{prompt}", files.read_text(record, "prompt"))
        messages, tools = [{"role": "user", "content": text}], None
        answer = ""
        if case.purpose != "prompts" or record.get("answer") is not None:
            answer = files.read_text(record, "answer")
    else:
        messages, tools = files.read_messages(record)
        if case.system is not None and any(m["role"] in ("system", "developer") for m in messages):
            raise Refusal("two system messages")
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        answer = messages[-1].get("content", "") if is_answered else ""
        if case.purpose == "prompts" and record.get("answer") is not None:
            answer = files.read_text(record, "answer")
    if case.system is not None:
        messages = [{"role": "system", "content": case.system}, *messages]
    return messages, tools, answer, weight


def _make_item(case: DataCase, messages: Any, tools: Any, answer: str, weight: Any) -> Item | None:
    """Return the tokens of a record; None if it is left out. Raises Refusal."""
    reader = case.reader
    if case.purpose == "prompts" or case.form == "text":
        ids = (
            reader.prompt_of_text(messages[-1]["content"])
            if case.template is None
            else reader.prompt(messages, tools)
        )
        if case.purpose == "prompts":
            return _limited(case, ids, [], answer)
        if case.purpose == "capture" and not ids:
            raise Refusal("the prompt has no tokens")
        if not answer:
            return None
        answer_ids = reader.answer(answer, has_template=case.template is not None)
        learned = [False] * len(ids) + [True] * len(answer_ids)
        return _limited(case, ids + answer_ids, learned, weight)
    if case.form == "all":
        marked = reader.all_answers(messages, tools)
        return None if marked is None else _limited(case, *marked, weight)
    pair = reader.last_answer(messages, tools)
    if pair is None:
        return None
    learned = [False] * len(pair[0]) + [True] * len(pair[1])
    return _limited(case, pair[0] + pair[1], learned, weight)


def _limited(case: DataCase, ids: list[int], learned: list[bool], value: Any) -> Item | None:
    """Return an item unless it is too long. Raises Refusal without a prompt or for other ids."""
    if not ids or (learned and learned[0]):
        raise Refusal("the prompt has no tokens")
    if case.purpose == "capture":
        return tuple(ids), tuple(learned), None
    if case.ids is not None and max(ids) >= case.ids:
        raise Refusal("the student does not have a token")
    return None if len(ids) > case.max_tokens else (tuple(ids), tuple(learned), value)


@cache
def _load_tokenizer(kind: str) -> Any:
    with TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(write_tokenizer(Path(folder), kind))
