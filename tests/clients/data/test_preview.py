"""Counts, cut sequences, lost texts and hostile texts of a preview; what is learned of messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clients.data.preview import (
    ModelInput,
    Preview,
    SurveyedRecord,
    build_preview,
    lost_in_row,
    parse_preview,
    visible,
)
from clients.data.prompt_format import PromptFormat, date_warning
from clients.data.tokens.answers import answered_ids, assistant_ids
from clients.jobs.plots.preview_html import preview_page
from protos.errors import InvalidInput
from tests.clients.data.test_prompt_format import CHARACTERS, MARKED
from tests.student_trainer import tiny

FORM = PromptFormat(messages_column="m")
HOSTILE = "\x1b[2J\u202e<script>alert(1)</script>\u200b"


@pytest.fixture(scope="module")
def words() -> Any:
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = MARKED
    return tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def learned_text(preview: Preview, record: int = 0, view: int = 0) -> str:
    runs = preview.records[record].views[view].runs
    return "".join("".join(run.texts) for run in runs if run.kind in ("learned", "end"))


def test_a_preview_is_read_as_it_was_written(words: Any) -> None:
    ids = np.array(words("1+1=2")["input_ids"])
    records = [
        SurveyedRecord("row 1", (ModelInput.from_start(words, ids, 4),), lost=(("tool", "x"),)),
        SurveyedRecord("row 2", left_out="too long"),
    ]
    preview = build_preview("sft", records, shown=5, ends={0: "<|end|>"}, max_left_out=0.2)
    assert parse_preview(preview.to_json()) == preview
    assert preview.warnings == (
        "1 of 2 records (50%) are left out, so the job will fail: 1 too long",
        "a tool is missing from the input in 1 of 2 records",
        "1 of 1 learned parts do not end with an end token: the student does not learn to stop"
        " there; check the chat template",
    )
    assert dict(preview.facts)["records"] == "1 of 2 are used"
    assert [record.problem for record in preview.records] == ["", "left out: too long"]
    with pytest.raises(ValueError, match="validation error"):
        parse_preview('{"method": "sft"}')


def test_a_preview_has_the_records_that_fit(words: Any) -> None:
    ids = np.array(words("1+1=2")["input_ids"])
    records = [SurveyedRecord(f"row {n}", (ModelInput.from_start(words, ids, 4),)) for n in (1, 2)]
    preview = build_preview("sft", records, shown=5, ends={})
    assert preview.within(len(preview.to_json())) == preview
    smaller = preview.within(len(preview.to_json()) - 1)
    assert len(smaller.to_json()) < len(preview.to_json())
    assert [record.where for record in smaller.records] == ["row 1"]
    hidden = "1 of 2, for their size; distill preview shows all"
    assert smaller.facts == (*preview.facts, ("records not shown", hidden))


def test_long_runs_are_cut_and_their_borders_stay(words: Any) -> None:
    """Of 5,000 tokens of context the first and the last are shown, and every learned one."""
    (one, two), end = words("12")["input_ids"], words.eos_token_id
    ids = np.array([one] * 5000 + [two] * 3 + [end])
    view_input = ModelInput.from_start(words, ids, 5000)
    preview = build_preview(
        "sft", [SurveyedRecord("row 1", (view_input,))], shown=1, ends={end: "<|end|>"}
    )
    (view,) = preview.records[0].views
    assert (view.tokens, view.learned) == (5004, 4)
    assert [run.kind for run in view.runs] == ["context", "hidden", "context", "learned", "end"]
    hidden = int(view.runs[1].texts[0].split()[0].replace(",", ""))
    assert hidden + sum(len(run.texts) for run in view.runs) - 1 == 5004
    assert learned_text(preview) == "222<|end|>"
    assert len(preview.to_json()) < 10_000


def test_texts_of_records_cannot_act_on_a_page_or_a_terminal(words: Any) -> None:
    assert visible("a\x1b\u202e\u2066\u200b\nb\u00e9") == "a\\x1b\\u202e\\u2066\\u200b\nb\u00e9"
    record = SurveyedRecord(HOSTILE, refused=HOSTILE, lost=(("tool call", HOSTILE),))
    preview = build_preview("sft", [record], shown=1, ends={})
    document = preview_page(HOSTILE.replace("\x1b", ""), preview)
    assert "<script" not in document
    assert all(c.isprintable() or c == "\n" for c in preview.to_json())
    shown = parse_preview(preview.to_json()).records[0]
    texts = [shown.where, shown.problem, *(text for part in shown.lost for text in part)]
    assert any("\\u200b" in text for text in texts)
    assert all(c.isprintable() for text in texts for c in text)


def test_what_a_template_leaves_out_is_shown(words: Any) -> None:
    """A call without its arguments, an earlier reasoning, a message after the last answer."""
    call = {"id": "7", "type": "function", "function": {"name": "SUA", "arguments": '{"n": "42"}'}}
    template = MARKED.replace(
        "{{ m.content }}{% endgen",
        "{{ (m.content or '').split('=')[-1] }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endgen",
    )
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = template
    row = {
        "m": [
            user("1+1="),
            assistant("11+0=2"),
            user("42+2="),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            user("9+9="),
        ]
    }
    lost = lost_in_row(FORM, tokenizer, row, is_answered=True)
    assert lost == (
        ("assistant message", "11+0=2"),
        ("tool call", "42"),
        ("user message", "9+9="),
    )
    assert lost_in_row(FORM, words, {"m": row["m"][:3]}, is_answered=False) == ()


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_reasoning_that_is_left_out_is_shown(words: Any, key: str) -> None:
    row = {"m": [user("1+1="), assistant("2", **{key: "42"}), user("2+2="), assistant("4")]}
    lost = lost_in_row(FORM, words, row, is_answered=True)
    assert lost == (("reasoning of the assistant message", "42"),)


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 0, "train": True}]
)
def test_messages_that_are_not_learned(words: Any, flag: dict[str, Any]) -> None:
    """As one learns them by hand: `4<|end|>` and `6<|end|>` of three answers, or the last one."""
    messages = [
        user("1+1="),
        assistant("2", **flag),
        user("2+2="),
        assistant("4"),
        user("3+3="),
        assistant("6", weight=1, train=True),
    ]
    talk = FORM.conversation({"m": messages}, "row 1")
    ids, is_learned = assistant_ids(FORM, words, talk, "row 1")
    assert words.decode(ids) == "U1+1=A2<|end|>U2+2=A4<|end|>U3+3=A6<|end|>"
    assert words.decode(np.array(ids)[is_learned]) == "4<|end|>6<|end|>"
    messages[-1] |= flag
    talk = FORM.conversation({"m": messages}, "row 1")
    before, answer = answered_ids(FORM, words, talk, "row 1")
    assert (words.decode(before), words.decode(answer)) == (
        "U1+1=A2<|end|>U2+2=A",
        "4<|end|>",
    )


def test_an_empty_answer_is_not_learned(words: Any) -> None:
    """Its end token alone would teach to answer nothing."""
    talk = FORM.conversation({"m": [user("1+1="), assistant(" ")]}, "row 1")
    assert answered_ids(FORM, words, talk, "row 1") == ([], [])
    messages = [user("1+1="), assistant(""), user("2+2="), assistant("4")]
    form = FORM.conversation({"m": messages}, "row 1")
    ids, is_learned = assistant_ids(FORM, words, form, "row 1")
    assert words.decode(np.array(ids)[is_learned]) == "4<|end|>"


def test_flags_that_a_template_cannot_apply(words: Any) -> None:
    """A template that marks the whole conversation at once hides which message is which."""
    tokenizer = tiny.tokenizer(CHARACTERS)
    tokenizer.chat_template = (
        "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    )
    messages = [user("1+1="), assistant("2", train=False), user("2+2="), assistant("4")]
    talk = FORM.conversation({"m": messages}, "row 1")
    with pytest.raises(InvalidInput, match="marks 1 parts of row 1, which has 2 assistant"):
        assistant_ids(FORM, tokenizer, talk, "row 1")


@pytest.mark.parametrize("flag", [{"weight": 0.5}, {"weight": "0"}, {"train": "no"}, {"train": 2}])
def test_flags_that_mean_nothing(flag: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="other than 0 and 1"):
        FORM.conversation({"m": [user("1+1="), assistant("2", **flag)]}, "row 1")


@pytest.mark.parametrize(
    ("template", "arguments", "part"),
    [
        ("{{ strftime_now('%d') }}{{ messages }}", {}, "other tokens tomorrow"),
        ("{{ date_string or strftime_now('%d') }}", {}, 'date_string = "26 Jul 2024"'),
        ("{{ date_string or strftime_now('%d') }}", {"date_string": "1 May 2025"}, ""),
        ("{{ messages }}", {}, ""),
    ],
)
def test_templates_with_the_date(template: str, arguments: dict[str, str], part: str) -> None:
    warning = date_warning(PromptFormat(template_arguments=arguments), template)
    assert part in warning
    assert bool(warning) == bool(part)
