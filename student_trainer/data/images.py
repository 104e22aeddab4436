"""Loads the images of prompts when a step needs them, and caches them for a short time."""

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

    - sources: the path of each image file, or the encoded image as bytes.
    - digests: the SHA-256 of each image.
    - tokens: the number of tokens of each image in the sequence.
    - reader: converts images to inputs of the student.
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
        """Return the pixel inputs of the student model. Raises Corrupt if a file has changed."""
        return _load_pixels(self.reader, self.sources, self.digests)

    def collapse(self, token_ids: NDArray[np.int32], start: int) -> tuple[NDArray[np.int32], int]:
        """Return `token_ids` with one placeholder token per image, and the new value of `start`.

        `token_ids` is a sequence of the student, in which an image has several tokens.
        """
        collapsed_sequence = collapsed_ids(token_ids, self.reader.placeholder, self.tokens)
        return collapsed_sequence, start - (len(token_ids) - len(collapsed_sequence))


def with_images(
    ids: NDArray[np.int32], sources: Sequence[Source], reader: ImageReader, where: str
) -> tuple[NDArray[np.int32], SequenceImages | None]:
    """Return the token ids of a prompt with all its image tokens, and its images.

    - ids: token ids with one placeholder for each image of `sources`.
    - where: the row of the data, for error messages.

    The images are None if `sources` is empty. Raises InvalidInput (`data.image_column`) if an image
    cannot be used, or if the numbers of images and placeholders differ.
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
    """Return the model's inputs for the images of the lines [B, T]; None if there are no images.

    - images: the images of each line, in the order of the lines.
    - input_ids [B, T]: the token ids of the lines.

    The returned tensors are on the CPU:

    - pixel_values [P, D]: the patches of all images.
    - image_grid_thw [n, 3]: the number of patches of each image in time, height and width.
    - mm_token_type_ids [B, T]: 1 for image tokens, 0 for other tokens.
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
    """Return the tensors that `image_inputs` describes.

    `pixels`: the images, in the order of their placeholders in `input_ids`.
    """
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
