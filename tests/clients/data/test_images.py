"""Placeholders and image tokens, and files that are not images."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clients.data import images
from clients.data.images import ImageReader, collapsed_ids, digest_of, expanded_ids, makes_grids
from protos.errors import InvalidInput
from tests import tiny_vision

PLACEHOLDER = 7


@given(st.lists(st.integers(0, 9), max_size=20), st.data())
def test_collapsed_ids_undo_expanded_ids(ids: list[int], data: st.DataObject) -> None:
    count = ids.count(PLACEHOLDER)
    tokens = data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    collapsed = np.array(ids, np.int32)
    expanded = expanded_ids(collapsed, PLACEHOLDER, tokens)
    counts = iter(tokens)
    expected = [
        copy for token in ids for copy in [token] * (next(counts) if token == PLACEHOLDER else 1)
    ]
    assert expanded.tolist() == expected
    assert collapsed_ids(expanded, PLACEHOLDER, tokens).tolist() == ids


def test_another_number_of_images_is_refused() -> None:
    ids = np.array([1, PLACEHOLDER, 2], np.int32)
    with pytest.raises(ValueError, match="1 placeholders for 2 images"):
        expanded_ids(ids, PLACEHOLDER, [3, 3])
    with pytest.raises(ValueError, match="1 placeholders for 3 tokens"):
        collapsed_ids(ids, PLACEHOLDER, [3])


@pytest.fixture
def reader() -> ImageReader:
    return ImageReader(tiny_vision.processor(), PLACEHOLDER)


def test_pixels_are_the_processors_own(reader: ImageReader) -> None:
    files = [tiny_vision.image(0), tiny_vision.image(1, 40, 48)]
    pixels = reader.read(files)
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    expected = tiny_vision.processor()(images=pictures, return_tensors="np")
    np.testing.assert_array_equal(pixels.values, expected["pixel_values"])
    np.testing.assert_array_equal(pixels.grid, expected["image_grid_thw"])
    assert pixels.tokens == (6, 30)  # 4 x 6 and 12 x 10 patches; 4 patches are a token


def test_an_image_is_turned_as_its_metadata_says(reader: ImageReader) -> None:
    picture = Image.open(io.BytesIO(tiny_vision.image(0, 24, 16)))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    file = io.BytesIO()
    picture.save(file, "PNG", exif=exif)
    assert reader.read([file.getvalue()]).grid.tolist() == [[1, 6, 4]]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"no image", "not PNG, JPEG or WebP"),
        (tiny_vision.image(0)[:60], "an image cannot be used"),
        (tiny_vision.image(0, 1000, 4), "aspect ratio"),
    ],
)
def test_what_is_no_image_is_refused(reader: ImageReader, file: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        reader.read([file], "data.image_column")
    assert error.value.field == "data.image_column"
    assert "\n" not in str(error.value)


def test_a_format_that_few_use_is_refused(reader: ImageReader) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "TIFF")
    with pytest.raises(InvalidInput, match="not PNG, JPEG or WebP"):
        reader.read([file.getvalue()])


def test_an_image_of_too_many_pixels_is_not_decoded(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(InvalidInput, match="24 x 16 pixels exceed the limit of 100"):
        reader.read([tiny_vision.image(0)])


def test_images_share_the_limits(reader: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may have many images, so the limits are for all images together."""
    files = [tiny_vision.image(number) for number in range(3)]
    assert reader.read(files, max_tokens=18).tokens == (6, 6, 6)
    with pytest.raises(InvalidInput, match="have more than 17 tokens, the most that fit"):
        reader.read(files, max_tokens=17)
    monkeypatch.setattr(images, "MAX_PIXELS", 2 * 24 * 16 + 5)
    with pytest.raises(InvalidInput, match="24 x 16 pixels exceed the limit of 5"):
        reader.read(files)


def test_the_facts_change_with_the_settings(reader: ImageReader) -> None:
    changed_reader = ImageReader(tiny_vision.processor(image_mean=[0.5, 0.5, 0.5]), PLACEHOLDER)
    assert reader.facts != changed_reader.facts
    assert makes_grids(tiny_vision.processor())
    assert not makes_grids(object())
    assert digest_of(b"a") != digest_of(b"b")
