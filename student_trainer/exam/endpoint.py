"""Requests answers from an OpenAI-compatible server. Many requests are in flight at the same time.

If a retry may help, a request is tried up to 12 times with growing pauses; see WebClient. The
evaluation ends if all tries fail, if the server does not know the model (404), or if the server
rejects the key (401, 403). After any other error, the prompt is recorded as refused, and the
evaluation continues. The evaluation also ends if three prompts are refused before the first answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from clients.config.evaluation import ExamConfig
from clients.data.outside import parse_ids, parse_json, parse_text
from protos.errors import (
    DistillError,
    Forbidden,
    InvalidInput,
    NotFound,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from protos.rpc.web_client import WebAnswer, WebClient, parse_web_address
from student_trainer.exam.answer_store import (
    AnswerRequest,
    AnswerStore,
    StoredAnswer,
    derive_seed,
)
from student_trainer.exam.questions import Question

API_KEY = "OPENAI_API_KEY"
MAX_ATTEMPTS = 12
_MAX_BYTES = 64 << 20
# With this many refused prompts and no answer, the cause is not the prompts: stop.
_MAX_REFUSALS = 3


class ModelEndpoint:
    """Requests answers from one model of an OpenAI-compatible server."""

    def __init__(self, config: ExamConfig, model: str) -> None:
        """Store the settings. Opens no connection yet.

        The key is read from $OPENAI_API_KEY, if this variable is set. Raises InvalidInput if
        `config.endpoint` is not a valid address.
        """
        assert config.endpoint is not None, "the command requires an endpoint"
        self._config = config
        self._model = model
        self._is_chat = config.api == "chat"
        path = "/chat/completions" if self._is_chat else "/completions"
        self._url = parse_web_address(config.endpoint.rstrip("/") + path, "--endpoint")

    def answer(self, requests: Sequence[AnswerRequest], store: AnswerStore) -> None:
        """Request all answers, and store each answer when it arrives. Answers arrive in any order.

        Raises a DistillError if the evaluation must end. The answers stored until then remain
        valid.
        """
        try:
            asyncio.run(self._answer(requests, store))
        except ExceptionGroup as group:
            # Several requests may fail at once; the first of their errors is raised.
            distill_errors = group.subgroup(DistillError)
            raise (distill_errors or group).exceptions[0] from None

    async def _answer(self, requests: Sequence[AnswerRequest], store: AnswerStore) -> None:
        remaining_requests = iter(requests)
        in_flight = self._config.in_flight
        async with (
            WebClient(
                self._url,
                attempts=MAX_ATTEMPTS,
                answer_seconds=self._config.patience_seconds,
                connections=in_flight,
                max_bytes=_MAX_BYTES,
                key_variable=API_KEY,
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(min(in_flight, len(requests))):
                tasks.create_task(self._run_worker(client, remaining_requests, store))

    async def _run_worker(
        self, client: WebClient, remaining_requests: Iterator[AnswerRequest], store: AnswerStore
    ) -> None:
        for question, sample in remaining_requests:
            if store.is_refused(question):
                continue
            try:
                store.add(await self._request_answer(client, question, sample))
            except InvalidInput as error:
                store.refuse(question, error)
                store.require_answers(_MAX_REFUSALS)

    async def _request_answer(
        self, client: WebClient, question: Question, sample: int
    ) -> StoredAnswer:
        try:
            answer = await client.request("POST", body=self.build_body(question, sample))
        except (Unavailable, TimedOut) as error:
            error.hint = "run the same command to continue"
            if isinstance(error, TimedOut):
                error.hint = f"raise --patience or lower --in-flight, and {error.hint}"
            raise
        if answer.status != 200:
            raise self._build_status_error(answer)
        try:
            document = parse_json(answer.body)
            choice = document["choices"][0]
            text = choice["message"]["content"] if self._is_chat else choice["text"]
            [tokens] = parse_ids([document["usage"]["completion_tokens"]])
            return StoredAnswer(
                prompt=question.number,
                sample=sample,
                text="" if text is None else parse_text(text),
                tokens=int(tokens),
                truncated=choice["finish_reason"] == "length",
            )
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInput(
                f"{self._url} returned no completion: {answer.text}",
                field="--endpoint",
                hint="give the address of an OpenAI-compatible server, such as http://HOST:PORT/v1",
            ) from error

    def build_body(self, question: Question, sample: int) -> dict[str, Any]:
        """Return the body of the request for answer number `sample` to a question."""
        config, conversation = self._config, question.conversation
        prompt_fields: dict[str, Any] = {"prompt": question.text}
        if self._is_chat:
            prompt_fields = {"messages": list(conversation.messages)}
            if conversation.tools is not None:
                prompt_fields["tools"] = list(conversation.tools)
            if config.data is not None and config.data.template_arguments:
                prompt_fields["chat_template_kwargs"] = config.data.template_arguments
        return {
            "model": self._model,
            **prompt_fields,
            "max_tokens": config.method.max_new_tokens,
            "temperature": config.method.temperature,
            "top_p": config.method.top_p,
            "seed": derive_seed(config.seed, question.number, sample),
        }

    def _build_status_error(self, answer: WebAnswer) -> DistillError:
        message = f"{self._url} answered {answer.status}: {answer.text}"
        if answer.is_temporary:
            return Unavailable(message, hint="run the same command later to continue")
        if answer.status in (401, 403):
            refusal = Unauthenticated if answer.status == 401 else Forbidden
            return refusal(message, hint=f"set the key in ${API_KEY}")
        if answer.status == 404:
            hint = "use a model name that the server lists at /v1/models"
            return NotFound(message, field="MODEL", hint=hint)
        hint = "if the model has no chat template, use --api completions" if self._is_chat else ""
        return InvalidInput(message, field="--endpoint", hint=hint)
