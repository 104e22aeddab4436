"""Converts the text or the conversation of a record to token ids, with or without a chat template.

Training, captures and evaluations share these functions and therefore use the same token ids.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clients.data.control_tokens import (
    encode_marked,
    mark_names_in,
    marked_ids,
)
from clients.data.conversation import TOOLS, Conversation, conversation_in
from clients.data.records import images_of, text_of
from protos.errors import InvalidInput

log = logging.getLogger(__name__)

# Arguments of chat templates that hold the date of today.
_DATES = ("date_string", "current_date")

# Roles of messages with instructions.
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class PromptFormat:
    """The format of a job's prompts. The attributes are keys of the table `data`.

    - messages_column: None if the prompt is the text in `prompt_column`.
    - input_column: column with a text that follows the prompt in a new line. An empty text is
      ignored.
    - completion_column: column with messages that follow the messages of `messages_column`.
    - image_column: None if prompts have no images.
    """

    prompt_column: str = "prompt"
    messages_column: str | None = None
    template: str = "{prompt}"
    system: str | None = None
    chat_template: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    image_column: str | None = None
    input_column: str | None = None
    completion_column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `conversation` reads. The first column must exist."""
        other_columns = (self.image_column, self.input_column, self.completion_column)
        existing = tuple(column for column in other_columns if column is not None)
        if self.messages_column is None:
            return (self.prompt_column, *existing)
        return (self.messages_column, TOOLS, *existing)

    def conversation(self, record: Mapping[str, Any], location: str) -> Conversation:
        """Return the conversation of a record. A final assistant message is included.

        If the prompt is a text, it is inserted into the template and becomes the user message.
        Raises InvalidInput if the column is missing or has another type, or if the record has a
        system message in addition to `system`.
        """
        column = self.image_column
        images = None if column is None else len(images_of(record, column, location))
        if self.messages_column is None:
            return self.conversation_of_text(self._prompt_text(record, location), images or 0)
        conversation = conversation_in(
            record, self.messages_column, location, images, self.completion_column
        )
        if self.system is not None and any(m["role"] in _SYSTEM for m in conversation.messages):
            raise InvalidInput(
                f"{location} has its own system message",
                field="data.system",
                hint="remove data.system or the message",
            )
        return self._with_system(conversation)

    def conversation_of_text(self, text: str, images: int = 0) -> Conversation:
        """Return a conversation with one user message: `text`, inserted into the template.

        `images`: number of images before the text.
        """
        prompt_text = self.template.replace("{prompt}", text)
        text_part = {"type": "text", "text": prompt_text}
        content = [*[{"type": "image"}] * images, text_part] if images else prompt_text
        return self._with_system(Conversation(({"role": "user", "content": content},)))

    def text(self, record: Mapping[str, Any], conversation: Conversation) -> str:
        """Return the text of the prompt for rewards, without the template.

        For a conversation, this is the last user message.
        """
        if self.messages_column is not None:
            return conversation.question
        return self._prompt_text(record, "the record")

    def _prompt_text(self, record: Mapping[str, Any], location: str) -> str:
        text = text_of(record, self.prompt_column, "data.prompt_column", location)
        if self.input_column is None or record.get(self.input_column) is None:
            return text
        more_text = text_of(record, self.input_column, "data.input_column", location)
        return f"{text}\n{more_text}" if more_text else text

    def renders(self, tokenizer: Any) -> bool:
        """Return whether prompts are rendered by the tokenizer's chat template."""
        return self.chat_template and bool(tokenizer.chat_template)

    def ids(self, tokenizer: Any, conversation: Conversation, location: str = "") -> list[int]:
        """Return the token ids of a prompt, up to the start of the assistant's next message.

        Without a chat template, these are the ids of the only message, without a final
        end-of-sequence token. Raises InvalidInput, with `location`, if the chat template fails.
        """
        if self.renders(tokenizer):
            marked = mark_names_in(tokenizer, conversation, location)
            text = self.rendered(tokenizer, marked, location, add_answer_start=True)
            return plain_ids(tokenizer, text, has_placeholders=marked is not conversation)
        ids: list[int] = tokenizer(conversation.messages[-1]["content"])["input_ids"]
        ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        # A text may begin with the start token that the tokenizer adds.
        start = tokenizer.bos_token_id
        return ids[1:] if start is not None and ids[:2] == [start, start] else ids

    def rendered(
        self, tokenizer: Any, conversation: Conversation, location: str, *, add_answer_start: bool
    ) -> str:
        """Return the text of a conversation, with the special tokens of the chat template.

        `add_answer_start`: whether the text ends with the start of the assistant's next message.
        Raises InvalidInput if the template fails on the conversation.
        """
        return str(
            self._apply_template(
                tokenizer, conversation, location, tokenize=False, add_answer_start=add_answer_start
            )
        )

    def tokenized(
        self, tokenizer: Any, conversation: Conversation, location: str
    ) -> Mapping[str, list[int]]:
        """Return `input_ids` and `assistant_masks` of a conversation, as transformers makes them.

        Names of control tokens in the texts are encoded as plain text. Raises InvalidInput if the
        chat template fails on the conversation, or if it does not mark the assistant tokens.
        """
        if isinstance(tokenizer.chat_template, Mapping):  # the template for tools may mark nothing
            check_generation(tokenizer.get_chat_template(None, conversation.tools))
        marked = mark_names_in(tokenizer, conversation, location)
        encoding = self._apply_template(
            tokenizer,
            marked,
            location,
            add_answer_start=False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, is_answer = encoding["input_ids"], encoding["assistant_masks"]
        if marked is conversation:
            return {"input_ids": ids, "assistant_masks": is_answer}
        text = self.rendered(tokenizer, marked, location, add_answer_start=False)
        # Count characters, because the ids of placeholders differ from the ids of the names.
        answer_characters = bytearray(len(text))
        for (start, end), mark in zip(encoding.encodings[0].offsets, is_answer, strict=True):
            if mark:
                answer_characters[start:end] = b"\1" * (end - start)
        marked_encoding = encode_marked(tokenizer, text)
        masks = [int(any(answer_characters[s:e])) for s, e in marked_encoding.offsets]
        return {"input_ids": list(marked_encoding.ids), "assistant_masks": masks}

    def _apply_template(
        self,
        tokenizer: Any,
        conversation: Conversation,
        location: str,
        *,
        add_answer_start: bool,
        **options: Any,
    ) -> Any:
        try:
            return tokenizer.apply_chat_template(
                list(conversation.messages),
                tools=None if conversation.tools is None else list(conversation.tools),
                add_generation_prompt=add_answer_start,
                **options,
                **self.template_arguments,
            )
        # A template may raise anything, such as ZeroDivisionError. It is rendered in a sandbox: one
        # that tries to reach Python internals ends here too.
        except Exception as error:
            suffix = f" on {location}" if location else ""
            raise InvalidInput(
                f"the chat template cannot be used{suffix}: {error}",
                field=self._messages_key,
                hint="correct the data, or the template: the file of student.chat_template or,"
                " without the key, chat_template.jinja in the model's directory",
            ) from error

    @property
    def _messages_key(self) -> str:
        """The key of the job file that an error names if a chat template rejects the messages."""
        if self.messages_column is not None:
            return "data.messages_column"
        return "student.model" if self.system is None else "data.system"

    def _with_system(self, conversation: Conversation) -> Conversation:
        if self.system is None:
            return conversation
        message = {"role": "system", "content": self.system}
        return replace(conversation, messages=(message, *conversation.messages))


def check_generation(template: str | None) -> None:
    """Raise InvalidInput if a chat template does not mark the assistant tokens."""
    if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template or "") is None:
        raise InvalidInput(
            "the tokenizer's chat template has no {% generation %}, which marks the assistant's"
            " messages",
            field="method.train_on",
            hint="remove the key to train on the last message, or add {% generation %} to the"
            " template",
        )


def plain_ids(tokenizer: Any, text: str, *, has_placeholders: bool = False) -> list[int]:
    """Return the token ids of a text, without adding special tokens.

    `has_placeholders`: the text is a result of `mark_names`.
    """
    if has_placeholders:
        return marked_ids(tokenizer, text)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def check_chat_template(prompt_format: PromptFormat, template: str | None) -> None:
    """Raise InvalidInput if the tokenizer's chat template is incompatible with the prompt format.

    `template`: the text of the chat template; None if the tokenizer has none. The error occurs if a
    key needs a template and there is none, or if the template does not use an argument of the job.
    """
    key_is_set = {
        "data.messages_column": prompt_format.messages_column is not None,
        "data.system": prompt_format.system is not None,
        "data.template_arguments": bool(prompt_format.template_arguments),
        "data.image_column": prompt_format.image_column is not None,
    }
    if not template:
        for key in (key for key, is_set in key_is_set.items() if is_set):
            raise InvalidInput(
                "the tokenizer has no chat template, which this key needs",
                field=key,
                hint="use the tokenizer of an instruct model, name a .jinja file in"
                " student.chat_template, or remove the key",
            )
        return
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    if prompt_format.image_column is not None and "image" not in words:
        raise InvalidInput(
            "the chat template of the tokenizer does not support images",
            field="data.image_column",
            hint="choose a vision-language model",
        )
    for name in prompt_format.template_arguments:
        if name not in words:
            similar_names = difflib.get_close_matches(name, sorted(words), n=1)
            raise InvalidInput(
                f"the chat template of the tokenizer has no argument {name!r}",
                field="data.template_arguments",
                hint=f"did you mean {similar_names[0]!r}?" if similar_names else "remove the key",
            )


def warn_of_date(prompt_format: PromptFormat, template: str | None) -> None:
    """Log a warning if the chat template writes the current date."""
    if warning := date_warning(prompt_format, template):
        log.warning("%s", warning)


def date_warning(prompt_format: PromptFormat, template: str | None) -> str:
    """Return a warning if the chat template writes the current date, otherwise ""."""
    if not prompt_format.chat_template or "strftime_now" not in (template or ""):
        return ""
    # Llama and SmolLM take the date as an argument, and write today's without it.
    name = next((name for name in _DATES if name in str(template)), None)
    if name in prompt_format.template_arguments:
        return ""
    remedy = f'; data.template_arguments = {{ {name} = "26 Jul 2024" }} fixes it' if name else ""
    return (
        "the chat template writes today's date, so that the same record has other tokens tomorrow"
        f"{remedy}"
    )


def template_text(chat_template: Any) -> str | None:
    """Return the text of a tokenizer's chat template; None if there is none.

    Several named templates are joined to one text.
    """
    if isinstance(chat_template, Mapping):
        chat_template = "\n".join(str(template) for template in chat_template.values())
    return chat_template or None


def default_template(chat_template: Any) -> str | None:
    """Return the chat template for prompts without tools; None if there is none.

    If there are several named templates, this is the template with the name "default".
    """
    if isinstance(chat_template, Mapping):
        chat_template = chat_template.get("default")
    return chat_template or None
