"""Which tokens are scored, of every form of data; and data that cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from clients.config.capture import CaptureData, CaptureJob
from protos.errors import InvalidInput
from teacher_service.capture.plan import make_plan, read_plan
from teacher_service.capture.program import _plan_key
from teacher_service.capture.recorder import CaptureStopped
from teacher_service.capture.sequences import SequenceReader
from teacher_service.capture.tokenizing import RecordEncoder
from tests.teacher_service.capture.material import END, pairs, text, write_lines, write_pairs

TEMPLATE = (
    "{% for m in messages %}{{ 't1 ' if m.role == 'user' else 't2 ' }}{{ m.content }}"
    "{{ ' ' if m.role == 'user' else ' t0 t3 ' }}{% endfor %}"
    "{% if add_generation_prompt %}t2 {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(words: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(words)


@pytest.fixture
def chat(words: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(words)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(
    tokenizer: Any, path: Path, *, max_tokens: int = 64, **data: Any
) -> tuple[list[tuple[list[int], int]], SequenceReader]:
    reader = SequenceReader(CaptureData(path=str(path), **data), tokenizer, max_tokens)
    return [(sequence.token_ids.tolist(), sequence.start) for sequence in reader], reader


def test_completions(tokenizer: Any, tmp_path: Path) -> None:
    token_pairs = pairs(20)
    sequences, _ = read(tokenizer, write_pairs(tmp_path / "a.jsonl", token_pairs))
    assert sequences == [([*prompt, *answer, END], len(prompt)) for prompt, answer in token_pairs]


def test_columns_and_template(tokenizer: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"q": "t5", "a": "t6 t0 t7", "other": []}])
    names = {"prompt_column": "q", "answer_column": "a", "template": "t1 {prompt} t2"}
    # What follows an end token was never said.
    assert read(tokenizer, path, **names)[0] == [([1, 5, 2, 6, END], 3)]


@pytest.mark.parametrize("kind", ["parquet", "saved", "saved splits"])
def test_other_files_hold_the_same(tokenizer: Any, tmp_path: Path, kind: str) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    records = [{"prompt": text(a), "answer": text(b)} for a, b in pairs(30)]
    expected, _ = read(tokenizer, write_lines(tmp_path / "a.jsonl", records))
    path = tmp_path / "data.parquet"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        saved = datasets.Dataset.from_list(records)
        if kind == "saved splits":
            saved = datasets.DatasetDict({"train": saved, "test": saved.select([0])})
        path = tmp_path / "saved"
        saved.save_to_disk(path)
    assert read(tokenizer, path)[0] == expected


def test_conversations(chat: Any, tmp_path: Path) -> None:
    """The last turn of the assistant is scored, and the end token behind it; not what follows."""

    def turns(*contents: str) -> dict[str, Any]:
        roles = ["user", "assistant"] * 3
        return {
            "messages": [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=False)
            ]
        }

    records = [turns("t5", "t6 t7"), turns("t5", "t6", "t7", "t8 t9"), turns("t5", "t6", "t7")]
    path = write_lines(tmp_path / "a.jsonl", [*records, turns("t5")])
    sequences, reader = read(chat, path, form="messages")
    assert sequences == [
        ([1, 5, 2, 6, 7, END], 3),
        ([1, 5, 2, 6, END, 3, 1, 7, 2, 8, 9, END], 9),
        ([1, 5, 2, 6, END], 3),
    ]
    assert reader.empty == 1, "nobody answers in the last one"


def test_a_prompt_is_the_users_message(chat: Any, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [([5, 6], [7])])
    assert read(chat, path)[0] == [([1, 5, 6, 2, 7, END], 4)]


def test_keys_of_the_prompt(chat: Any, tmp_path: Path) -> None:
    """As in training: a system message, arguments of the template, and no template at all."""
    chat.chat_template = "{% if spare %}t9 {% endif %}" + TEMPLATE
    path = write_pairs(tmp_path / "a.jsonl", [([5, 6], [7])])
    keys: dict[str, Any] = {"system": "t8", "template_arguments": {"spare": True}}
    assert read(chat, path, **keys)[0] == [([9, 2, 8, END, 3, 1, 5, 6, 2, 7, END], 9)]
    assert read(chat, path, chat_template=False)[0] == [([5, 6, 7, END], 2)]
    talk = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t6"}]
    path = write_lines(tmp_path / "b.jsonl", [{"messages": talk}])
    assert read(chat, path, form="messages", template_arguments={"spare": True})[0] == [
        ([9, 1, 5, 2, 6, END], 4)
    ]
    with pytest.raises(InvalidInput, match="has no argument 'spar'"):
        read(chat, path, form="messages", template_arguments={"spar": True})


def test_texts_are_packed(tokenizer: Any, tmp_path: Path) -> None:
    documents = [a for a, _ in pairs(40)]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text(document)} for document in documents])
    stream = [token for document in documents for token in [*document, END]]
    sequences, _ = read(tokenizer, path, form="text", max_tokens=16)
    assert [start for _, start in sequences] == [1] * len(sequences)
    assert [token for ids, _ in sequences for token in ids] == stream
    assert {len(ids) for ids, _ in sequences[:-1]} == {16}


@pytest.mark.parametrize("begins", [True, False])
def test_no_text_is_lost_at_an_end_token(words: Path, tmp_path: Path, begins: bool) -> None:
    """One that a tokenizer begins every text with, as OPT's, or one that stands in the text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(words)
    if begins:
        inner = tokenizer.backend_tokenizer
        inner.post_processor = TemplateProcessing(single="t0 $A", special_tokens=[("t0", END)])
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t5 t0 t6"}, {"text": "t7 t0"}])
    first = [END] if begins else []
    stream = [*first, 5, END, 6, END, *first, 7, END]
    assert read(tokenizer, path, form="text")[0] == [(stream, 1)]


def test_what_is_left_out_is_counted(tokenizer: Any, tmp_path: Path) -> None:
    token_pairs = [([1, 2], [3]), ([1], [2] * 9), ([1] * 9, [2]), ([1], []), ([4], [5])]
    sequences, reader = read(
        tokenizer, write_pairs(tmp_path / "a.jsonl", token_pairs), max_tokens=8
    )
    assert [ids for ids, _ in sequences] == [[1, 2, 3, END], [4, 5, END]]
    assert (reader.too_long, reader.empty) == (2, 1)


HUGE = "t1 " * (1 << 19)


@pytest.mark.parametrize(
    ("records", "data"),
    [
        ([{"prompt": HUGE, "answer": "t1"}], {}),
        ([{"prompt": "t1", "answer": HUGE}], {}),
        (
            [
                {"messages": [{"role": "user", "content": "t1"}, {"role": "assistant"} | message]}
                for message in (
                    {"content": HUGE},
                    {"content": "t1", "reasoning_content": HUGE},
                    {
                        "content": "t1",
                        "tool_calls": [{"function": {"name": "f", "arguments": {"x": HUGE}}}],
                    },
                )
            ],
            {"form": "messages"},
        ),
    ],
    ids=["prompt", "answer", "messages"],
)
def test_a_record_of_megabytes_is_left_out_without_its_tokens(
    chat: Any, tmp_path: Path, records: list[dict[str, Any]], data: dict[str, Any]
) -> None:
    """A tokenizer needs gigabytes for 40 million characters."""
    tokenizer = Mock(wraps=chat, chat_template=chat.chat_template)
    encoder = RecordEncoder(CaptureData(path="x.jsonl", **data), tokenizer, 64)
    rows = [(f"row {number}", record) for number, record in enumerate(records)]
    encoded = encoder.encode(rows)
    assert (len(encoded.lengths), encoded.too_long) == (0, len(records))
    assert tokenizer.mock_calls == []
    sequences, reader = read(chat, write_lines(tmp_path / "a.jsonl", records), **data)
    assert (sequences, reader.too_long, reader.records) == ([], len(records), len(records))


ANSWER = [{"role": "assistant", "content": "t1"}]
# The template cannot add a number to a text.
NAMED = [{"role": "user", "content": "t1", "name": 3}, *ANSWER]
# As tool calls are.
SILENT = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": None}]


@pytest.mark.parametrize(
    ("record", "form", "field", "says"),
    [
        ({"q": "t1"}, "completion", "data.prompt_column", "no column 'prompt' in row 1 of"),
        ({"prompt": "t1"}, "completion", "data.answer_column", "no column 'answer' in row 1 of"),
        ({"prompt": "", "answer": "t1"}, "completion", "data.path", "has no tokens"),
        ({"prompt": ["t1"], "answer": "t1"}, "completion", "data.prompt_column", "has list"),
        ({"text": 3}, "messages", "data.messages_column", "has no list of messages"),
        ({"messages": "t1"}, "messages", "data.messages_column", "has no list of messages"),
        ({"messages": [{"role": "user"}]}, "messages", "data.messages_column", "no list of"),
        ({"messages": SILENT}, "messages", "data.messages_column", "message 2 of row 1 of"),
        ({"messages": ANSWER}, "messages", "data.messages_column", "no message before the"),
        ({"messages": NAMED}, "messages", "data.messages_column", "row 1 of"),
        ({"prompt": "t1"}, "text", "data.text_column", "no column 'text'"),
    ],
)
def test_bad_records(
    chat: Any, tmp_path: Path, record: Any, form: str, field: str, says: str
) -> None:
    named = TEMPLATE.replace("m.content", "m.content + (m.name or '')")
    chat.chat_template = named if form == "messages" else None
    with pytest.raises(InvalidInput) as caught:
        read(chat, write_lines(tmp_path / "a.jsonl", [record]), form=form)
    assert says in caught.value.message
    assert (caught.value.field, bool(caught.value.hint)) == (field, True)


def test_tokenizers_that_do_not_fit_the_form(chat: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t1", "messages": []}])
    chat.eos_token = None
    with pytest.raises(InvalidInput, match="no end-of-text token"):
        read(chat, path, form="text")
    # A template that writes something else before an answer than it does within a conversation.
    chat.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}t9"
    talk = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": "t2"}]
    with pytest.raises(InvalidInput, match="changes the prompt of row 1 of"):
        read(chat, write_lines(path, [{"messages": talk}]), form="messages")
    chat.chat_template = None
    with pytest.raises(InvalidInput, match="no chat template"):
        read(chat, path, form="messages")


def test_the_plan_is_cut_by_bytes_alone(tokenizer: Any, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", pairs(50))
    sizes = {"row_bytes": 25.0, "file_bytes": 700}
    reader = SequenceReader(CaptureData(path=str(path)), tokenizer, 64)
    plan = make_plan(reader, tmp_path / "plan", **sizes)
    assert [plan[i].token_ids.tolist() for i in range(50)] == [
        [*prompt, *answer, END] for prompt, answer in pairs(50)
    ]
    for number in range(len(plan.files) - 1):
        weights = [25 * plan[i].rows + 4 * len(plan[i].token_ids) + 64 for i in plan.file(number)]
        assert sum(weights[:-1]) < 700 <= sum(weights) or number == len(plan.files) - 2
    assert len(plan.files) > 17, "fewer files would be cut by the number of sequences too"
    for count in (1, 2, 3, 7, 99):
        parts = [number for index in range(count) for number in plan.files_of(index, count)]
        assert parts == list(range(len(plan.files) - 1))


def test_a_plan_is_kept(tokenizer: Any, tmp_path: Path) -> None:
    """Under its key, and only when it is complete."""
    path = write_pairs(tmp_path / "a.jsonl", [*pairs(30), ([5] * 99, [6]), ([5], [])])
    reader = SequenceReader(CaptureData(path=str(path)), tokenizer, 64)
    home = tmp_path / "plan"
    first_plan = make_plan(reader, home, row_bytes=25.0, file_bytes=700, key="a")
    assert (first_plan.too_long, first_plan.empty) == (1, 1)
    stored_plan = read_plan(home, "a")
    assert stored_plan is not None
    for name in ("token_ids", "offsets", "starts", "files"):
        np.testing.assert_array_equal(getattr(stored_plan, name), getattr(first_plan, name))
    assert (stored_plan.too_long, stored_plan.empty, stored_plan.rows) == (1, 1, first_plan.rows)
    assert read_plan(home, "b") is None
    for name in ("token_ids", "offsets", "starts", "files"):  # as a power cut may leave them
        content = (home / name).read_bytes()
        for part in (content[:-8], b""):
            (home / name).write_bytes(part)
            assert read_plan(home, "a") is None
        (home / name).write_bytes(content)
    assert read_plan(home, "a") is not None
    (home / "plan.json").unlink()
    assert read_plan(home, "a") is None


def test_reading_can_be_stopped(tokenizer: Any, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", pairs(10) * 200)
    reader = SequenceReader(CaptureData(path=str(path)), tokenizer, 64)

    def stop() -> None:
        raise CaptureStopped

    with pytest.raises(CaptureStopped):
        make_plan(reader, tmp_path / "plan", row_bytes=1.0, file_bytes=1, key="a", on_poll=stop)
    assert reader.records < 2000
    assert read_plan(tmp_path / "plan", "a") is None


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("completion", marks=pytest.mark.slow),
        "messages",
        pytest.param("text", marks=pytest.mark.slow),
    ],
)
def test_processes_give_the_same_sequences(chat: Any, tmp_path: Path, form: str) -> None:
    """In the same order, with the same records left out."""
    records = []
    for number, (prompt, answer) in enumerate(pairs(50) * 120):
        answer_text = text(answer) if number % 100 else ""
        turns = [("user", text(prompt)), ("assistant", answer_text)]
        messages = [{"role": role, "content": content} for role, content in turns]
        records.append(
            {
                "prompt": text(prompt),
                "answer": answer_text,
                "messages": messages,
                "text": answer_text,
            }
        )
    path = write_lines(tmp_path / "a.jsonl", records)
    data = CaptureData(path=str(path), form=form)  # type: ignore[arg-type]
    single_process, two_processes = (
        SequenceReader(data, chat, 40, processes) for processes in (1, 2)
    )
    for parallel_sequence, serial_sequence in zip(two_processes, single_process, strict=True):
        assert parallel_sequence.start == serial_sequence.start
        np.testing.assert_array_equal(parallel_sequence.token_ids, serial_sequence.token_ids)
    assert (two_processes.records, two_processes.too_long, two_processes.empty) == (
        6000,
        single_process.too_long,
        single_process.empty,
    )
    assert two_processes.empty == 60, "an end token alone is not scored"


def test_a_bad_record_in_a_process_is_named(tokenizer: Any, tmp_path: Path) -> None:
    good = [{"prompt": text(a), "answer": text(b)} for a, b in pairs(50)] * 120
    path = write_lines(tmp_path / "a.jsonl", [*good[:5500], {"prompt": "t5"}, *good[5500:]])
    with pytest.raises(InvalidInput, match="row 5501 of") as caught:
        list(SequenceReader(CaptureData(path=str(path)), tokenizer, 64, 2))
    assert caught.value.field == "data.answer_column"
    assert caught.value.hint


@pytest.mark.slow
def test_the_key_of_a_plan_is_the_same_in_another_process(words: Path, tokenizer: Any) -> None:
    """Or each attempt would read all data again."""
    settings = {"method": {"type": "capture"}, "data": {"path": "d"}, "teacher": {"address": "t:1"}}
    key = _plan_key(CaptureJob.model_validate(settings), tokenizer, [1.0, "digest"])
    code = (
        "import sys; from pathlib import Path; from transformers import AutoTokenizer\n"
        "from clients.config.capture import CaptureJob\n"
        "from teacher_service.capture.program import _plan_key\n"
        f"job = CaptureJob.model_validate({settings})\n"
        "print(_plan_key(job, AutoTokenizer.from_pretrained(sys.argv[1]), [1.0, 'digest']))"
    )
    other_process = subprocess.run(
        [sys.executable, "-c", code, str(words)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other_process.stdout.strip() == key
