"""The endpoint engine: rows from a server that somebody else runs, such as vLLM, over HTTP.

The teacher service stays in front of the server: one cache, one fair queue, one encoding for many
students. What the server cannot compute is refused, see `EngineLimits`: temperatures other than 1,
tail samples, and the ids of a student if the server has no way to score them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos.errors import Corrupt, DistillError, InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.base import EngineInfo, EngineLimits, Turn, fingerprint_of
from teacher_service.engines.endpoint_http import HttpEndpoint, Refused
from teacher_service.engines.endpoint_wire import (
    CHOSEN_IDS,
    ECHO,
    SGLANG,
    VLLM,
    LikeliestWire,
    ask_chosen_ids,
    rows_of_chosen_ids,
)
from teacher_service.models.files import model_directory
from teacher_service.models.loading import load_vocabulary

log = logging.getLogger(__name__)

_T = TypeVar("_T")

PATIENCE_SECONDS = 60.0
# For a server that does not say how many tokens it reads.
_MAX_LENGTH = 4096
_MOST_IDS = 1 << 22  # no vocabulary is larger


class EndpointEngine:
    """A model behind the HTTP interface of vLLM or SGLang, or one that echoes prompts.

    Nothing proves which weights the server has: the fingerprint is of the model's name there, its
    limits and the tokenizer. Start a teacher with another `served_model`, or without a cache, when
    the weights behind a name change.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: str,
        served_model: str,
        max_top_k: int,
        step_tokens: int,
        wires: Sequence[LikeliestWire] = (VLLM, SGLANG, ECHO),
    ) -> None:
        """Connect, and find out what the server can do.

        `tokenizer`: directory or hub id. `served_model`: the model's name at the server; "": the
        only one. `max_top_k`: most head ids of a row. `step_tokens`: half of the tokens that are in
        flight; see Feeder. `wires`: the ways to ask, of which the first that the server answers is
        taken. $DISTILL_ENDPOINT_KEY is sent as a bearer token.

        Raises InvalidInput if the server has no such model, returns no log-probs of prompts, or has
        a smaller vocabulary than the tokenizer; Unauthenticated if it refuses the key; Unavailable
        if it is away.
        """
        self.step_tokens = step_tokens
        self.tokens_asked = 0
        self._http = HttpEndpoint(url, patience_seconds=PATIENCE_SECONDS)
        try:
            vocabulary = load_vocabulary(model_directory(tokenizer))
        except InvalidInput as error:
            raise InvalidInput(error.message, field="--tokenizer", hint=error.hint) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        self._model = served_model
        self._wire = wires[0]
        try:
            self.info = self._begin(self._describe(vocabulary, max_top_k, wires)).result()
        except DistillError:
            self.close()
            raise

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """Return one result for each query, in order; see Engine."""
        futures = [self._begin(self._rows(query)) for query in queries]
        return [_result(future) for future in futures]

    async def score_one(self, query: ScoreQuery, turn: Turn) -> RowBlock:
        """Return the rows of a query, from any event loop; see ContinuousEngine."""
        return await asyncio.wrap_future(self._begin(self._rows(query)))

    def close(self) -> None:
        """Close the connections."""
        self._begin(self._http.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _rows(self, query: ScoreQuery) -> RowBlock:
        self._require_possible(query)
        self.tokens_asked += len(query.token_ids)
        try:
            if query.head_ids is None:
                return await self._likeliest(query)
            answer = await self._http.post(CHOSEN_IDS, ask_chosen_ids(query, self._model))
            return rows_of_chosen_ids(query, answer)
        except Refused as error:
            raise InvalidInput(
                f"the endpoint refuses the query: {error}",
                field="token_ids",
                hint="check the limits of the server behind this teacher",
            ) from error

    def _require_possible(self, query: ScoreQuery) -> None:
        """Raise InvalidInput if the server cannot compute the rows of `query`."""
        wrong: list[tuple[str, str, str]] = []
        if query.temperature != 1.0:
            wrong.append(("temperature", "scores at temperature 1 only", "use 1.0"))
        if query.vocab_size is not None:
            wrong.append(("vocab_size", "scores over all its ids", "leave it out"))
        if query.tail_samples:
            wrong.append(("tail_samples", "draws no tail samples", "use 0"))
        if query.head_ids is not None and not self.info.limits.max_chosen_ids:
            wrong.append(("head_ids", "scores only its own likeliest ids", "use top_k"))
        if query.head_ids is None and query.draw_ids is not None:
            wrong.append(("draw_ids", "scores draws beside chosen head ids only", "use head_ids"))
        for field, problem, hint in wrong:
            raise InvalidInput(f"this teacher's endpoint {problem}", field=field, hint=hint)

    async def _likeliest(self, query: ScoreQuery) -> RowBlock:
        answer = await self._http.post(self._wire.path, self._wire.ask(query, self._model))
        return self._wire.rows(query, answer)

    async def _describe(
        self, vocabulary: tuple[str, ...], max_top_k: int, wires: Sequence[LikeliestWire]
    ) -> EngineInfo:
        entry = await self._find_model()
        length = int(entry.get("max_model_len") or _MAX_LENGTH)
        for self._wire in wires:
            if await self._takes_likeliest(1):
                break
        else:
            raise InvalidInput(
                f"{self._http.url} returns no log-probs of prompts",
                field="--model",
                hint="give a server whose /v1/completions answers prompt_logprobs, such as vLLM, or"
                " echoes the ids of a prompt with logprobs; or whose /generate answers"
                " return_logprob, such as SGLang",
            )
        width = await self._width(len(vocabulary))
        likeliest = await self._most(self._takes_likeliest, min(max_top_k, width))
        chosen = await self._most(self._takes_chosen_ids, min(max_top_k + 1, width))
        log.info(
            "a row has at most %d ids that the endpoint chooses, or %d that a student chooses",
            likeliest,
            max(0, chosen - 1),
        )
        tokenizer = tokenizer_fingerprint(vocabulary)
        facts = {
            "engine": "endpoint",
            "model": self._model,
            "root": entry.get("root"),
            "max_length": length,
            "vocab_size": width,
            "tokenizer": tokenizer,
        }
        return EngineInfo(
            model=self._model,
            fingerprint=fingerprint_of(facts),
            tokenizer_fingerprint=tokenizer,
            vocabulary=vocabulary,
            vocab_size=width,
            # The server generates a token, which it does not return, behind the sequence.
            max_length=length - 1,
            dtype="unknown",
            name="endpoint",
            batch_invariant=False,
            limits=EngineLimits(
                max_top_k=max(likeliest, chosen - 1),
                max_chosen_ids=max(0, chosen - 1),
                any_temperature=False,
                any_vocab_size=False,
                tail_samples=False,
            ),
        )

    async def _find_model(self) -> dict[str, Any]:
        """Set the model's name and return its entry in the server's list."""
        try:
            listed = await self._http.get("/v1/models")
            found = {str(one["id"]): dict(one) for one in listed["data"]}
        except (Refused, KeyError, TypeError) as error:
            raise InvalidInput(
                f"{self._http.url} lists no models: {error}",
                field="--model",
                hint="give the address of a server with vLLM's HTTP interface",
            ) from error
        if not self._model and len(found) == 1:
            [self._model] = found
        if self._model not in found:
            raise InvalidInput(
                f"{self._http.url} serves {', '.join(sorted(found)) or 'no model'},"
                f" not {self._model!r}",
                field="--served-model",
                hint="give one of these names",
            )
        return found[self._model]

    async def _width(self, known: int) -> int:
        """Return the number of ids that the server takes: the first one that it refuses.

        Raises InvalidInput if that is less than `known`, the number of the tokenizer's tokens.
        """
        if not await self._takes_token(known - 1):
            raise InvalidInput(
                f"the model of {self._http.url} has no id {known - 1}, which the tokenizer has",
                field="--tokenizer",
                hint="give the tokenizer of the model that the server has",
            )
        most = known
        while most < _MOST_IDS and await self._takes_token(most):
            most *= 2
        return 1 + await _last(self._takes_token, known - 1, most)

    async def _most(self, takes: Callable[[int], Coroutine[Any, Any, bool]], most: int) -> int:
        """Return the largest number up to `most` that the server takes; 0 if it takes none."""
        if await takes(most):
            return most
        return await _last(takes, 0, most)

    async def _takes_token(self, token: int) -> bool:
        query = ScoreQuery(np.full(2, token, np.int32), 1, top_k=1)
        try:
            await self._http.post(self._wire.path, self._wire.ask(query, self._model))
        except Refused:
            return False
        return True

    async def _takes_likeliest(self, count: int) -> bool:
        query = ScoreQuery(np.zeros(2, np.int32), 1, top_k=count)
        try:
            await self._likeliest(query)
        except (Refused, Corrupt):
            return False
        return True

    async def _takes_chosen_ids(self, count: int) -> bool:
        """Whether a row may have `count` ids, the sampled token included."""
        if count < 1:
            return True
        heads = np.arange(count - 1, dtype=np.int32)[None]
        query = ScoreQuery(np.zeros(2, np.int32), 1, head_ids=heads)
        try:
            answer = await self._http.post(CHOSEN_IDS, ask_chosen_ids(query, self._model))
            rows_of_chosen_ids(query, answer)
        except (Refused, Corrupt):
            return False
        return True


async def _last(takes: Callable[[int], Coroutine[Any, Any, bool]], taken: int, refused: int) -> int:
    """Return the largest number that `takes` accepts, given one that it takes and one not."""
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if await takes(middle):
            taken = middle
        else:
            refused = middle
    return taken


def _result(future: Future[RowBlock]) -> RowBlock | DistillError:
    try:
        return future.result()
    except DistillError as error:
        return error
