"""Converts prompts with reference answers to token sequences, for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.config.sft import SFTJob
from clients.config.tables.data import DataConfig
from clients.data.conversation import Conversation
from clients.data.prompt_format import (
    PromptFormat,
    check_chat_template,
    check_generation,
    default_template,
    template_text,
    warn_of_date,
)
from clients.data.template_parts import TemplateParts
from clients.data.tokens.answers import answered_ids, assistant_ids, completion_ids
from clients.data.tokens.lower_bound import tokens_by_length
from protos.errors import InvalidInput
from student_trainer.data.prompts import (
    ALL_IDS,
    ItemsOfSteps,
    ModelIds,
    Prompt,
    encoding_facts,
    load_items,
    no_items_error,
    require_tokens,
)
from student_trainer.data.record_table import Encoder, OmissionCounter
from student_trainer.data.records import PromptRecord, RecordReader
from student_trainer.data.sequence import MaskedSequence, TokenSequence


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence of tokens, some of which are learned.

    - token_ids: int32 [T].
    - start: index of the first learned token.
    - mask [T - start] bool: True for learned tokens; None if all tokens from `start` on are
      learned.
    - prompt: the tokens before the last answer, and the reference answer. The evaluation with
      `eval.metric` uses it.
    """

    token_ids: NDArray[np.int32]
    start: int
    mask: NDArray[np.bool_] | None
    prompt: Prompt

    @property
    def sequence(self) -> TokenSequence:
        """The same sequence as a TokenSequence, with torch tensors."""
        ids, weight = torch.from_numpy(self.token_ids).long(), self.prompt.weight
        if self.mask is None:
            return TokenSequence(ids, self.start, weight=weight)
        return MaskedSequence(ids, self.start, torch.from_numpy(self.mask), weight=weight)


def example_encoding(
    config: SFTJob, tokenizer: Any, model_ids: ModelIds = ALL_IDS
) -> tuple[RecordReader, Encoder[Example]]:
    """Return a reader of the job's records, and an encoder that converts records to examples.

    Records without an answer, and sequences of more than `method.max_tokens` tokens, are skipped
    and counted. Raises InvalidInput if the chat template does not suit the job.
    """
    check_chat_template(config.data.prompt_format, template_text(tokenizer.chat_template))
    learns_all_answers = config.method.train_on == "all"
    if learns_all_answers:
        check_generation(default_template(tokenizer.chat_template))
    encoder = _ExampleEncoder(
        config.data,
        tokenizer,
        config.method.max_tokens,
        model_ids,
        learns_all_answers=learns_all_answers,
    )
    reader = RecordReader(config.data, needs_answers=True, needs_questions=not learns_all_answers)
    return reader, encoder


def load_examples(
    config: SFTJob, tokenizer: Any, model_ids: ModelIds = ALL_IDS
) -> tuple[ItemsOfSteps[Example], list[Example]]:
    """Return the training examples and the held-out examples.

    Raises InvalidInput for the reasons of `load_items` and `example_encoding`.
    """
    warn_of_date(config.data.prompt_format, template_text(tokenizer.chat_template))
    return load_items(
        *example_encoding(config, tokenizer, model_ids),
        held_out=config.eval.prompts,
        seed=config.seed,
    )


class _ExampleEncoder:
    """Converts records to examples, and counts skipped records."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        max_tokens: int,
        model_ids: ModelIds,
        *,
        learns_all_answers: bool,
    ) -> None:
        """`learns_all_answers`: True: learn all assistant messages; False: learn only the last."""
        self._prompt_format: PromptFormat = data.prompt_format
        self._tokenizer = tokenizer
        self._parts = TemplateParts(self._prompt_format, tokenizer)
        self._max_tokens = max_tokens
        self._model_ids = model_ids
        self._learns_all_answers = learns_all_answers
        self._too_long = OmissionCounter(f"sequences longer than method.max_tokens = {max_tokens}")
        self._empty = OmissionCounter("records without an answer to learn")
        self.omissions = (self._too_long, self._empty)
        self.settings = (
            *("example", learns_all_answers, max_tokens, *model_ids.facts),
            *encoding_facts(self._prompt_format, tokenizer),
        )

    def is_doubtful(self, record: PromptRecord) -> bool:
        """Return whether `encode` may raise InvalidInput for this record.

        This is the case if:

        - the prompt may have no tokens,
        - a text may contain a token that the model does not have, or
        - the record has a kind of message part that no earlier record had.
        """
        conversation = _learned_part(self._prompt_format, record.conversation)
        if self._model_ids.may_lack(record) or self._parts.has_new(conversation):
            return True
        if self._prompt_format.messages_column is None:
            return not record.conversation.question.strip()
        messages = record.conversation.messages
        return self._learns_all_answers and bool(messages) and messages[0]["role"] == "assistant"

    def encode(self, record: PromptRecord, field: str) -> Example | None:
        """Return the example of a record; None if it is too long or has no answer.

        Raises InvalidInput, with `field`, if the prompt has no tokens or if the model lacks a
        token.
        """
        characters = record.conversation.characters
        if self._prompt_format.messages_column is None:
            characters += len(record.answer)
        if least_tokens := tokens_by_length(characters, self._max_tokens):
            self._too_long.add(least_tokens)
            return None
        ids, mask = self._encode_tokens(record)
        learned = np.flatnonzero(mask)
        if not len(learned):
            self._empty.add()
            return None
        start = int(learned[0])
        require_tokens(ids[:start], record.where, field)
        self._model_ids.require(ids, record.where, field)
        if len(ids) > self._max_tokens:
            self._too_long.add(len(ids))
            return None
        tokens = np.array(ids, dtype=np.int32)
        # The last answer starts after the last token that is not learned.
        answer_start = int(np.flatnonzero(~mask)[-1]) + 1
        prompt = Prompt(
            tokens[:answer_start], record.answer, text=record.text, weight=record.weight
        )
        return Example(tokens, start, None if answer_start == start else mask[start:], prompt)

    def _encode_tokens(self, record: PromptRecord) -> tuple[list[int], NDArray[np.bool_]]:
        """Return the token ids of a record, and a mask that is True for learned tokens.

        The mask has no True entry if the record has no answer.
        """
        prompt_format, tokenizer, conversation = (
            self._prompt_format,
            self._tokenizer,
            record.conversation,
        )
        self._parts.check(_learned_part(prompt_format, conversation), record.where)
        if self._learns_all_answers:
            return assistant_ids(prompt_format, tokenizer, conversation, record.where)
        if prompt_format.messages_column is not None:
            prompt_ids, answer_ids = answered_ids(
                prompt_format, tokenizer, conversation, record.where
            )
        else:
            prompt_ids = prompt_format.ids(tokenizer, conversation, record.where)
            answer_ids = completion_ids(prompt_format, tokenizer, record.answer)
        return prompt_ids + answer_ids, np.arange(len(prompt_ids) + len(answer_ids)) >= len(
            prompt_ids
        )

    def no_items_error(self, field: str) -> InvalidInput:
        """Return the error for data without a usable sequence."""
        return no_items_error(field, "sequence", self._too_long, "method.max_tokens")


def _learned_part(prompt_format: PromptFormat, conversation: Conversation) -> Conversation:
    """Return the messages that the chat template renders.

    For a conversation, these are the messages up to and including the last answer. For a text
    prompt, they are the prompt, because its answer is not rendered by the template.
    """
    return conversation if prompt_format.messages_column is None else conversation.up_to_answer()
