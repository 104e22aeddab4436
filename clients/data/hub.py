"""A check that the Hugging Face hub can be reached, made once before its libraries are imported."""

from __future__ import annotations

import logging
import os
import urllib.error
import urllib.request

_SECONDS = 3.0

log = logging.getLogger(__name__)


def use_caches_if_away() -> None:
    """Set HF_HUB_OFFLINE=1 if the hub cannot be reached, so that its libraries use their caches.

    Otherwise the libraries would retry for most of a minute per file. Call this function before
    they are imported: they read the variable at import. It waits for the hub for up to 3 seconds.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()  # any HTTP reply shows that the hub can be reached
    except OSError as error:
        log.warning("%s cannot be reached, using the local cache only: %s", endpoint, error)
        os.environ["HF_HUB_OFFLINE"] = "1"
