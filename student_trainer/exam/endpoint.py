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
from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.asking import Ask, Keep, Refusals, seed_of
from student_trainer.exam.questions import Question

API_KEY = "OPENAI_API_KEY"
TRIES = 8
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
_REFUSALS: Mapping[int, type[DistillError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
}
# After this many refused prompts without any answer, the error is not one of the prompts.
_TELLING = 3


class ModelEndpoint:
    """One model of an OpenAI-compatible server."""

    def __init__(self, config: ExamConfig, model: str) -> None:
        """Keep the address; connects later. The key is read from $OPENAI_API_KEY, if it is set.

        Raises InvalidInput if `config.endpoint` is not a valid address.
        """
        assert config.endpoint is not None, "the command asks for it"
        self._config = config
        self._model = model
        self._chat = config.api == "chat"
        path = "/chat/completions" if self._chat else "/completions"
        self._url = str(web_address(config.endpoint.rstrip("/") + path, "--endpoint"))

    def answer(self, asked: Sequence[Ask], keep: Keep, refusals: Refusals) -> None:
        """Request all answers and pass each one to `keep` when it arrives, in any order.

        Raises a DistillError that ends the evaluation; the answers passed to `keep` stay valid.
        """
        try:
            asyncio.run(self._answer(asked, keep, refusals))
        except ExceptionGroup as group:
            # Several requests may fail at once; the first of their errors is raised.
            faults = group.subgroup(DistillError)
            raise (faults or group).exceptions[0] from None

    async def _answer(self, asked: Sequence[Ask], keep: Keep, refusals: Refusals) -> None:
        waiting = iter(asked)
        width = min(self._config.in_flight, len(asked))
        header = key_header(API_KEY)
        async with (
            httpx.AsyncClient(
                headers=header,
                timeout=None,  # `_asked` limits the time of a whole answer instead
                limits=httpx.Limits(max_connections=width, max_keepalive_connections=width),
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(width):
                tasks.create_task(self._work(client, waiting, keep, refusals))

    async def _work(
        self, client: httpx.AsyncClient, waiting: Iterator[Ask], keep: Keep, refusals: Refusals
    ) -> None:
        for question, sample in waiting:
            if question in refusals:
                continue
            try:
                keep(await self._asked(client, question, sample))
            except InvalidInput as fault:
                refusals.add(question, fault)
                if len(refusals) >= _TELLING and not refusals.answered:
                    raise

    async def _asked(
        self, client: httpx.AsyncClient, question: Question, sample: int
    ) -> StoredAnswer:
        body = self._body(question, sample)
        for attempt in range(TRIES):
            pause = min(FIRST_PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS)
            try:
                async with asyncio.timeout(self._config.patience_seconds):
                    response = await client.post(self._url, json=body)
            except TimeoutError:
                fault = self._late()
            except (httpx.TransportError, httpx.DecodingError) as error:
                fault = self._unreachable(error)
            else:
                if response.status_code == 200:
                    return self._read(response, question, sample)
                fault = self._refusal(response)
                pause = max(pause, retry_after(response.headers))
            if not isinstance(fault, Unavailable | TimedOut):
                raise fault
            if attempt + 1 < TRIES:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        raise fault

    def _body(self, question: Question, sample: int) -> dict[str, Any]:
        config, asked = self._config, question.conversation
        text: dict[str, Any] = {"prompt": question.text}
        if self._chat:
            text = {"messages": list(asked.messages)}
            if asked.tools is not None:
                text["tools"] = list(asked.tools)
            if config.data is not None and config.data.template_arguments:
                text["chat_template_kwargs"] = config.data.template_arguments
        return {
            "model": self._model,
            **text,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": seed_of(config.seed, question.number, sample),
        }

    def _read(self, response: httpx.Response, question: Question, sample: int) -> StoredAnswer:
        try:
            document = response.json()
            choice = document["choices"][0]
            text = choice["message"]["content"] if self._chat else choice["text"]
            return StoredAnswer(
                prompt=question.number,
                sample=sample,
                # A lone surrogate cannot be encoded as UTF-8, so no file could hold it.
                text=str(text or "").encode("utf-8", "replace").decode(),
                tokens=int(document["usage"]["completion_tokens"]),
                truncated=choice["finish_reason"] == "length",
            )
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InvalidInput(
                f"{self._url} returned no completion: {_line(response.text)}",
                field="--endpoint",
                hint="give the address of an OpenAI-compatible server, such as http://HOST:PORT/v1",
            ) from error

    def _late(self) -> DistillError:
        return TimedOut(
            f"{self._url} returned no answer within {self._config.patience_seconds:g} s",
            hint="raise --patience or lower --in-flight, and run the same command to continue",
        )

    def _unreachable(self, error: httpx.RequestError) -> DistillError:
        what = str(error) or type(error).__name__
        return Unavailable(
            f"{self._url} cannot be reached: {what}", hint="run the same command to continue"
        )

    def _refusal(self, response: httpx.Response) -> DistillError:
        status = response.status_code
        told = f"{self._url} answered {status}: {_line(response.text)}"
        if status in (408, 429) or status >= 500:
            return Unavailable(told, hint="run the same command later to continue")
        if status in (401, 403):
            return _REFUSALS[status](told, hint=f"set the key in ${API_KEY}")
        if status == 404:
            return NotFound(
                told, field="MODEL", hint="use a model name that the server lists at /v1/models"
            )
        hint = "if the model has no chat template, use --api completions" if self._chat else ""
        return InvalidInput(told, field="--endpoint", hint=hint)


def _line(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= 300 else shown[:297] + "..."
