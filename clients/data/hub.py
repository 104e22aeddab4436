"""The model hub: asked once whether it is there, before its libraries ask for each file."""

from __future__ import annotations

import logging
import os
import urllib.error
import urllib.request

_SECONDS = 3.0

log = logging.getLogger(__name__)


def use_caches_if_away() -> None:
    """Where the hub cannot be reached, leave its libraries to their caches.

    They would try again for most of a minute, once for each file, before they say the same. Call
    it before they are imported.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()  # it is there, whatever it thinks of the request
    except OSError as error:
        log.warning("%s cannot be reached, only its cache is used: %s", endpoint, error)
        os.environ["HF_HUB_OFFLINE"] = "1"
