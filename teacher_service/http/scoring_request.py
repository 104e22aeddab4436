"""Parses and checks the fields of an HTTP request, and builds the queries for its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from clients.data.outside import parse_ids
from clients.teacher.query import ScoreQuery
from protos import teacher_pb2
from protos.errors import InvalidInput, NotFound
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ScoringEngineInfo
from teacher_service.serving.validation import RequestLimits, parse_request

# Maximum sequences of one request: each is a task of its own.
MAX_SEQUENCES = 1024
_SCORES_ONLY = "this teacher scores the tokens of the request, and generates no tokens"


class Fields(BaseModel):
    """Base class for the fields of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ScoringRequest(Protocol):
    """A parsed and checked request: the sequences to score, and the text of the answer."""

    @property
    def queries(self) -> Sequence[ScoreQuery]:
        """The queries to score, one per sequence of the request."""
        ...

    def text(self, blocks: Sequence[RowBlock], info: ScoringEngineInfo) -> Iterator[bytes]:
        """Yield the pieces of the JSON answer; `blocks` are the rows of the queries.

        The pieces are built lazily, in some milliseconds each.
        """
        ...


_F = TypeVar("_F", bound=Fields)


def read_fields(body: bytes, model: type[_F]) -> _F:
    """Return the JSON object `body` as an object of the class `model`.

    Raises InvalidInput, naming the first wrong field.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first_error["loc"])
        if first_error["type"] == "extra_forbidden":
            raise InvalidInput(
                "this teacher does not support the field", field=field, hint="remove the field"
            ) from error
        raise InvalidInput(first_error["msg"], field=field or "body") from error


def require(
    value: object, allowed: Sequence[object], field: str, reason: str = _SCORES_ONLY
) -> None:
    """Raise InvalidInput if the value of a field is not one of `allowed`.

    `reason` is a part of the message. Numbers with the same value are equal: 1 is equal to 1.0. But
    1 is not equal to True.
    """
    if any(
        value == allowed_value and isinstance(value, bool) == isinstance(allowed_value, bool)
        for allowed_value in allowed
    ):
        return
    names = " or ".join(
        str(allowed_value).lower() for allowed_value in allowed if allowed_value is not None
    )
    actual = "it is absent" if value is None else f"got {str(value).lower()}"
    refuse(field, f"must be {names}, {actual}: {reason}", f"send {names.partition(' ')[0]}")


def require_temperature(value: float | None, field: str) -> None:
    """Raise InvalidInput for a temperature other than 0 and 1; None is the default of 1.

    At temperature 0, vLLM takes the likeliest token and does not scale log-probs, so the log-probs
    are the same as at temperature 1.
    """
    require(value, (1, 0, None), field, "log-probs here are those of temperature 1")


def find_adapter(name: str | None, info: ScoringEngineInfo) -> str:
    """Return the adapter that a request names as its model; "" for the model without an adapter.

    Raises NotFound for an unknown name.
    """
    if name in (None, info.model):
        return ""
    if name in info.adapters:
        return str(name)
    served_names = " or ".join(repr(served_name) for served_name in (info.model, *info.adapters))
    raise NotFound(
        f"this teacher serves {served_names}, not {name!r}",
        field="model",
        hint="ask /v1/models for the names",
    )


def refuse(field: str, message: str, hint: str = "") -> NoReturn:
    """Raise InvalidInput with this message for the request's field."""
    raise InvalidInput(message, field=field, hint=hint)


def read_token_lists(value: Any, field: str) -> list[tuple[str, NDArray[np.int32]]]:
    """Return the sequences of a field with a list of token ids, or with a list of such lists.

    Each sequence has its name for error messages. Raises InvalidInput for text, for values that are
    not integers, and for more than MAX_SEQUENCES sequences; `build_query` checks the range of the
    ids.
    """
    if not isinstance(value, list) or not value or isinstance(value[0], str):
        refuse(field, "must be a list of token ids, or a list of such lists", "send token ids")
    is_nested = isinstance(value[0], list)
    if is_nested and len(value) > MAX_SEQUENCES:
        refuse(
            field,
            f"a request has at most {MAX_SEQUENCES} sequences, got {len(value)}",
            "send several requests",
        )
    if not is_nested:
        return [(field, read_token_list(value, field))]
    names = (f"{field}[{index}]" for index in range(len(value)))
    return [
        (name, read_token_list(token_ids, name))
        for name, token_ids in zip(names, value, strict=True)
    ]


def read_token_list(value: Any, field: str) -> NDArray[np.int32]:
    """Return the sequence of a field that is a list of token ids; see `read_token_lists`."""
    try:
        return parse_ids(value)
    except ValueError as error:
        refuse(field, str(error), "send token ids")


def require_start(start: int, token_ids: NDArray[np.int32], field: str) -> None:
    """Raise InvalidInput if `start` is out of range; it must be 0 to len(token_ids) - 2.

    `start` is the position before the first scored token.
    """
    length = len(token_ids)
    if length >= 2 and not 0 <= start < length - 1:
        refuse(
            field,
            f"must be 0 to {length - 2} for {length} tokens, got {start}",
            "the first log-prob is that of the token after this position",
        )


def build_query(
    token_ids: NDArray[np.int32],
    limits: RequestLimits,
    *,
    names: dict[str, str],
    start: int = 1,
    top_k: int = 0,
    head_ids: NDArray[np.int32] | None = None,
    draw_ids: NDArray[np.int32] | None = None,
    adapter: str = "",
) -> ScoreQuery:
    """Return the query of a sequence, checked as a gRPC request; its log-probs are float32.

    `head_ids` [n, k] and `draw_ids` [n, M] are the fields of ScoreQuery; without `head_ids`, the
    head has the teacher's `top_k` ids. `names` maps the field names of the gRPC request to the
    names in this request. Raises InvalidInput with the field.
    """
    message = teacher_pb2.ScoreRequest(
        token_ids=token_ids.tobytes(),
        start=start,
        temperature=1.0,
        logprob_format=teacher_pb2.LOGPROB_FORMAT_F32,
        adapter=adapter,
    )
    if head_ids is None:
        message.top_k = top_k
    else:
        message.head_ids = head_ids.tobytes()
    if draw_ids is not None:
        message.draw_ids = draw_ids.tobytes()
    try:
        return parse_request(message, limits)
    except InvalidInput as error:
        name, bracket, index = error.field.partition("[")
        field = names.get(name, name) + (bracket + index if name == "token_ids" else "")
        raise InvalidInput(error.message, field=field, hint=error.hint) from error
