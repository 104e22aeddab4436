"""Locations of files: a path, or a URL of object storage such as s3://bucket/rows."""

from __future__ import annotations

from protos.errors import InvalidInput

SCHEMES = ("s3", "gs")
_FILE_SCHEME = "file://"


def is_object_url(place: object) -> bool:
    """Return True for a URL of object storage, False for a path."""
    return str(place).partition("://")[0] in SCHEMES and "://" in str(place)


def redact_place(place: str) -> str:
    """Return a location in a form that may appear in messages.

    A URL that may contain credentials is reduced to its scheme.
    """
    scheme, colon, path = place.partition("://")
    return f"{scheme}://..." if colon and any(character in path for character in "@?#") else place


def place_of(text: str) -> str:
    """Return a location in its usual form: a path, or a URL without a trailing slash.

    file:///rows becomes the path /rows. Raises InvalidInput for a URL of another scheme, and for a
    URL that is not SCHEME://BUCKET/PREFIX, for example a URL with credentials or with a part '..'.
    """
    if text.startswith(_FILE_SCHEME):
        text = text.removeprefix(_FILE_SCHEME)
    scheme, colon, path = text.partition("://")
    if not colon:
        if text.lower().startswith(tuple(f"{scheme}:" for scheme in SCHEMES)):
            raise InvalidInput("a URL needs two slashes after the colon: s3://BUCKET/PREFIX")
        return text
    if scheme.lower() in SCHEMES:
        scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise InvalidInput("a URL must begin with s3:// or gs://")
    bucket, _, prefix = path.rstrip("/").partition("/")
    if {".", ".."} & {*path.split("/")}:
        raise InvalidInput("a URL must not have a part '.' or '..'", hint="write the full path")
    if not bucket or not prefix or "//" in path or any(character in path for character in "@?#"):
        raise InvalidInput(
            f"the URL is not {scheme}://BUCKET/PREFIX",
            hint="credentials, region and endpoint come from the environment",
        )
    return f"{scheme}://{bucket}/{prefix}"
