"""Renders conversations and finds the learned tokens with jinja2 and tokenizers alone.

It shares no code with the product or with transformers: an oracle for the token ids of training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tests.clients.data.fuzzing.tokenizer_files import BOS, EOS, PAD, SPECIAL

_OPEN, _CLOSE = "\ue000", "\ue001"  # around the answers of a template with {% generation %}
_SENTINEL = "sentinel"
# The names of a message's reasoning, the first one first.
REASONING = ("reasoning_content", "thinking", "reasoning")
Ids = list[int]


class Refusal(Exception):
    """The data or the template cannot be used; a job must say so."""


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}: marks what it contains."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 has it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals["raise_exception"] = _raise


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation, and the (begin, end) of answers that the template marks."""

    text: str
    answers: tuple[tuple[int, int], ...]


def render(
    template: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    start_answer: bool,
) -> Rendering:
    """Render a conversation. Raises Refusal if the template fails."""
    if isinstance(template, Mapping):
        template = template["tool_use" if tools and "tool_use" in template else "default"]
    try:
        marked = _ENVIRONMENT.from_string(template).render(
            messages=[_with_reasoning(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=start_answer,
            bos_token=BOS,
            eos_token=EOS,
            pad_token=PAD,
        )
    except Exception as error:
        raise Refusal("the template fails") from error
    text, answers, begin = "", [], 0
    for piece in marked.replace(_CLOSE, _OPEN + _CLOSE).split(_OPEN):
        if piece.startswith(_CLOSE):
            answers.append((begin, len(text)))
        begin = len(text)
        text += piece.removeprefix(_CLOSE)
    return Rendering(text, tuple(answers))


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose reasoning has all names that templates read."""
    present = [message[key] for key in REASONING if message.get(key) is not None]
    if not present:
        return message
    return {"thinking": present[0], **message, "reasoning_content": present[0]}


@dataclass(frozen=True)
class Reader:
    """The tokens of conversations and texts.

    backend: the tokenizer. continuation: the same one, which puts no space before a text.
    """

    backend: Tokenizer
    continuation: Tokenizer
    template: Any

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without special tokens of the tokenizer's own."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def prompt_of_text(self, text: str) -> Ids:
        """Return the ids of a prompt without a chat template."""
        ids = list(self.backend.encode(text).ids)
        if ids and ids[-1] == self._id(EOS):
            ids.pop()
        return ids[1:] if ids[:2] == [self._id(BOS)] * 2 else ids

    def answer(self, text: str, *, has_template: bool) -> Ids:
        """Return the ids of an answer up to its end, which is added if there is none."""
        end = self.end() if has_template else self._id(EOS)
        return self._with_end(
            list(self.continuation.encode(text, add_special_tokens=False).ids), end
        )

    def end(self) -> int:
        """Return the first special token that the template writes after an answer."""
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "zq"}]
        try:
            text = render(self.template, conversation, None, start_answer=False).text
        except Refusal:
            return self._id(EOS)
        rest = text.rpartition("zq")[2]
        places = {rest.find(token): token for token in SPECIAL if token in rest}
        return self._id(places[min(places)]) if places else self._id(EOS)

    def last_answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> tuple[Ids, Ids] | None:
        """Return the ids before the last answer, and those of it; None without an answer."""
        messages = up_to_answer(messages)
        if not messages:
            return None
        if len(messages) == 1:
            raise Refusal("nothing is before the answer")
        self.require_parts(messages, tools)
        keys = ("tool_calls", *REASONING)
        if not (messages[-1].get("content") or "").strip() and not any(
            messages[-1].get(key) for key in keys
        ):
            return None  # an end token alone is not learned
        prompt = render(self.template, messages[:-1], tools, start_answer=True).text
        text = render(self.template, messages, tools, start_answer=False).text
        question = render(self.template, messages[:-1], tools, start_answer=False).text
        if not text.startswith(prompt):
            raise Refusal("the answer changes the prompt")
        answer = messages[-1].get("content") or ""
        if not _has(text.removeprefix(prompt), answer) and not (
            text.startswith(question) and _has(text.removeprefix(question), answer)
        ):
            raise Refusal("the template drops a part of the answer")
        return self.encode(prompt), self.answer(text.removeprefix(prompt), has_template=True)

    def all_answers(
        self, messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> tuple[Ids, list[bool]] | None:
        """Return the ids of a conversation, and for each whether it is learned; None if none is."""
        messages = up_to_answer(messages)
        if not messages:
            return None
        self.require_parts(messages, tools)
        rendering = render(self.template, messages, tools, start_answer=False)
        encoding = self.backend.encode(rendering.text, add_special_tokens=False)
        ids = list(encoding.ids)
        learned = [
            any(begin < token_end and token_begin < end for begin, end in rendering.answers)
            for token_begin, token_end in encoding.offsets
        ]
        ends = {self.end(), self._id(EOS)}
        for place in range(1, len(ids)):
            if ids[place] in ends and ids[place - 1] not in ends and learned[place - 1]:
                learned[place] = True
        if True not in learned:
            return None
        length = len(learned) - learned[::-1].index(True)
        ids, learned = ids[:length], learned[:length]
        if ids[-1] not in ends:
            ids, learned = [*ids, self.end()], [*learned, True]
        return ids, learned

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Ids:
        """Return the ids of a prompt, up to the start of the assistant's message."""
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise Refusal("no message")
        self.require_parts(messages, tools)
        return self.encode(render(self.template, messages, tools, start_answer=True).text)

    def require_parts(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Raise Refusal if a part of the conversation does not come out of the template."""
        is_prompt = messages[-1]["role"] != "assistant"

        def require(changed: Sequence[Mapping[str, Any]], changed_tools: Any) -> None:
            text = render(self.template, changed, changed_tools, start_answer=is_prompt).text
            if _SENTINEL not in text:
                raise Refusal("a part is left out")

        if tools:
            require(messages, [_renamed(tool) for tool in tools])
        for number, message in enumerate(messages):
            changes: list[dict[str, Any]] = []
            if message["role"] in ("system", "developer", "tool") and message.get("content"):
                changes.append({"content": _SENTINEL})
            if calls := message.get("tool_calls"):
                changes.append({"tool_calls": [_renamed(call) for call in calls]})
            if number == len(messages) - 1 and message["role"] == "assistant":
                changes += [{key: _SENTINEL} for key in REASONING if message.get(key)]
            for change in changes:
                changed = [*messages[:number], {**message, **change}, *messages[number + 1 :]]
                require(changed, tools)

    def _id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        assert token_id is not None
        return token_id

    def _with_end(self, ids: Ids, end: int) -> Ids:
        ends = [place for place, token in enumerate(ids) if token in (end, self._id(EOS))]
        return ids[: ends[0] + 1] if ends else [*ids, end]


def up_to_answer(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages up to the assistant's last one."""
    places = [place for place, m in enumerate(messages) if m["role"] == "assistant"]
    return messages[: places[-1] + 1] if places else []


def _renamed(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool, or a call of one, with the sentinel as its name."""
    function = entry.get("function")
    if isinstance(function, Mapping):
        return {**entry, "function": {**function, "name": _SENTINEL}}
    return {**entry, "name": _SENTINEL}


def _has(text: str, part: str) -> bool:
    return _without_space(part) in _without_space(text)


def _without_space(text: Iterable[str]) -> str:
    return "".join("".join(text).split())
