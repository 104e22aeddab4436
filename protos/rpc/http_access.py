"""What the HTTP servers share of access control: host names, and the statuses of errors."""

from __future__ import annotations

from collections.abc import Mapping

from protos.errors import ErrorCode, Forbidden
from protos.rpc.transport import is_loopback

# The other codes are 500.
HTTP_STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.FAILED_PRECONDITION: 409,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
}


def require_our_name(host_header: str, host: str, hint: str, external: str = "") -> None:
    """Refuse unknown host names on loopback, to prevent DNS rebinding.

    Otherwise another site's page could point its own host name at this machine and read the
    responses. `host_header` is the Host header, `host` the address that the server listens on, and
    `external` the host name of a proxy. Raises Forbidden; in `hint`, NAME stands for the name.
    """
    if not is_loopback(host):
        return
    name = host_header.rpartition(":")[0] if not host_header.endswith("]") else host_header
    name = (name or host_header).strip("[]")
    if not is_loopback(name) and (not name or name.lower() != external):
        raise Forbidden(
            f"requests for host {name!r} are refused on loopback", hint=hint.replace("NAME", name)
        )
