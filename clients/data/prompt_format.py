"""From a record to token ids: text or a conversation, with or without a chat template.

Training, captures and evaluations share these functions, so that all see the same token ids.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clients.data.conversation import TOOLS, Conversation, conversation_in
from clients.data.records import images_of, text_of
from protos.errors import InvalidInput

# Roles of messages that say how to behave.
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class PromptFormat:
    """How the records of a job become prompts; the keys of its table `data` of the same names.

    messages_column: None if the prompt is the text in `prompt_column`. image_column: None if
    prompts have no images.
    """

    prompt_column: str = "prompt"
    messages_column: str | None = None
    template: str = "{prompt}"
    system: str | None = None
    chat_template: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    image_column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `conversation` reads; the first one must exist."""
        of_images = () if self.image_column is None else (self.image_column,)
        if self.messages_column is None:
            return (self.prompt_column, *of_images)
        return (self.messages_column, TOOLS, *of_images)

    def conversation(self, record: Mapping[str, Any], where: str) -> Conversation:
        """Return the conversation of a record; it may end with the assistant's answer.

        A text becomes the user's message, with the template. Raises InvalidInput if the column is
        missing or holds something else, or if the record has a system message besides `system`.
        """
        column = self.image_column
        images = None if column is None else len(images_of(record, column, where))
        if self.messages_column is None:
            text = text_of(record, self.prompt_column, "data.prompt_column", where)
            return self.asked(text, images or 0)
        found = conversation_in(record, self.messages_column, where, images)
        if self.system is not None and any(m["role"] in _SYSTEM for m in found.messages):
            raise InvalidInput(
                f"{where} has a system message of its own",
                field="data.system",
                hint="leave data.system out, or remove the message",
            )
        return self._with_system(found)

    def asked(self, text: str, images: int = 0) -> Conversation:
        """Return the conversation that asks `text`: one user message, with the template.

        `images`: number of images before the text.
        """
        asked = self.template.replace("{prompt}", text)
        text_part = {"type": "text", "text": asked}
        content = [*[{"type": "image"}] * images, text_part] if images else asked
        return self._with_system(Conversation(({"role": "user", "content": content},)))

    def text(self, record: Mapping[str, Any], conversation: Conversation) -> str:
        """Return the text of the prompt for rewards: before the template, the last user message."""
        if self.messages_column is not None:
            return conversation.question
        return text_of(record, self.prompt_column, "data.prompt_column", "the record")

    def renders(self, tokenizer: Any) -> bool:
        """Return whether prompts go through the tokenizer's chat template."""
        return self.chat_template and bool(tokenizer.chat_template)

    def ids(self, tokenizer: Any, conversation: Conversation, where: str = "") -> list[int]:
        """Return the token ids of a prompt, up to the start of the assistant's next message.

        Without a chat template they are those of the only message; a final end-of-sequence token is
        removed, because the completion follows. Raises InvalidInput, with `where`, if the chat
        template fails.
        """
        if self.renders(tokenizer):
            return plain_ids(tokenizer, self.rendered(tokenizer, conversation, where, ask=True))
        ids: list[int] = tokenizer(conversation.messages[-1]["content"])["input_ids"]
        return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids

    def rendered(self, tokenizer: Any, conversation: Conversation, where: str, *, ask: bool) -> str:
        """Return the text of a conversation, with the special tokens of the chat template.

        `ask`: end with the start of the assistant's next message. Raises InvalidInput if the
        template fails on the conversation.
        """
        return str(self._applied(tokenizer, conversation, where, tokenize=False, ask=ask))

    def tokenized(
        self, tokenizer: Any, conversation: Conversation, where: str
    ) -> Mapping[str, list[int]]:
        """Return `input_ids` and `assistant_masks` of a conversation, as transformers makes them.

        Raises InvalidInput as `rendered` does.
        """
        made = self._applied(
            tokenizer,
            conversation,
            where,
            ask=False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return {name: made[name] for name in ("input_ids", "assistant_masks")}

    def _applied(
        self, tokenizer: Any, conversation: Conversation, where: str, *, ask: bool, **options: Any
    ) -> Any:
        from jinja2 import TemplateError

        try:
            return tokenizer.apply_chat_template(
                list(conversation.messages),
                tools=None if conversation.tools is None else list(conversation.tools),
                add_generation_prompt=ask,
                **options,
                **self.template_arguments,
            )
        except (TemplateError, ValueError, TypeError) as error:
            # transformers renders templates in a sandbox: a template that tries to reach Python
            # internals ends here too.
            told = f" on {where}" if where else ""
            raise InvalidInput(
                f"the model's chat template cannot be used{told}: {error}",
                field=self._key_of_messages,
                hint="correct the data, or chat_template.jinja in its directory, or choose another"
                " model",
            ) from error

    @property
    def _key_of_messages(self) -> str:
        """The key behind the messages that a chat template rejects."""
        if self.messages_column is not None:
            return "data.messages_column"
        return "student.model" if self.system is None else "data.system"

    def _with_system(self, conversation: Conversation) -> Conversation:
        if self.system is None:
            return conversation
        message = {"role": "system", "content": self.system}
        return replace(conversation, messages=(message, *conversation.messages))


def check_generation(template: str | None) -> None:
    """Raise InvalidInput if a chat template does not mark what the assistant writes."""
    if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template or "") is None:
        raise InvalidInput(
            "the tokenizer's chat template has no {% generation %}, which marks the assistant's"
            " messages",
            field="method.train_on",
            hint="leave it out to train on the last message, or add {% generation %} to the"
            " template",
        )


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text without adding special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def check_chat_template(form: PromptFormat, template: str | None) -> None:
    """Raise InvalidInput if the tokenizer's chat template does not fit the keys of `form`.

    `template`: the text of the chat template; None if the tokenizer has none, which is refused if a
    key needs one. An argument that the template never names is refused too.
    """
    needed = {
        "data.messages_column": form.messages_column is not None,
        "data.system": form.system is not None,
        "data.template_arguments": bool(form.template_arguments),
        "data.image_column": form.image_column is not None,
    }
    if not template:
        for key in (key for key, is_set in needed.items() if is_set):
            raise InvalidInput(
                "the tokenizer has no chat template, which this key needs",
                field=key,
                hint="use the tokenizer of an instruct model, or leave the key out",
            )
        return
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    if form.image_column is not None and "image" not in words:
        raise InvalidInput(
            "the chat template of the tokenizer writes no images",
            field="data.image_column",
            hint="choose a model of images and text",
        )
    for name in form.template_arguments:
        if name not in words:
            near = difflib.get_close_matches(name, sorted(words), n=1)
            raise InvalidInput(
                f"the chat template of the tokenizer reads no argument {name!r}",
                field="data.template_arguments",
                hint=f"did you mean {near[0]!r}?" if near else "leave it out",
            )


def template_text(chat_template: Any) -> str | None:
    """Return the text of a tokenizer's chat template; of several by name, of all of them."""
    if isinstance(chat_template, Mapping):
        chat_template = "\n".join(str(one) for one in chat_template.values())
    return chat_template or None
