"""An address of the web that somebody typed. Needs the package httpx."""

from __future__ import annotations

import httpx

from protos.errors import InvalidInput

_MOST_PORTS = 65535


def web_address(text: str, field: str) -> httpx.URL:
    """Raises InvalidInput for what nobody could be asked at: to ask would be an error that says
    less.
    """
    try:
        url = httpx.URL(text)
        url.host.encode("idna")  # as it is when it is looked up
        if not url.host or (url.port or 0) > _MOST_PORTS:
            raise ValueError("it has no host" if not url.host else f"there is no port {url.port}")
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidInput(
            f"{text!r} is no address: {error}",
            field=field,
            hint="it is like http://HOST:PORT/PATH",
        ) from error
    return url
