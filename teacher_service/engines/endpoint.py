"""The endpoint engine: rows from a third-party HTTP server, such as vLLM.

The teacher service adds a cache, a fair queue and the encoding of rows for many students. The
engine refuses requests that the server cannot compute, see `EngineLimits`: temperatures other than
1, tail samples, and ids chosen by a student if the server cannot score given ids.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from clients.data.tokens.tokenizer import default_template_in
from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos.errors import Corrupt, DistillError, InvalidInput
from protos.rows.checks import check_rows
from protos.rows.codec import RowBlock
from teacher_service.engines.base import (
    EngineLimits,
    QuerySchedule,
    ScoringEngineInfo,
    compute_fingerprint,
)
from teacher_service.engines.endpoint_http import HttpEndpoint, RequestRejected
from teacher_service.engines.endpoint_wire import (
    CHOSEN_IDS,
    COMPLETIONS,
    ECHO,
    VLLM,
    LikeliestWire,
    build_chosen_ids_body,
    read_chosen_ids_rows,
)
from teacher_service.models.files import model_directory
from teacher_service.models.loading import load_vocabulary

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# The maximum length for a server that does not report how many tokens it reads.
_MAX_LENGTH = 4096
_MAX_VOCABULARY = 1 << 22  # no vocabulary is larger


class EndpointEngine:
    """A model behind the HTTP interface of vLLM, or behind another server that echoes prompts.

    The server does not identify its weights: the fingerprint covers the model's name on the server,
    its limits and the tokenizer. If the weights behind a name change, start the teacher with
    another `served_model`, or without a cache.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: str,
        served_model: str,
        max_top_k: int,
        step_tokens: int,
        wires: Sequence[LikeliestWire] = (VLLM, ECHO),
    ) -> None:
        """Connect, and probe what the server supports.

        - tokenizer: directory or hub id.
        - served_model: the model's name at the server; "" means the server's only model.
        - max_top_k: maximum number of head ids of a row.
        - step_tokens: a quarter of the maximum number of tokens in flight; see Feeder.
        - wires: request formats; the first format that the server answers is used.

        $DISTILL_ENDPOINT_KEY is sent as a bearer token.

        Raises InvalidInput if the server has no such model, returns no log-probs of prompts, or has
        a smaller vocabulary than the tokenizer; Unauthenticated if the server refuses the key;
        Unavailable if the server does not respond.
        """
        self.step_tokens = step_tokens
        self.requested_tokens = 0
        self._http = HttpEndpoint(url)
        try:
            path = model_directory(tokenizer, "endpoint")
            vocabulary = load_vocabulary(path)
        except InvalidInput as error:
            raise InvalidInput(error.message, field="--tokenizer", hint=error.hint) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        self._model = served_model
        self._chat_template = default_template_in(path)
        self._wire = wires[0]
        try:
            self.info = self._submit(self._describe(vocabulary, max_top_k, wires)).result()
        except DistillError:
            self.close()
            raise

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """Return one result for each query, in order; see ScoringEngine."""
        futures = [self._submit(self._fetch_rows(query)) for query in queries]
        return [_get_rows_or_error(future) for future in futures]

    async def score_one(self, query: ScoreQuery, schedule: QuerySchedule) -> RowBlock:
        """Return the rows of a query. Call it from any event loop; see ContinuousEngine."""
        return await asyncio.wrap_future(self._submit(self._fetch_rows(query)))

    def close(self) -> None:
        """Close the connections."""
        self._submit(self._http.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _fetch_rows(self, query: ScoreQuery) -> RowBlock:
        self._require_supported(query)
        self.requested_tokens += len(query.token_ids)
        try:
            rows = await (
                self._fetch_top_k(query) if query.head_ids is None else self._fetch_chosen(query)
            )
        except RequestRejected as error:
            raise InvalidInput(
                f"the endpoint refuses the query: {error}",
                field="token_ids",
                hint="check the limits of the server behind this teacher",
            ) from error
        check_rows(rows, self.info.vocab_size)
        return rows

    def _require_supported(self, query: ScoreQuery) -> None:
        """Raise InvalidInput if the server cannot compute the rows of `query`."""
        problems: list[tuple[str, str, str]] = []
        if query.temperature != 1.0:
            problems.append(("temperature", "scores at temperature 1 only", "use 1.0"))
        if query.vocab_size is not None:
            problems.append(("vocab_size", "scores over all its ids", "leave it out"))
        if query.tail_samples:
            problems.append(("tail_samples", "draws no tail samples", "use 0"))
        if query.head_ids is not None and not self.info.limits.max_chosen_ids:
            problems.append(("head_ids", "scores only its own likeliest ids", "use top_k"))
        if query.head_ids is None and query.draw_ids is not None:
            problems.append(
                ("draw_ids", "scores draws beside chosen head ids only", "use head_ids")
            )
        for field, problem, hint in problems:
            raise InvalidInput(f"this teacher's endpoint {problem}", field=field, hint=hint)

    async def _fetch_top_k(self, query: ScoreQuery) -> RowBlock:
        answer = await self._http.post(COMPLETIONS, self._wire.build_body(query, self._model))
        return self._wire.read_rows(query, answer)

    async def _fetch_chosen(self, query: ScoreQuery) -> RowBlock:
        answer = await self._http.post(CHOSEN_IDS, build_chosen_ids_body(query, self._model))
        return read_chosen_ids_rows(query, answer)

    async def _describe(
        self, vocabulary: tuple[str, ...], max_top_k: int, wires: Sequence[LikeliestWire]
    ) -> ScoringEngineInfo:
        model_entry = await self._find_model()
        max_length = model_entry["max_model_len"]
        for self._wire in wires:
            if await self._takes_likeliest(1):
                break
        else:
            raise InvalidInput(
                f"{self._http.url} returns no log-probs of prompts",
                field="--model",
                hint="give a server whose /v1/completions supports the field prompt_logprobs (as"
                " vLLM does), or the fields echo, logprobs and return_tokens_as_token_ids",
            )
        vocab_size = await self._find_vocab_size(len(vocabulary))
        max_likeliest_ids = await self._find_limit(
            self._takes_likeliest, min(max_top_k, vocab_size)
        )
        max_given_ids = await self._find_limit(
            self._takes_chosen_ids, min(max_top_k + 1, vocab_size)
        )
        log.info(
            "a row has at most %d ids that the endpoint chooses, or %d that a student chooses",
            max_likeliest_ids,
            max(0, max_given_ids - 1),
        )
        tokenizer = tokenizer_fingerprint(vocabulary)
        facts = {
            "engine": "endpoint",
            "model": self._model,
            "root": model_entry.get("root"),
            "max_length": max_length,
            "vocab_size": vocab_size,
            "tokenizer": tokenizer,
        }
        return ScoringEngineInfo(
            model=self._model,
            fingerprint=compute_fingerprint(facts),
            tokenizer_fingerprint=tokenizer,
            vocabulary=vocabulary,
            vocab_size=vocab_size,
            # The server generates a token, which it does not return, behind the sequence.
            max_length=max_length - 1,
            dtype="unknown",
            name="endpoint",
            batch_invariant=False,
            limits=EngineLimits(
                max_top_k=max(max_likeliest_ids, max_given_ids - 1),
                max_chosen_ids=max(0, max_given_ids - 1),
                any_temperature=False,
                any_vocab_size=False,
                tail_samples=False,
            ),
            chat_template=self._chat_template,
        )

    async def _find_model(self) -> dict[str, Any]:
        """Set the model's name and return its entry in the server's list."""
        try:
            model_list = await self._http.get("/v1/models")
            models = {str(entry["id"]): dict(entry) for entry in model_list["data"]}
            for entry in models.values():
                entry["max_model_len"] = int(entry.get("max_model_len") or _MAX_LENGTH)
        except (RequestRejected, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(
                f"{self._http.url} lists no models: {error}",
                field="--model",
                hint="give the address of a server with vLLM's HTTP interface",
            ) from error
        if not self._model and len(models) == 1:
            [self._model] = models
        if self._model not in models:
            raise InvalidInput(
                f"{self._http.url} serves {', '.join(sorted(models)) or 'no model'},"
                f" not {self._model!r}",
                field="--served-model",
                hint="give one of these names",
            )
        return models[self._model]

    async def _find_vocab_size(self, token_count: int) -> int:
        """Return the number of ids that the server accepts, by doubling and bisection.

        Raises InvalidInput if this number is less than `token_count`, the number of the tokenizer's
        tokens.
        """
        if not await self._takes_token(token_count - 1):
            raise InvalidInput(
                f"the model of {self._http.url} has no id {token_count - 1}, which the tokenizer"
                " has",
                field="--tokenizer",
                hint="give the tokenizer of the model that the server has",
            )
        refused_id = token_count
        while refused_id < _MAX_VOCABULARY and await self._takes_token(refused_id):
            refused_id *= 2
        return 1 + await _bisect_limit(self._takes_token, token_count - 1, refused_id)

    async def _find_limit(
        self, accepts: Callable[[int], Coroutine[Any, Any, bool]], upper_bound: int
    ) -> int:
        """Return the largest number up to `upper_bound` for which `accepts` is True; 0 if none."""
        if await accepts(upper_bound):
            return upper_bound
        return await _bisect_limit(accepts, 0, upper_bound)

    async def _takes_token(self, token: int) -> bool:
        query = ScoreQuery(np.full(2, token, np.int32), 1, top_k=1)
        try:
            await self._http.post(COMPLETIONS, self._wire.build_body(query, self._model))
        except RequestRejected:
            return False
        return True

    async def _takes_likeliest(self, count: int) -> bool:
        query = ScoreQuery(np.zeros(2, np.int32), 1, top_k=count)
        try:
            await self._fetch_top_k(query)
        except (RequestRejected, Corrupt):
            return False
        return True

    async def _takes_chosen_ids(self, count: int) -> bool:
        """Return True if the server scores `count` given ids in a row, with the sampled token."""
        if count < 1:
            return True
        heads = np.arange(count - 1, dtype=np.int32)[None]
        query = ScoreQuery(np.zeros(2, np.int32), 1, head_ids=heads)
        try:
            await self._fetch_chosen(query)
        except (RequestRejected, Corrupt):
            return False
        return True


async def _bisect_limit(
    accepts: Callable[[int], Coroutine[Any, Any, bool]], accepted: int, refused: int
) -> int:
    """Return the largest number for which `accepts` is True, by bisection.

    `accepts` is True for the number `accepted` and False for the larger number `refused`.
    """
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        if await accepts(middle):
            accepted = middle
        else:
            refused = middle
    return accepted


def _get_rows_or_error(future: Future[RowBlock]) -> RowBlock | DistillError:
    try:
        return future.result()
    except DistillError as error:
        return error
