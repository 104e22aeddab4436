"""The owners of tokens, and the limits of the running jobs of each owner."""

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
    """The maximum number of running jobs of one owner, and of the GPUs of these jobs.

    None means that there is no limit.
    """

    jobs: int | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Terms:
    """The owner and the quota of a token. `owner` is "" if the token has no owner."""

    owner: str = ""
    quota: Quota = Quota()


def read_terms(words: Sequence[str], location: str) -> Terms:
    """Parse the words after a token in a token file: `owner=NAME`, `jobs=N` and `gpus=N`.

    All words are optional. `location`: file and line for the error. Raises InvalidInput for other
    words; the message quotes no word, because a word may be a token.
    """
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("owner", "jobs", "gpus") or key in values:
            raise InvalidInput(
                f"{location} is not ROLE TOKEN, optionally with {TERMS}",
                hint="create the line with `distill token`",
            )
        valid = _NAME if key == "owner" else _NUMBER
        if not valid.fullmatch(value):
            format_description = (
                "up to 64 of A-Z a-z 0-9 . _ @ -" if key == "owner" else "a whole number"
            )
            raise InvalidInput(
                f"{location} has a wrong {key}", hint=f"the value must be {format_description}"
            )
        values[key] = value
    if "owner" not in values and values:
        raise InvalidInput(f"{location} has a quota, but no owner", hint="add owner=NAME")
    jobs, gpus = (int(values[key]) if key in values else None for key in ("jobs", "gpus"))
    return Terms(values.get("owner", ""), Quota(jobs, gpus))


def quotas_of(terms: Iterable[Terms]) -> Mapping[str, Quota]:
    """Return the quota of each owner who has a quota.

    Raises InvalidInput if two tokens of an owner have different quotas: both quotas would limit the
    same jobs.
    """
    quota_by_owner: dict[str, Quota] = {}
    for token_terms in terms:
        if (
            token_terms.quota != Quota()
            and quota_by_owner.setdefault(token_terms.owner, token_terms.quota) != token_terms.quota
        ):
            raise InvalidInput(
                f"the tokens of owner {token_terms.owner} have different quotas",
                field="--token-file",
                hint="write the same jobs=N and gpus=N in each line, or in one line only",
            )
    return quota_by_owner
