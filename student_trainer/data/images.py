"""The images of prompts. They are loaded when a step needs them, and cached for a short time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.data.images import (
    ImageReader,
    Pixels,
    collapsed_ids,
    digest_of,
    expanded_ids,
    read_image,
    read_same_image,
)
from protos.errors import InvalidInput

FIELD = "data.image_column"
# Number of cached images: the rollouts of a prompt are sampled, scored and learned together.
_CACHED_IMAGES = 16
Source = Path | bytes


@dataclass(frozen=True, eq=False)
class SequenceImages:
    """The images of a sequence, in the order of their placeholders, for one student.

    - sources: files or encoded images.
    - digests: the SHA-256 of each image.
    - tokens: the number of tokens of each image in the sequence.
    """

    sources: tuple[Source, ...]
    digests: tuple[str, ...]
    tokens: tuple[int, ...]
    reader: ImageReader

    def load_encoded(self) -> tuple[bytes, ...]:
        """Return the encoded images. Raises Corrupt if a file has changed."""
        return tuple(
            _load_encoded(source, digest)
            for source, digest in zip(self.sources, self.digests, strict=True)
        )

    def load_pixels(self) -> Pixels:
        """Return the inputs of the student. Raises Corrupt if a file has changed."""
        return _load_pixels(self.reader, self.sources, self.digests)

    def collapse(self, token_ids: NDArray[np.int32], start: int) -> tuple[NDArray[np.int32], int]:
        """Return (ids, start) of a student's sequence with one placeholder token per image."""
        collapsed_sequence = collapsed_ids(token_ids, self.reader.placeholder, self.tokens)
        return collapsed_sequence, start - (len(token_ids) - len(collapsed_sequence))


def with_images(
    ids: NDArray[np.int32], sources: Sequence[Source], reader: ImageReader, where: str
) -> tuple[NDArray[np.int32], SequenceImages | None]:
    """Return a prompt with all its image tokens, and its images (None if it has none).

    `ids` have one placeholder for each of the `sources`. Raises InvalidInput (`data.image_column`)
    with `where` if an image cannot be used, or if the number of placeholders differs.
    """
    places = np.flatnonzero(ids == reader.placeholder)
    if len(places) != len(sources) or (np.diff(places) == 1).any():
        row = " in a row" if len(places) == len(sources) else ""
        raise InvalidInput(
            f"{where} has {len(sources)} images, but its prompt has {len(places)} image"
            f" placeholders{row}",
            field=FIELD,
            hint="give one image for each placeholder of the chat template",
        )
    if not sources:
        return ids, None
    images = tuple(
        source if isinstance(source, bytes) else read_image(source, where) for source in sources
    )
    digests = tuple(map(digest_of, images))
    try:
        pixels = _load_pixels(reader, tuple(sources), digests)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}", field=FIELD, hint=error.hint) from error
    sequence_images = SequenceImages(tuple(sources), digests, pixels.tokens, reader)
    return expanded_ids(ids, reader.placeholder, pixels.tokens), sequence_images


def image_inputs(
    images: Sequence[SequenceImages | None], input_ids: Tensor
) -> dict[str, Tensor] | None:
    """Return the model's inputs for the images of lines [B, T]; None if there are none.

    `images` are the images of each line, in order. The tensors are on the CPU: pixel_values [P, D],
    image_grid_thw [n, 3], and mm_token_type_ids [B, T], 1 for image tokens.
    """
    present_images = [line_images for line_images in images if line_images is not None]
    if not present_images:
        return None
    return tensors_of(
        [line_images.load_pixels() for line_images in present_images],
        input_ids,
        present_images[0].reader.placeholder,
    )


def tensors_of(pixels: Sequence[Pixels], input_ids: Tensor, placeholder: int) -> dict[str, Tensor]:
    """Return the tensors of `image_inputs`. `pixels`: the images of `input_ids`, in order."""
    return {
        "pixel_values": torch.from_numpy(
            np.concatenate([image_pixels.values for image_pixels in pixels])
        ),
        "image_grid_thw": torch.from_numpy(
            np.concatenate([image_pixels.grid for image_pixels in pixels])
        ),
        "mm_token_type_ids": input_ids.eq(placeholder).int(),
    }


@lru_cache(maxsize=_CACHED_IMAGES)
def _load_encoded(source: Source, digest: str) -> bytes:
    return source if isinstance(source, bytes) else read_same_image(source, digest)


@lru_cache(maxsize=_CACHED_IMAGES)
def _load_pixels(
    reader: ImageReader, sources: tuple[Source, ...], digests: tuple[str, ...]
) -> Pixels:
    images = [
        _load_encoded(source, digest) for source, digest in zip(sources, digests, strict=True)
    ]
    return reader.read(images, FIELD)
