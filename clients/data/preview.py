"""The preview of a job: the model inputs and the trained tokens, token by token, before training.

A program reads the first records with the functions that training uses, and describes each record
as a `SurveyedRecord`. `build_preview` counts all these records and shows some of them. Texts of
records are untrusted, so control characters and invisible characters are escaped.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from clients.data.conversation import REASONING, Conversation, messages_in, text_of_content
from clients.data.prompt_format import PromptFormat
from clients.data.records import describe_counts, describe_left_out
from protos.errors import InvalidInput

# Records of a data set that a preview counts, and that a job encodes before its first step.
# Images take longer.
SURVEY, SURVEY_WITH_IMAGES = 1000, 32
SHOWN = 5  # default number of records that a preview shows
MAX_BYTES = 512 << 10  # maximum size of the preview in a run directory, which pages read
# Tokens that are shown: the first and the last of a run, and all of a sequence.
_FIRST, _LAST, _MOST = 240, 80, 1500
_MOST_LOST, _LOST_CHARS = 20, 400
_TELLING = 4  # characters; a shorter message of the user may also begin an answer

TokenKind = Literal["context", "learned", "end", "sampled", "hidden"]


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one kind, with the text of each token.

    The kinds are:

    - context: tokens that are not trained.
    - learned: trained tokens.
    - end: trained tokens that end an answer.
    - sampled: no tokens, but a description of the text that the student will sample.
    - hidden: no tokens, but a text with the number of tokens that are not shown.
    """

    kind: TokenKind
    texts: tuple[str, ...]


@dataclass(frozen=True)
class TokenView:
    """The input of one model.

    - reader: the name of the model, such as "student".
    - tokens: number of tokens, including hidden tokens.
    - learned: number of trained tokens, including hidden tokens.
    - runs: the tokens that are shown.
    """

    reader: str
    tokens: int
    learned: int
    runs: tuple[TokenRun, ...]

    @property
    def counts(self) -> str:
        """The numbers of tokens and trained tokens as text.

        If the student will sample the answer, the text has no number of trained tokens.
        """
        is_sampled = any(run.kind == "sampled" for run in self.runs)
        learned = "" if is_sampled else f", {self.learned:,} learned"
        return f"{self.reader}: {self.tokens:,} tokens{learned}"


@dataclass(frozen=True)
class RecordPreview:
    """The preview of one record.

    - where: the place of the record, such as `row 3 of a.jsonl`.
    - problem: why the record is not used as it is; "" without a problem.
    - views: the input of each model.
    - lost: (part, text) of each part of the record that no token contains.
    """

    where: str
    problem: str
    views: tuple[TokenView, ...]
    lost: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Preview:
    """The preview of a job.

    - method: the method of the job.
    - warnings: sentences about faults in the data.
    - facts: (name, text) pairs, such as the number of records.
    - records: the records that are shown.
    """

    method: str
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    records: tuple[RecordPreview, ...]

    def to_json(self) -> str:
        """Return the preview as a JSON object in one line."""
        return json.dumps(asdict(self)) + "\n"

    def within(self, max_bytes: int) -> Preview:
        """Return the preview with as many of its first records as fit into `max_bytes` of JSON."""
        preview, count = self, len(self.records)
        while count and len(preview.to_json()) > max_bytes:
            count -= 1
            hidden = f"{len(self.records) - count} of {len(self.records)}, for their size"
            facts = (*self.facts, ("records not shown", f"{hidden}; distill preview shows all"))
            preview = replace(self, facts=facts, records=self.records[:count])
        return preview


_PREVIEW = TypeAdapter(Preview)


def parse_preview(document: str | bytes) -> Preview:
    """Parse the result of `Preview.to_json`. Raises ValueError for another text."""
    return _PREVIEW.validate_json(document)


@dataclass(frozen=True, eq=False)
class ModelInput:
    """The input of one model.

    - ids: token ids, int [T].
    - learned: whether each token is trained, bool [T].
    - reader: the name of the model.
    - sampled: a description of the text that the student samples after these tokens, or "".
    """

    tokenizer: Any
    ids: NDArray[Any]
    learned: NDArray[np.bool_]
    reader: str = "student"
    sampled: str = ""

    @classmethod
    def from_start(
        cls, tokenizer: Any, ids: NDArray[Any], start: int, reader: str = "student"
    ) -> ModelInput:
        """Return an input whose tokens from position `start` on are trained."""
        return cls(tokenizer, ids, np.arange(len(ids)) >= start, reader)


@dataclass(frozen=True)
class SurveyedRecord:
    """A record after tokenization.

    - where: the place of the record, such as `row 3 of a.jsonl`.
    - inputs: the input of each model, the student first; empty if the record is not used.
    - left_out: the reason why training skips the record, or "".
    - refused: the error with which training fails, or "".
    - lost: (part, text) of each part that no token contains.
    - others: (part, text) of messages of other roles, whose tokens should not be trained.
    - spelled: names of control tokens in the texts, which are read as characters.
    - data_set: the key of the record's data set.
    - records: number of records of the data set. For a store: number of sequences that a job with
      `epochs` trains on.
    """

    where: str
    inputs: tuple[ModelInput, ...] = ()
    left_out: str = ""
    refused: str = ""
    lost: tuple[tuple[str, str], ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    spelled: tuple[str, ...] = ()
    data_set: str = ""
    records: int = 0


def build_preview(
    method: str,
    surveyed: Iterable[SurveyedRecord],
    *,
    shown: int,
    ends: Mapping[int, str],
    facts: Iterable[tuple[str, str]] = (),
    warnings: Iterable[str] = (),
    max_left_out: float = 1.0,
    are_ended: bool = True,
) -> Preview:
    """Return a preview with counts of all records and with the first `shown` records.

    - surveyed: the records after tokenization.
    - ends: the tokens that end an answer, by id.
    - facts, warnings: entries to append to the facts and warnings of the preview.
    - max_left_out: share of skipped records of a data set above which a job fails.
    - are_ended: whether a trained answer must end with an end token. Pieces of packed text need
      none.
    """
    records, previews = 0, list[RecordPreview]()
    sizes, lost, wrong, spelled = (Counter[str]() for _ in range(4))
    left_out = dict[str, Counter[str]]()
    refused = answers = endless = learned = 0
    lengths = list[int]()
    for record in surveyed:
        records += 1
        refused += bool(record.refused)
        sizes[record.data_set] += 1
        if record.left_out:
            left_out.setdefault(record.data_set, Counter())[record.left_out] += 1
        lost.update({part for part, _ in record.lost})
        spelled.update(set(record.spelled))
        for student in record.inputs[:1]:
            lengths.append(len(student.ids))
            learned += int(student.learned.sum())
            wrong.update(set(_learned_parts(student, record.others)))
            last_ids = student.ids[student.learned & ~np.append(student.learned[1:], False)]
            answers += len(last_ids)
            endless += int((~np.isin(last_ids, list(ends))).sum())
        if len(previews) < shown:
            previews.append(_preview_record(record, ends))
    faults, of_all = list[str](), f"of {records:,} records"
    if refused:
        faults.append(f"{refused:,} {of_all} are refused, so the job will fail")
    for name, reasons in left_out.items():
        sentence, is_too_many = describe_left_out(reasons, sizes[name], max_left_out)
        fate = ", so the job will fail" if is_too_many else ""
        place = f"{name}: " if len(sizes) > 1 else ""
        faults.append(f"{place}{sentence}{fate}: {describe_counts(reasons)}")
    faults += [f"a {part} is missing from the input in {n:,} {of_all}" for part, n in lost.items()]
    faults += [
        f"a {part} is learned in {n:,} {of_all}; check the roles in the data and the parts that the"
        " chat template marks with {% generation %}"
        for part, n in wrong.items()
    ]
    faults += [
        f"the text {name!r} in {n:,} {of_all} is read as these characters, not as the control"
        ' token; if it should be the token, set "special": false for it in tokenizer.json'
        for name, n in spelled.items()
    ]
    if endless and are_ended:
        faults.append(
            f"{endless:,} of {answers:,} learned parts do not end with an end token: the student"
            " does not learn to stop there; check the chat template"
        )
    counts = [("records", f"{len(lengths):,} of {records:,} are used")]
    if lengths:
        middle, high = np.percentile(lengths, [50, 95])
        spread = f"median {middle:,.0f}, 95th percentile {high:,.0f}, longest {max(lengths):,}"
        counts.append(("tokens per record", spread))
    if learned:
        counts.append(("learned", f"{learned / sum(lengths):.0%} of the tokens"))
    named_ends = ", ".join(f"{text} (id {token_id})" for token_id, text in ends.items())
    return Preview(
        method,
        (*faults, *warnings),
        (*counts, ("end tokens", named_ends or "none"), *facts),
        tuple(previews),
    )


def _preview_record(record: SurveyedRecord, ends: Collection[int]) -> RecordPreview:
    problem = f"left out: {record.left_out}" if record.left_out else ""
    if record.spelled and not problem:
        problem = f"read as characters, not as control tokens: {', '.join(record.spelled)}"
    return RecordPreview(
        visible(record.where),
        visible(f"refused: {record.refused}" if record.refused else problem),
        tuple(_view_tokens(model_input, ends) for model_input in record.inputs),
        tuple((part, visible(text[:_LOST_CHARS])) for part, text in record.lost[:_MOST_LOST]),
    )


def _view_tokens(model_input: ModelInput, ends: Collection[int]) -> TokenView:
    ids, learned = model_input.ids.tolist(), model_input.learned.tolist()
    runs, position, shown = list[TokenRun](), 0, 0

    def add(kind: TokenKind, part: Sequence[int]) -> None:
        runs.append(TokenRun(kind, tuple(token_texts(model_input.tokenizer, part))))

    def hide(count: int) -> None:
        runs.append(TokenRun("hidden", (f"{count:,} more tokens",)))

    for kind, group in groupby(zip(ids, learned, strict=True), lambda token: _kind(token, ends)):
        part = [token_id for token_id, _ in group]
        if shown > _MOST:
            hide(len(ids) - position)
            break
        if len(part) <= _FIRST + _LAST:
            add(kind, part)
        else:
            add(kind, part[:_FIRST])
            hide(len(part) - _FIRST - _LAST)
            add(kind, part[-_LAST:])
        position, shown = position + len(part), shown + min(len(part), _FIRST + _LAST)
    if model_input.sampled:
        runs.append(TokenRun("sampled", (model_input.sampled,)))
    return TokenView(model_input.reader, len(ids), sum(learned), tuple(runs))


def _kind(token: tuple[int, bool], ends: Collection[int]) -> TokenKind:
    token_id, is_learned = token
    return "context" if not is_learned else "end" if token_id in ends else "learned"


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token.

    A token that is only a part of a character gets its name in the vocabulary.
    """
    texts = []
    for token_id, name in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        if str(name).startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"  # decoding removes the first space of a text
        texts.append(visible(str(name) if "\ufffd" in text or not text else text))
    return texts


def visible(text: str) -> str:
    """Escape the characters of a text that are not printable, except line breaks."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _learned_parts(model_input: ModelInput, others: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the part of each (part, text) whose text is at the start of a run of trained tokens."""
    edges = np.flatnonzero(np.diff(model_input.learned, prepend=False, append=False))
    spans = [
        _without_spaces(model_input.tokenizer.decode(model_input.ids[first:end]))
        for first, end in (edges.reshape(-1, 2) if others else ())
    ]
    for part, text in others:
        compact = _without_spaces(text)
        if len(compact) >= _TELLING and any(span.startswith(compact) for span in spans):
            yield part


def messages_of_others(
    prompt_format: PromptFormat, row: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Return (part, text) of each message in a row that is not an assistant message."""
    messages = messages_in(row.get(prompt_format.messages_column or ""))
    return tuple(
        (f"{message['role']} message", text_of_content(message.get("content")))
        for message in messages or ()
        if message["role"] != "assistant"
    )


def lost_in_row(
    prompt_format: PromptFormat, tokenizer: Any, row: Mapping[str, Any], *, is_answered: bool
) -> tuple[tuple[str, str], ...]:
    """Return (part, text) of each part of a row that the rendered text of the row does not contain.

    The parts are texts and reasoning of messages, names and arguments of tool calls, and names of
    tools. White space may differ. Without a chat template, no part is lost. `is_answered`: the
    rendered text ends with the last trained answer; otherwise it ends with the prompt.
    """
    if not prompt_format.renders(tokenizer):
        return ()
    try:
        conversation = prompt_format.conversation(row, "the record")
        conversation = conversation if is_answered else conversation.unanswered()
        read_part = conversation.up_to_answer() if is_answered else conversation
        rendered = prompt_format.rendered(
            tokenizer, read_part, "the record", add_answer_start=not is_answered
        )
    except InvalidInput:  # the record is refused
        return ()
    written, lost = _without_spaces(rendered), []
    source = _without_spaces("\0".join(text for _, text in _parts(read_part)))
    for part, text in _parts(conversation):
        escaped = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
        forms = {_without_spaces(form) for form in (text, *escaped)}
        # The argument of a call may also be in another message.
        expected = source.count(_without_spaces(text)) if part == "tool call" and text else 1
        if sum(map(written.count, forms)) < expected:
            pieces = re.split(r"(?<=>)|\n", text)
            missing = [piece for piece in pieces if _without_spaces(piece) not in written]
            lost.append((part, "\n".join(missing) or text))
    return tuple(lost)


def _parts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    for message in conversation.messages:
        role = message["role"]
        yield f"{role} message", text_of_content(message.get("content"))
        for key in REASONING:
            yield f"reasoning of the {role} message", str(message.get(key) or "")
        for text in _leaves(message.get("tool_calls")):
            yield "tool call", text
    for tool in conversation.tools or ():
        function = tool.get("function")
        named = function if isinstance(function, Mapping) else tool
        yield "tool", str(named.get("name", ""))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers in the value of `tool_calls`. Arguments may be JSON text."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            yield value
            return
    if isinstance(value, Mapping):
        value = [entry for key, entry in value.items() if key not in ("id", "type", "index")]
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _without_spaces(text: str) -> str:
    return "".join(text.split())
