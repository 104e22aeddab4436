"""The images of a prompt: read again whenever they are needed, and never kept for a whole run."""

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
# Images that stay in memory: the rollouts of a prompt are sampled, scored and learned together.
_KEPT = 16
Source = Path | bytes


@dataclass(frozen=True, eq=False)
class SequenceImages:
    """The images of a sequence, in the order of their placeholders, for one student.

    sources: the file, or the encoded image itself. digests: the sha256 of each image. tokens: of
    each image, in the token ids of the sequence.
    """

    sources: tuple[Source, ...]
    digests: tuple[str, ...]
    tokens: tuple[int, ...]
    reader: ImageReader

    def encoded(self) -> tuple[bytes, ...]:
        """Return the encoded images. Raises Corrupt if a file has changed."""
        return tuple(
            _encoded(source, digest)
            for source, digest in zip(self.sources, self.digests, strict=True)
        )

    def pixels(self) -> Pixels:
        """Return the inputs of the student. Raises Corrupt if a file has changed."""
        return _pixels(self.reader, self.sources, self.digests)

    def collapsed(self, token_ids: NDArray[np.int32], start: int) -> tuple[NDArray[np.int32], int]:
        """Return a sequence of the student with one placeholder an image: its ids and its start."""
        short = collapsed_ids(token_ids, self.reader.placeholder, self.tokens)
        return short, start - (len(token_ids) - len(short))


def with_images(
    ids: NDArray[np.int32], sources: Sequence[Source], reader: ImageReader, where: str
) -> tuple[NDArray[np.int32], SequenceImages | None]:
    """Return a prompt with all its image tokens, and its images; None if it has none.

    `ids`: with one placeholder for each of the `sources`. Raises InvalidInput (`data.image_column`)
    with `where` if an image cannot be used, or if the prompt has another number of placeholders.
    """
    places = np.flatnonzero(ids == reader.placeholder)
    if len(places) != len(sources) or (np.diff(places) == 1).any():
        row = " in a row" if len(places) == len(sources) else ""
        raise InvalidInput(
            f"{where} has {len(sources)} images, but its prompt has {len(places)} image"
            f" placeholders{row}",
            field=FIELD,
            hint="give one image for each placeholder that the chat template writes",
        )
    if not sources:
        return ids, None
    images = tuple(_read(source, where) for source in sources)
    digests = tuple(map(digest_of, images))
    try:
        pixels = _pixels(reader, tuple(sources), digests)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}", field=FIELD, hint=error.hint) from error
    found = SequenceImages(tuple(sources), digests, pixels.tokens, reader)
    return expanded_ids(ids, reader.placeholder, pixels.tokens), found


def image_inputs(
    images: Sequence[SequenceImages | None], input_ids: Tensor
) -> dict[str, Tensor] | None:
    """Return the model's inputs for the images of lines [B, T]; None if there are none.

    `images`: those of each line, in order. The tensors are on the CPU: pixel_values [P, D],
    image_grid_thw [n, 3], and mm_token_type_ids [B, T], 1 for the tokens of images.
    """
    found = [one for one in images if one is not None]
    if not found:
        return None
    return tensors_of([one.pixels() for one in found], input_ids, found[0].reader.placeholder)


def tensors_of(pixels: Sequence[Pixels], input_ids: Tensor, placeholder: int) -> dict[str, Tensor]:
    """Return the inputs of `image_inputs` for the pixels of lines [B, T], in order."""
    return {
        "pixel_values": torch.from_numpy(np.concatenate([one.values for one in pixels])),
        "image_grid_thw": torch.from_numpy(np.concatenate([one.grid for one in pixels])),
        "mm_token_type_ids": input_ids.eq(placeholder).int(),
    }


def _read(source: Source, where: str) -> bytes:
    return source if isinstance(source, bytes) else read_image(source, where)


@lru_cache(maxsize=_KEPT)
def _encoded(source: Source, digest: str) -> bytes:
    return source if isinstance(source, bytes) else read_same_image(source, digest)


@lru_cache(maxsize=_KEPT)
def _pixels(reader: ImageReader, sources: tuple[Source, ...], digests: tuple[str, ...]) -> Pixels:
    images = [_encoded(source, digest) for source, digest in zip(sources, digests, strict=True)]
    return reader.read(images, FIELD)
