"""Answers of an OpenAI-compatible server, many requests at once.

A request is retried up to 8 times with exponential, jittered pauses if a retry may help: no
connection, an incomplete response, a timeout, status 408, 429 or 5xx. The evaluation ends if the
retries fail, if the server does not know the model (404), or if it rejects the key (401, 403). Any
other error refuses its prompt only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from clients.config.exam import ExamConfig
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
from protos.rpc.http_keys import key_header, retry_after
from protos.rpc.web_address import web_address
from student_trainer.exam.answer_requests import AnswerRequest, Refusals, StoreAnswers, derive_seed
from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.questions import Question

API_KEY = "OPENAI_API_KEY"
MAX_ATTEMPTS = 8
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
_REFUSALS: Mapping[int, type[DistillError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
}
# With this many refused prompts and no answer, the cause is not the prompts: stop.
_MAX_REFUSALS = 3


class ModelEndpoint:
    """One model of an OpenAI-compatible server."""

    def __init__(self, config: ExamConfig, model: str) -> None:
        """Set the address; connects later. The key is read from $OPENAI_API_KEY, if it is set.

        Raises InvalidInput if `config.endpoint` is not a valid address.
        """
        assert config.endpoint is not None, "the command asks for it"
        self._config = config
        self._model = model
        self._is_chat = config.api == "chat"
        path = "/chat/completions" if self._is_chat else "/completions"
        self._url = str(web_address(config.endpoint.rstrip("/") + path, "--endpoint"))

    def answer(
        self, requests: Sequence[AnswerRequest], store_answers: StoreAnswers, refusals: Refusals
    ) -> None:
        """Request all answers and pass each to `store_answers` when it arrives, in any order.

        Raises a DistillError that ends the evaluation; stored answers stay valid.
        """
        try:
            asyncio.run(self._answer(requests, store_answers, refusals))
        except ExceptionGroup as group:
            # Several requests may fail at once; the first of their errors is raised.
            distill_errors = group.subgroup(DistillError)
            raise (distill_errors or group).exceptions[0] from None

    async def _answer(
        self, requests: Sequence[AnswerRequest], store_answers: StoreAnswers, refusals: Refusals
    ) -> None:
        remaining_requests = iter(requests)
        worker_count = min(self._config.in_flight, len(requests))
        header = key_header(API_KEY)
        async with (
            httpx.AsyncClient(
                headers=header,
                timeout=None,  # `_request_answer` limits the time of a full answer instead
                limits=httpx.Limits(
                    max_connections=worker_count, max_keepalive_connections=worker_count
                ),
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(worker_count):
                tasks.create_task(
                    self._run_worker(client, remaining_requests, store_answers, refusals)
                )

    async def _run_worker(
        self,
        client: httpx.AsyncClient,
        remaining_requests: Iterator[AnswerRequest],
        store_answers: StoreAnswers,
        refusals: Refusals,
    ) -> None:
        for question, sample in remaining_requests:
            if question in refusals:
                continue
            try:
                store_answers(await self._request_answer(client, question, sample))
            except InvalidInput as error:
                refusals.add(question, error)
                if len(refusals) >= _MAX_REFUSALS and not refusals.answered:
                    raise

    async def _request_answer(
        self, client: httpx.AsyncClient, question: Question, sample: int
    ) -> StoredAnswer:
        body = self._build_body(question, sample)
        for attempt in range(MAX_ATTEMPTS):
            pause = min(FIRST_PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS)
            try:
                async with asyncio.timeout(self._config.patience_seconds):
                    response = await client.post(self._url, json=body)
            except TimeoutError:
                failure = self._timeout_error()
            except (httpx.TransportError, httpx.DecodingError) as error:
                failure = self._connection_error(error)
            else:
                if response.status_code == 200:
                    return self._parse_answer(response, question, sample)
                failure = self._status_error(response)
                pause = max(pause, retry_after(response.headers))
            if not isinstance(failure, Unavailable | TimedOut):
                raise failure
            if attempt + 1 < MAX_ATTEMPTS:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        raise failure

    def _build_body(self, question: Question, sample: int) -> dict[str, Any]:
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
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": derive_seed(config.seed, question.number, sample),
        }

    def _parse_answer(
        self, response: httpx.Response, question: Question, sample: int
    ) -> StoredAnswer:
        try:
            document = parse_json(response.content)
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
                f"{self._url} returned no completion: {_shorten(response.text)}",
                field="--endpoint",
                hint="give the address of an OpenAI-compatible server, such as http://HOST:PORT/v1",
            ) from error

    def _timeout_error(self) -> DistillError:
        return TimedOut(
            f"{self._url} returned no answer within {self._config.patience_seconds:g} s",
            hint="raise --patience or lower --in-flight, and run the same command to continue",
        )

    def _connection_error(self, error: httpx.RequestError) -> DistillError:
        reason = str(error) or type(error).__name__
        return Unavailable(
            f"{self._url} cannot be reached: {reason}", hint="run the same command to continue"
        )

    def _status_error(self, response: httpx.Response) -> DistillError:
        status = response.status_code
        message = f"{self._url} answered {status}: {_shorten(response.text)}"
        if status in (408, 429) or status >= 500:
            return Unavailable(message, hint="run the same command later to continue")
        if status in (401, 403):
            return _REFUSALS[status](message, hint=f"set the key in ${API_KEY}")
        if status == 404:
            return NotFound(
                message, field="MODEL", hint="use a model name that the server lists at /v1/models"
            )
        hint = "if the model has no chat template, use --api completions" if self._is_chat else ""
        return InvalidInput(message, field="--endpoint", hint=hint)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
