"""The owners of tokens, and how much of a server the jobs of an owner may hold at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protos.errors import InvalidInput

TERMS = "owner=NAME jobs=N gpus=N"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NUMBER = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Quota:
    """The running jobs, and their GPUs, that one owner may have at once. None: no limit."""

    jobs: int | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Terms:
    """What a line of a token file says behind its token. `owner` is "" if it names none."""

    owner: str = ""
    quota: Quota = Quota()


def read_terms(words: Sequence[str], where: str) -> Terms:
    """Parse the words behind a token: `owner=NAME`, then `jobs=N` and `gpus=N`, all optional.

    Raises InvalidInput that names `where`. It quotes no word: one may be a token.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("owner", "jobs", "gpus") or key in given:
            raise InvalidInput(
                f"{where} is not ROLE TOKEN, optionally with {TERMS}",
                hint="make it with `distill token`",
            )
        valid = _NAME if key == "owner" else _NUMBER
        if not valid.fullmatch(value):
            what = "up to 64 of A-Z a-z 0-9 . _ @ -" if key == "owner" else "a whole number"
            raise InvalidInput(f"{where} has a wrong {key}", hint=f"it must be {what}")
        given[key] = value
    if "owner" not in given and given:
        raise InvalidInput(f"{where} has a quota and no owner", hint="add owner=NAME")
    jobs, gpus = (int(given[key]) if key in given else None for key in ("jobs", "gpus"))
    return Terms(given.get("owner", ""), Quota(jobs, gpus))


def quotas_of(terms: Iterable[Terms]) -> Mapping[str, Quota]:
    """Return the quota of each owner who has one.

    Raises InvalidInput if two tokens of an owner have different quotas: both count the same jobs.
    """
    found: dict[str, Quota] = {}
    for one in terms:
        if one.quota != Quota() and found.setdefault(one.owner, one.quota) != one.quota:
            raise InvalidInput(
                f"the tokens of owner {one.owner} have different quotas",
                field="--token-file",
                hint="write the same jobs=N and gpus=N to each, or to one of them only",
            )
    return found
