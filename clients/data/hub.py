"""Asks the model hub whether it has a model, and detects an outage of the hub.

The hub's libraries retry for minutes, and report an outage and a wrong model name with the same
error.
"""

from __future__ import annotations

import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from protos.errors import InvalidInput, Unavailable

log = logging.getLogger(__name__)

# The names that the hub's client accepts.
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w([\w.-]{0,94}\w)?")
_TIMEOUT_SECONDS = 5.0
_REACH_SECONDS = 3.0
# A model that was downloaded has one of these in the cache of this machine.
_KNOWN_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
_OFFLINE = "HF_HUB_OFFLINE"
# Whether the user, and not `use_caches_if_away`, has switched the libraries to their caches.
_is_offline_by_choice = _OFFLINE in os.environ
# Classes of builtins, httpx, requests and aiohttp for a connection without an answer.
_SILENCES = frozenset(
    {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "ClientConnectionError"}
)
_BUSY_STATUSES = frozenset({408, 429, *range(500, 600)})


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a hub id and is not an existing path."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def use_caches_if_away() -> None:
    """Set HF_HUB_OFFLINE=1 if the hub is unreachable, so that its libraries use their caches.

    Otherwise the libraries would retry for most of a minute per file. Call this function before
    importing these libraries, which read the variable at import. Waits for the hub for up to 3 s.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_REACH_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()  # any HTTP reply shows that the hub can be reached
    except OSError as error:
        log.warning("%s cannot be reached, using the local cache only: %s", endpoint, error)
        os.environ[_OFFLINE] = "1"


@lru_cache
def find_on_hub(hub_id: str) -> bool:
    """Return True if the hub has the model; False if only the cache of this machine has it.

    Raises OSError if the cache does not have the model, and the hub does not have it or does not
    answer. `hub_error` converts this error into an error for users.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        HfApi().model_info(hub_id, timeout=_TIMEOUT_SECONDS)
    except Exception as error:  # errors of the network have many classes
        if any(isinstance(try_to_load_from_cache(hub_id, name), str) for name in _KNOWN_FILES):
            return False
        reply = "does not answer" if is_outage(error) else "returns no such model"
        reason = " ".join(str(error).split())[:200]
        raise OSError(f"there is no directory {hub_id}, and the hub {reply}: {reason}") from error
    return True


def is_outage(error: BaseException) -> bool:
    """Return whether an error of the hub's libraries means that the hub cannot answer now.

    True means that a later attempt may succeed. The result is False if the hub has refused the
    request (an unknown name, a gated model), or if the user has set HF_HUB_OFFLINE.
    """
    if _is_offline_by_choice:
        return False
    causes = list(_list_causes(error))
    responses = [getattr(cause, "response", None) for cause in causes]
    statuses = {getattr(response, "status_code", None) for response in responses} - {None}
    if statuses:
        return statuses <= _BUSY_STATUSES
    return any(not _SILENCES.isdisjoint(c.__name__ for c in type(e).__mro__) for e in causes)


def hub_error(
    error: BaseException, message: str, *, field: str, hint: str
) -> InvalidInput | Unavailable:
    """Return the error for users after a failed download.

    `error`: the error of the hub's libraries. The result is Unavailable during an outage of the
    hub, otherwise InvalidInput.
    """
    if is_outage(error):
        hint = "try again when the hub answers, or give a local directory"
        return Unavailable(message, field=field, hint=hint)
    return InvalidInput(message, field=field, hint=hint)


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
