"""Generates answers in this process, with a model in a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.utils.logging import disable_progress_bar

from clients.config.evaluation import ExamConfig
from clients.config.tables.common import StudentConfig
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from clients.data.tokens.tokenizer import answer_text
from protos.errors import InvalidInput
from student_trainer.exam.answer_store import (
    AnswerRequest,
    AnswerStore,
    ExamStopped,
    StoredAnswer,
    derive_seed,
)
from student_trainer.model.loading import load_model, load_tokenizer
from student_trainer.rollouts.sampler import SampledTokens, Sampler, rollout_noise
from student_trainer.rollouts.sampling_probe import probe_sampling

_BATCH_TOKENS = 65536


class LocalModel:
    """A local model that generates answers: in bfloat16 on a GPU, otherwise in float32."""

    def __init__(
        self, config: ExamConfig, model: str, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Load the model from the directory `model`.

        `is_stopped`: returns whether to stop; it is called for each token. Raises InvalidInput if
        the directory has no model that can sample.
        """
        student = StudentConfig(model=model, chat_template=config.student.chat_template)
        disable_progress_bar()
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
        probe = probe_sampling(loaded, self._tokenizer)
        if probe.fault is not None:
            raise InvalidInput(
                probe.fault,
                field="MODEL",
                hint="serve the model with another program, and use --endpoint",
            )
        self._sampler = Sampler(
            loaded,
            self._tokenizer,
            top_k=0,
            temperature=config.method.temperature or 1.0,
            top_p=config.method.top_p,
            equal_lengths=probe.equal_lengths,
        )

    def answer(self, requests: Sequence[AnswerRequest], store: AnswerStore) -> None:
        """Generate all answers in batches, and store the answers of each batch.

        The random numbers of an answer depend only on the seed, the question and the number of the
        answer, not on the batch. A resumed evaluation has the same batches as an uninterrupted one,
        and gets bit-identical answers on a CPU.

        Raises ExamStopped if `is_stopped` returns True. The answers of the current batch are then
        not stored.
        """
        max_tokens = self._config.method.max_new_tokens
        token_ids = self._encode_questions(requests, store)
        remaining = [request for request in requests if not store.is_refused(request[0])]
        remaining.sort(key=lambda request: -len(token_ids[request[0].number]))
        while remaining:
            longest = len(token_ids[remaining[0][0].number]) + max_tokens
            size = max(1, _BATCH_TOKENS // longest)
            batch, remaining = remaining[:size], remaining[size:]
            noise = None
            if self._config.method.temperature > 0:
                noise = [
                    rollout_noise(derive_seed(self._config.seed, q.number, n), 0, max_tokens)
                    for q, n in batch
                ]
            samples = self._sampler.write(
                [token_ids[question.number] for question, _ in batch],
                [max_tokens] * len(batch),
                noise,
                is_cancelled=self._is_stopped,
            )
            if self._is_stopped():
                raise ExamStopped
            store.add(*map(self._build_answer, batch, samples))

    def _encode_questions(
        self, requests: Sequence[AnswerRequest], store: AnswerStore
    ) -> dict[int, torch.Tensor]:
        """Return the token ids of each question, by the number of the question.

        A prompt that leaves no room for an answer is recorded as refused, because a model generates
        nonsense or fails beyond its maximum number of positions. Inference servers refuse such
        prompts too.
        """
        max_tokens, max_positions = self._config.method.max_new_tokens, self._max_positions
        token_ids: dict[int, torch.Tensor] = {}
        for question in {question.number: question for question, _ in requests}.values():
            ids = self._prompt_format.ids(self._tokenizer, question.conversation)
            token_ids[question.number] = torch.tensor(ids, dtype=torch.long)
            if max_positions is not None and len(ids) + max_tokens > max_positions:
                error = InvalidInput(
                    f"a prompt of {len(ids)} tokens and an answer of {max_tokens} exceed the"
                    f" {max_positions} tokens that the model can read",
                    field="--max-tokens",
                    hint=f"set the value to at most {max_positions - len(ids)}"
                    if len(ids) < max_positions
                    else f"remove prompts of {max_positions} tokens or more",
                )
                store.refuse(question, error)
        return token_ids

    def _build_answer(self, request: AnswerRequest, tokens: SampledTokens) -> StoredAnswer:
        question, sample = request
        text = answer_text(self._tokenizer, tokens.token_ids.tolist(), has_end=tokens.ended)
        return StoredAnswer(question.number, sample, text, len(tokens.token_ids), not tokens.ended)
