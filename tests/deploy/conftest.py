"""Images, built once for all tests that need them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import containers
from tests.deploy.containers import Images
from tests.deploy.dockerfile import TARGETS


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    """The base image and the three targets; building them takes six minutes."""
    if reason := containers.missing_requirement():
        pytest.skip(reason)
    image_store = Images(Path(tempfile.mkdtemp(prefix="distill-images-")))
    try:
        image_store.make_base()
        for target in TARGETS:
            image_store.build(target)
        yield image_store
    finally:
        image_store.close()
