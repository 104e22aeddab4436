"""Answers of a model in a Hugging Face directory, generated in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from clients.config.exam import ExamConfig
from clients.config.tables.common import StudentConfig
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from clients.data.tokens.tokenizer import answer_text
from protos.errors import InvalidInput
from student_trainer.exam.answer_requests import (
    AnswerRequest,
    ExamStopped,
    Refusals,
    StoreAnswers,
    derive_seed,
)
from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.model.loading import load_model, load_tokenizer
from student_trainer.rollouts.sampler import SampledTokens, Sampler, rollout_noise
from student_trainer.rollouts.sampling_probe import probe_sampling

_BATCH_TOKENS = 65536


class LocalModel:
    """Generates answers with a local model: in bfloat16 on a GPU, otherwise in float32."""

    def __init__(
        self, config: ExamConfig, model: str, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Load the model. Raises InvalidInput if the directory has no usable model.

        `is_stopped` is called for each token.
        """
        student = StudentConfig(model=model)
        self._config = config
        self._is_stopped = is_stopped
        try:
            self._tokenizer = load_tokenizer(student)
            loaded = load_model(student).eval()
        except InvalidInput as error:
            raise InvalidInput(error.message, field="MODEL", hint=error.hint) from error
        self._prompt_format = PromptFormat() if config.data is None else config.data.prompt_format
        check_chat_template(self._prompt_format, template_text(self._tokenizer.chat_template))
        shape = loaded.config.get_text_config()
        self._max_positions: int | None = getattr(shape, "max_position_embeddings", None)
        if torch.cuda.is_available():
            loaded = loaded.to("cuda", torch.bfloat16)
        self._sampler = Sampler(
            loaded,
            self._tokenizer,
            top_k=0,
            temperature=config.temperature or 1.0,
            top_p=config.top_p,
            equal_lengths=probe_sampling(loaded, self._tokenizer).equal_lengths,
        )

    def answer(
        self, requests: Sequence[AnswerRequest], store_answers: StoreAnswers, refusals: Refusals
    ) -> None:
        """Generate all answers in batches, and pass the answers of each batch to `store_answers`.

        A resumed evaluation has the same batches as an uninterrupted one, and gets bit-identical
        answers on a CPU. Raises ExamStopped, without the answers of the batch, if `is_stopped`
        returns True.

        The random numbers of an answer depend only on the seed, the question and the number of the
        answer, not on the batch.
        """
        token_ids = self._encode_questions(requests, refusals)
        remaining = [request for request in requests if request[0] not in refusals]
        remaining.sort(key=lambda request: -len(token_ids[request[0].number]))
        max_tokens = self._config.max_tokens
        while remaining:
            longest = len(token_ids[remaining[0][0].number]) + max_tokens
            size = max(1, _BATCH_TOKENS // longest)
            batch, remaining = remaining[:size], remaining[size:]
            self._answer_batch(
                batch, [token_ids[question.number] for question, _ in batch], store_answers
            )

    def _encode_questions(
        self, requests: Sequence[AnswerRequest], refusals: Refusals
    ) -> dict[int, torch.Tensor]:
        """Return the token ids of each question, by its number.

        Refuses a prompt that leaves no room for an answer, as servers do: a model generates
        nonsense or fails beyond its maximum number of positions.
        """
        max_tokens, max_positions = self._config.max_tokens, self._max_positions
        token_ids: dict[int, torch.Tensor] = {}
        for question, _ in requests:
            if question.number in token_ids:
                continue
            ids = self._prompt_format.ids(self._tokenizer, question.conversation)
            token_ids[question.number] = torch.tensor(ids, dtype=torch.long)
            if max_positions is not None and len(ids) + max_tokens > max_positions:
                message = f"a prompt of {len(ids)} tokens and an answer of {max_tokens} exceed the "
                refusals.add(
                    question,
                    InvalidInput(
                        f"{message}{max_positions} tokens that the model can read",
                        field="--max-tokens",
                        hint="lower it, or remove long prompts",
                    ),
                )
        return token_ids

    def _answer_batch(
        self,
        requests: Sequence[AnswerRequest],
        prompt_ids: Sequence[torch.Tensor],
        store_answers: StoreAnswers,
    ) -> None:
        max_tokens = self._config.max_tokens
        noise = None
        if self._config.temperature > 0:
            seeds = [
                derive_seed(self._config.seed, question.number, sample)
                for question, sample in requests
            ]
            noise = [rollout_noise(seed, 0, max_tokens) for seed in seeds]
        samples = self._sampler.write(
            prompt_ids, [max_tokens] * len(requests), noise, is_cancelled=self._is_stopped
        )
        if self._is_stopped():
            raise ExamStopped
        store_answers(*map(self._build_answer, requests, samples))

    def _build_answer(self, request: AnswerRequest, tokens: SampledTokens) -> StoredAnswer:
        question, sample = request
        text = answer_text(self._tokenizer, tokens.token_ids.tolist(), has_end=tokens.ended)
        return StoredAnswer(question.number, sample, text, len(tokens.token_ids), not tokens.ended)
