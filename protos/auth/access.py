"""Access control: tokens with roles, and the server interceptor that checks them.

A call of a method that is missing in `REQUIRED_ROLES` is always refused.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from protos.auth.owners import TERMS, Quota, Terms, quotas_of, read_terms
from protos.auth.scoped_token import is_signed, parts_of, signing_key
from protos.auth.tls import read_file
from protos.errors import DistillError, Forbidden, InvalidInput, Unauthenticated


class Role(IntEnum):
    """The rights of a token, in ascending order.

    Each role includes the rights of the lower roles.
    """

    READ = 1
    SUBMIT = 2
    ADMIN = 3


# The role that each gRPC method needs. None: open to every caller, with or without a token.
REQUIRED_ROLES: Mapping[str, Role | None] = {
    "/distill.v1.Distill/SubmitJob": Role.SUBMIT,
    "/distill.v1.Distill/CheckJob": Role.SUBMIT,
    "/distill.v1.Distill/SubmitJobs": Role.SUBMIT,
    "/distill.v1.Distill/GetJob": Role.READ,
    "/distill.v1.Distill/ListJobs": Role.READ,
    "/distill.v1.Distill/WatchJob": Role.READ,
    "/distill.v1.Distill/StreamLogs": Role.READ,
    "/distill.v1.Distill/CancelJob": Role.SUBMIT,
    "/distill.v1.Distill/ResumeJob": Role.SUBMIT,
    "/distill.v1.Distill/RemoveJob": Role.SUBMIT,
    "/distill.v1.Distill/PinJob": Role.SUBMIT,
    "/distill.v1.Distill/ListTeachers": Role.READ,
    "/distill.v1.Distill/BeginUpload": Role.SUBMIT,
    "/distill.v1.Distill/SendFiles": Role.SUBMIT,
    "/distill.v1.Distill/GetArtifact": Role.READ,
    "/distill.v1.Teacher/GetInfo": Role.READ,
    "/distill.v1.Teacher/GetVocabulary": Role.READ,
    "/distill.v1.Teacher/Score": Role.READ,
    "/distill.v1.Teacher/PushWeights": Role.ADMIN,
    "/distill.v1.Rollouts/GetRolloutInfo": Role.READ,
    "/distill.v1.Rollouts/Sample": Role.ADMIN,  # replaces the weights
    "/distill.v1.Rollouts/Sleep": Role.ADMIN,
    # An orchestrator's health probes send no token; the reply only says if the server is serving.
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": None,
}

TOKENS_VARIABLE = "DISTILL_TOKENS"
# 32 random bytes in base64, without padding.
MIN_TOKEN_CHARS = 43
MAX_TOKEN_CHARS = 512
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_BEARER = "Bearer "
_TEACHER, _ROLLOUTS = "/distill.v1.Teacher/", "/distill.v1.Rollouts/"

log = logging.getLogger(__name__)

# The name of a token, for places that must not show the token: so many hexadecimal digits of its
# SHA-256.
_NAME_DIGITS = 8


@dataclass(frozen=True)
class Caller:
    """The role, the owner and the name of the token of a call.

    `owner` is "" if the token has no owner. `token` is the name of the token: the first digits of
    its SHA-256. On a server without tokens, every caller has the role ADMIN, no owner and no name.
    """

    role: Role = Role.ADMIN
    owner: str = ""
    token: str = ""


@dataclass(frozen=True)
class _Digests:
    """What the server stores about its tokens.

    - `roles`: the digest and the role of each token
    - `keys`: for each token, the key that verifies tokens derived from it, in the order of `roles`
    - `owners`: the owner of each token, by digest
    - `quotas`: the quota of each owner
    """

    roles: Sequence[tuple[bytes, Role]]
    keys: Sequence[bytes]
    owners: Mapping[bytes, str]
    quotas: Mapping[str, Quota]

    def role_of(self, digest: bytes) -> Role | None:
        matching_role = None
        for token_digest, role in self.roles:
            if hmac.compare_digest(token_digest, digest):
                matching_role = role
        return matching_role


class Tokens:
    """The tokens that a server accepts. An object without tokens is false: the server needs no
    token.

    The object holds SHA-256 digests and derived signing keys, never the tokens. It is thread-safe:
    `reload` replaces all digests and keys at once. `file` is the token file; None if there is no
    file.
    """

    def __init__(
        self,
        roles: Mapping[str, Role] | None = None,
        terms: Mapping[str, Terms] | None = None,
        file: Path | None = None,
    ) -> None:
        """Compute the digests of the tokens.

        `roles`: the role of each token. `terms`: the owner and quota of each token. `file`: the
        token file for `reload`. Raises InvalidInput if two tokens of an owner have different
        quotas.
        """
        self.file = file
        self._digests = _Digests(
            roles=[(_hash_token(token), role) for token, role in (roles or {}).items()],
            keys=[signing_key(token) for token in roles or {}],
            owners={
                _hash_token(token): token_terms.owner
                for token, token_terms in (terms or {}).items()
            },
            quotas=quotas_of((terms or {}).values()),
        )

    def __bool__(self) -> bool:
        return bool(self._digests.roles)

    @property
    def quotas(self) -> Mapping[str, Quota]:
        """The quota of each owner, by the owner's name."""
        return self._digests.quotas

    def reload(self, check: Callable[[Tokens], None]) -> None:
        """Read `file` again, and accept exactly its tokens from now on.

        `check` is called with the new tokens, and raises an error to refuse them. If it raises, or
        if `read_tokens` refuses `file`, the old tokens stay.
        """
        new_tokens = read_tokens(self.file)
        check(new_tokens)
        self._digests = new_tokens._digests

    def role_of(self, presented: str) -> Role | None:
        """Return the role of the token `presented`. Return None if the server does not accept it.

        The duration of the check does not depend on which part of the token is wrong.
        """
        return self._digests.role_of(_hash_token(presented))

    def caller_in(self, metadata: Any) -> Caller:
        """Return the caller of a call, from the bearer token in its metadata.

        The call must have passed AccessControl.
        """
        token, digests = _bearer_token(metadata), self._digests
        digest = _hash_token(token or "")
        role = digests.role_of(digest)
        if token is None or role is None:
            return Caller()
        return Caller(role, digests.owners.get(digest, ""), digest.hex()[:_NAME_DIGITS])

    def scope_of(self, presented: str, *, rollouts: bool = False) -> str | None:
        """Return the scope `JOB.ATTEMPT` of a token that was derived from one of these tokens.

        - `presented`: the token of the caller
        - `rollouts`: False for a token for teachers. True for a token for rollout services, which
          must be derived from a token with the role ADMIN.

        Returns None for any other token. The duration of the check does not depend on which part of
        the tag is wrong.
        """
        parts = parts_of(presented)
        if parts is None:
            return None
        text, scope, tag = parts
        digests = self._digests
        signature_flags = [is_signed(key, text, tag) for key in digests.keys]
        if rollouts != text.startswith("rollouts."):
            return None
        if rollouts:
            admin_flags = [role is Role.ADMIN for _, role in digests.roles]
            signature_flags = [
                is_valid and is_admin
                for is_valid, is_admin in zip(signature_flags, admin_flags, strict=True)
            ]
        return scope if any(signature_flags) else None

    def role_in(self, metadata: Any) -> Role | None:
        """Return the role of the bearer token in a call's metadata. None: it is not accepted."""
        token = _bearer_token(metadata)
        return None if token is None else self.role_of(token)

    def scope_in(self, metadata: Any, *, rollouts: bool = False) -> str | None:
        """Return the scope (`JOB.ATTEMPT`) of the bearer token in a call's metadata.

        Returns None if the call has no bearer token, or if `scope_of` returns None for it.
        `rollouts`: see `scope_of`.
        """
        token = _bearer_token(metadata)
        return None if token is None else self.scope_of(token, rollouts=rollouts)


def _bearer_token(metadata: Any) -> str | None:
    """Return the token in the header `authorization: Bearer TOKEN`.

    Returns None if the call has no such header, if it has several headers `authorization`, or if
    the token has more than MAX_TOKEN_CHARS characters.
    """
    headers = [value for key, value in metadata or () if key == "authorization"]
    # Refuse two headers, because a proxy in front of this server may have checked the other header.
    if len(headers) != 1 or not isinstance(headers[0], str) or not headers[0].startswith(_BEARER):
        return None
    token = headers[0].removeprefix(_BEARER)
    return token if len(token) <= MAX_TOKEN_CHARS else None


def name_of_token(metadata: Any) -> str:
    """Return the first digits of the SHA-256 of the token in a call's metadata.

    The token may be one that the server does not accept. Returns "" for a call without a token.
    """
    token = _bearer_token(metadata)
    return "" if token is None else _hash_token(token).hex()[:_NAME_DIGITS]


def read_tokens(file: Path | None) -> Tokens:
    """Read tokens from `file`, or from $DISTILL_TOKENS if `file` is None.

    Each line is `ROLE TOKEN`, optionally with `owner=NAME jobs=N gpus=N`, or a comment that starts
    with #. Several tokens can have the same role. To replace a token: add the new token, change the
    clients to the new token, and remove the old token.

    Raises InvalidInput if the file cannot be read, if other users can read it, if it has no token,
    or if a line is wrong. The message never quotes a token.
    """
    if file is None:
        return Tokens(
            *_parse_lines(os.environ.get(TOKENS_VARIABLE, ""), f"${TOKENS_VARIABLE}: line ")
        )
    text = read_file(file, "--token-file", secret=0o077).decode("utf-8", "replace")
    tokens = Tokens(*_parse_lines(text, f"{file}:"), file)
    if not tokens:
        # The file may be truncated or not yet written. A user who gives a token file wants tokens
        # to be checked, so an empty file must not switch the check off.
        raise InvalidInput(
            f"{file} holds no token",
            field="--token-file",
            hint="add the line that `distill token --role ROLE` prints",
        )
    return tokens


def _parse_lines(text: str, location: str) -> tuple[Mapping[str, Role], Mapping[str, Terms]]:
    roles: dict[str, Role] = {}
    terms: dict[str, Terms] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or words[0].upper() not in Role.__members__:
            names = ", ".join(role.name.lower() for role in Role)
            raise InvalidInput(
                f"{location}{number} is not ROLE TOKEN, optionally with {TERMS}",
                hint=f"the role must be one of {names}",
            )
        role, token, *term_words = words
        require_token(token, f"{location}{number}")
        terms[token] = read_terms(term_words, f"{location}{number}")
        if token in roles:
            raise InvalidInput(
                f"{location}{number} repeats the token of an earlier line",
                hint="remove one of these two lines",
            )
        roles[token] = Role[role.upper()]
    return roles, terms


def require_token(
    token: str, location: str, hint: str = "create a token with `distill token`"
) -> None:
    """Raise InvalidInput if a token has a wrong length or a wrong character.

    A token must be so long that nobody can guess it, and must fit in an HTTP header. `location`:
    the place of the token, such as a file and line, which the message names. The message never
    quotes the token.
    """
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS or not _TOKEN.fullmatch(token):
        raise InvalidInput(
            f"{location} has a token that is not {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} characters"
            " of A-Z a-z 0-9 . _ ~ + / = -",
            hint=hint,
        )


def _hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


# Gets the name of the method, the metadata, the peer and the error of a refused call.
OnRefusal: TypeAlias = Callable[[str, Any, str, DistillError], None]


def ignore_refusal(action: str, metadata: Any, peer: str, error: DistillError) -> None:
    """Do nothing. Services without an audit log use this function as `on_refusal`."""


class AccessControl(grpc.aio.ServerInterceptor):
    """A server interceptor that checks the token of each call before a message of the call is read.

    In the list of interceptors, it must stand after ErrorBoundary, so that its exceptions become
    gRPC statuses. If the server has no tokens, every caller has the role ADMIN.
    """

    def __init__(self, tokens: Tokens, on_refusal: OnRefusal = ignore_refusal) -> None:
        """`tokens`: the tokens that the server accepts.

        `on_refusal`: a function that records a refused call, such as an audit log. Its arguments
        are the method, metadata, peer and error of the call.
        """
        self._tokens = tokens
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler. For a refused call, return a handler that raises the error.

        The error is Unauthenticated or Forbidden.
        """
        method: Any = handler_call_details.method
        handler = await continuation(handler_call_details)
        required_role = REQUIRED_ROLES.get(method, Role.ADMIN)
        if required_role is None:
            return handler
        role = Role.ADMIN
        if self._tokens:
            caller_role = self._caller_role(method, handler_call_details.invocation_metadata)
            if caller_role is None:
                return self._refuse(handler_call_details, _unauthenticated_error)
            role = caller_role
        if handler is not None and (method not in REQUIRED_ROLES or role < required_role):
            return self._refuse(handler_call_details, lambda: _forbidden_error(method, role))
        return handler

    def _refuse(
        self, call: grpc.HandlerCallDetails, create_error: Callable[[], DistillError]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that raises the error, for a method of any kind (unary or streaming).

        gRPC treats unary and streaming methods the same until a message is read.
        """
        details: Any = call

        async def refuse(messages: Any, context: Any) -> AsyncIterator[Any]:
            error = create_error()
            action = details.method.rpartition("/")[2]
            self._on_refusal(action, details.invocation_metadata, context.peer(), error)
            raise error
            yield  # makes this function the async generator that gRPC expects

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _caller_role(self, method: str, metadata: Any) -> Role | None:
        """Return the caller's role, or None if the token is not accepted.

        A scoped token is accepted only at the kind of service (teacher or rollout service) that its
        prefix names, and gives the role READ. At a rollout service, a scoped token with an attempt
        above 0 gives the role ADMIN. The job server itself uses attempt 0 to read the info of the
        rollout service.
        """
        role = self._tokens.role_in(metadata)
        if role is not None or not method.startswith((_TEACHER, _ROLLOUTS)):
            return role
        rollouts = method.startswith(_ROLLOUTS)
        scope = self._tokens.scope_in(metadata, rollouts=rollouts)
        if scope is None:
            return None
        job, _, attempt = scope.rpartition(".")
        log_fields = {"method": method.rpartition("/")[2], "job": job, "attempt": attempt}
        log.info("called by a job", extra={"fields": log_fields})
        return Role.ADMIN if rollouts and int(attempt) else Role.READ


def _unauthenticated_error() -> Unauthenticated:
    return Unauthenticated(
        "the server needs a valid token, and the call has none",
        hint="set $DISTILL_TOKEN, or for a teacher $DISTILL_TEACHER_TOKEN, or for a rollout service"
        " $DISTILL_ROLLOUTS_TOKEN",
    )


def _forbidden_error(method: str, role: Role) -> Forbidden:
    required_role = REQUIRED_ROLES.get(method)
    name = method.rsplit("/", 1)[-1]
    if required_role is None:
        return Forbidden(f"no role may call {name}")
    return Forbidden(
        f"a token of role {role.name.lower()} may not call {name}",
        hint=f"use a token of role {required_role.name.lower()}",
    )
