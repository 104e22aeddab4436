"""Answers of a model in a Hugging Face directory, generated in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from clients.config.exam import ExamConfig
from clients.config.tables.common import StudentConfig
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from protos.errors import InvalidInput
from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.asking import Ask, Keep, Refusals, Stopped, seed_of
from student_trainer.model.loading import load_model, load_tokenizer
from student_trainer.rollouts.sampler import SampledTokens, Sampler, noise_of

_TOKENS_OF_A_BATCH = 65536


class LocalModel:
    """Generates answers with a local model: in bfloat16 on a GPU, otherwise in float32."""

    def __init__(
        self, config: ExamConfig, model: str, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Load the model. Raises InvalidInput if the directory has no usable model.

        `is_stopped` is asked for each token.
        """
        student = StudentConfig(model=model)
        self._config = config
        self._is_stopped = is_stopped
        try:
            self._tokenizer = load_tokenizer(student)
            loaded = load_model(student).eval()
        except InvalidInput as error:
            raise InvalidInput(error.message, field="MODEL", hint=error.hint) from error
        self._form = PromptFormat() if config.data is None else config.data.prompt_format
        check_chat_template(self._form, template_text(self._tokenizer.chat_template))
        shape = loaded.config.get_text_config()
        self._positions: int | None = getattr(shape, "max_position_embeddings", None)
        if torch.cuda.is_available():
            loaded = loaded.to("cuda", torch.bfloat16)
        self._sampler = Sampler(
            loaded,
            self._tokenizer,
            top_k=0,
            temperature=config.temperature or 1.0,
            top_p=config.top_p,
        )

    def answer(self, asked: Sequence[Ask], keep: Keep, refusals: Refusals) -> None:
        """Generate all answers in batches, and pass those of a batch to `keep` together.

        So an evaluation that was killed goes on with the batches that it would have had, and comes
        to the same bits on a CPU. Raises Stopped, without the answers of the batch, if it is asked
        to stop.

        The random numbers of an answer depend only on the seed, the question and the number of the
        answer, not on the batch.
        """
        encoded = self._encoded(asked, refusals)
        waiting = [one for one in asked if one[0] not in refusals]
        waiting.sort(key=lambda one: -len(encoded[one[0].number]))
        most = self._config.max_tokens
        while waiting:
            longest = len(encoded[waiting[0][0].number]) + most
            size = max(1, _TOKENS_OF_A_BATCH // longest)
            batch, waiting = waiting[:size], waiting[size:]
            self._batch(batch, [encoded[question.number] for question, _ in batch], keep)

    def _encoded(self, asked: Sequence[Ask], refusals: Refusals) -> dict[int, torch.Tensor]:
        """Return the token ids of each question, by its number.

        Refuses a prompt that leaves no room for an answer, as servers do: beyond its positions a
        model generates nonsense or fails.
        """
        most, positions = self._config.max_tokens, self._positions
        encoded: dict[int, torch.Tensor] = {}
        for question, _ in asked:
            if question.number in encoded:
                continue
            ids = self._form.ids(self._tokenizer, question.conversation)
            encoded[question.number] = torch.tensor(ids, dtype=torch.long)
            if positions is not None and len(ids) + most > positions:
                told = f"a prompt of {len(ids)} tokens and an answer of {most} exceed the "
                refusals.add(
                    question,
                    InvalidInput(
                        f"{told}{positions} tokens that the model can read",
                        field="--max-tokens",
                        hint="lower it, or remove long prompts",
                    ),
                )
        return encoded

    def _batch(
        self,
        asked: Sequence[Ask],
        before: Sequence[torch.Tensor],
        keep: Keep,
    ) -> None:
        most = self._config.max_tokens
        noise = None
        if self._config.temperature > 0:
            seeds = [seed_of(self._config.seed, question.number, n) for question, n in asked]
            noise = [noise_of(seed, 0, most) for seed in seeds]
        written = self._sampler.write(
            before, [most] * len(asked), noise, is_cancelled=self._is_stopped
        )
        if self._is_stopped():
            raise Stopped
        keep(*map(self._answer_of, asked, written))

    def _answer_of(self, asked: Ask, one: SampledTokens) -> StoredAnswer:
        question, sample = asked
        text = str(self._tokenizer.decode(one.token_ids, skip_special_tokens=True))
        return StoredAnswer(question.number, sample, text, len(one.token_ids), not one.ended)
