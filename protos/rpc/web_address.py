"""Check web addresses given by a user. Needs the package httpx."""

from __future__ import annotations

import httpx

from protos.errors import InvalidInput

_MAX_PORT = 65535


def web_address(text: str, field: str) -> httpx.URL:
    """Return the URL in `text`.

    Raises InvalidInput (`field`) if it has no valid host or port. The error of a request to such an
    address would be less clear.
    """
    try:
        url = httpx.URL(text)
        url.host.encode("idna")  # encoded as for a DNS look-up
        if not url.host or (url.port or 0) > _MAX_PORT:
            raise ValueError("it has no host" if not url.host else f"there is no port {url.port}")
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidInput(
            f"{text!r} is not a valid address: {error}",
            field=field,
            hint="give an address like http://HOST:PORT/PATH",
        ) from error
    return url
