"""Decodes the images of a prompt for a model, and collapses or expands the token ids of a prompt.

Collapsed ids have one placeholder per image. Requests, the row cache and stores use collapsed ids,
and `start`, the first scored position, is a position in collapsed ids. Expanded ids have one
placeholder per image token, and are the input of a model. The number of image tokens depends on the
model's processor, so teacher and student expand the same prompt differently. Only `expanded_ids`
and `collapsed_ids` convert between the two forms.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.errors import Corrupt, InvalidInput
from protos.extras import install_command

# Maximum pixels of the images of a sequence, 192 MiB decoded. A small file may claim any size.
MAX_PIXELS = 1 << 26
_FORMATS = ("PNG", "JPEG", "WEBP")
_MAX_SHOWN_CHARS = 300  # characters of a path in a message


@dataclass(frozen=True, eq=False)
class Pixels:
    """The images of a sequence, as the processor of a model returns them.

    - values [P, D] float32: the patches of all images.
    - grid [n, 3] int64: number of patches of each image in time, height and width. Their product is
      the number of patches of the image. P is the sum of the products.
    - tokens: number of model tokens per image.
    """

    values: NDArray[np.float32]
    grid: NDArray[np.int64]
    tokens: tuple[int, ...]


class ImageReader:
    """Converts image files to the inputs of a model. Thread-safe.

    - processor: an image processor of transformers for which `makes_grids` is true.
    - placeholder: the token id that stands for an image.
    """

    def __init__(self, processor: Any, placeholder: int) -> None:
        """Store the processor and the placeholder; see the class."""
        self.processor = processor
        self.placeholder = placeholder

    @property
    def facts(self) -> Mapping[str, object]:
        """The settings that determine the pixels of an image file, as input of a fingerprint."""
        import PIL

        release = ".".join(PIL.__version__.split(".")[:2])
        return {
            "class": type(self.processor).__name__,
            "settings": self.processor.to_dict(),
            "pillow": release,
            "placeholder": self.placeholder,
        }

    def read(
        self, images: Sequence[bytes], field: str = "images", max_tokens: int | None = None
    ) -> Pixels:
        """Return the pixels of one or more encoded images.

        Images are decoded one at a time to limit the memory. All images together have at most
        MAX_PIXELS pixels and at most `max_tokens` model tokens. `max_tokens` is the part of the
        model's context that the other tokens of the sequence leave free; None means no limit.

        Raises InvalidInput, naming `field`, if a file is not an image, or if a limit is exceeded.
        """
        remaining_pixels = MAX_PIXELS
        pixels_of_images: list[Pixels] = []
        for image in images:
            picture = _decode_image(image, remaining_pixels, field)
            remaining_pixels -= picture.width * picture.height
            pixels_of_images.append(self._process_picture(picture, field))
            if (
                max_tokens is not None
                and sum(pixels.tokens[0] for pixels in pixels_of_images) > max_tokens
            ):
                raise InvalidInput(
                    f"the images have more than {max_tokens} tokens, the most that fit in the"
                    " context of the model with the other tokens of the sequence",
                    field=field,
                    hint="use smaller images, a shorter sequence, or a model with a longer context",
                )
        return Pixels(
            np.concatenate([pixels.values for pixels in pixels_of_images]),
            np.concatenate([pixels.grid for pixels in pixels_of_images]),
            tuple(pixels.tokens[0] for pixels in pixels_of_images),
        )

    def _process_picture(self, picture: Any, field: str) -> Pixels:
        try:
            inputs = self.processor(images=[picture], return_tensors="np")
        except ValueError as error:  # such as an aspect ratio of more than 200
            raise _unusable_image(str(error), field) from error
        grid = np.asarray(inputs["image_grid_thw"], np.int64)
        tokens = int(grid.prod()) // self.processor.merge_size**2
        return Pixels(np.asarray(inputs["pixel_values"], np.float32), grid, (tokens,))


def makes_grids(processor: Any) -> bool:
    """Return whether an image processor returns patches with a grid, as for Qwen models."""
    names = getattr(processor, "model_input_names", ())
    return "image_grid_thw" in names and hasattr(processor, "merge_size")


def plain_image(grey: int) -> bytes:
    """Return a PNG image of one grey level (0 to 255), to test how a model reads images."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), (grey, grey, grey)).save(file, "PNG")
    return file.getvalue()


def stored_images(images: Sequence[tuple[str, str]]) -> bytes:
    """Encode (name, sha256) pairs of images for a store; b"" if there are no images."""
    return json.dumps(images, ensure_ascii=False).encode() if images else b""


def read_stored_images(data: bytes) -> list[tuple[str, str]]:
    """Decode (name, sha256) pairs from the bytes that `stored_images` returned."""
    return [(name, digest) for name, digest in json.loads(data)] if data else []


def digest_of(image: bytes) -> str:
    """Return the sha256 of an encoded image, in hex."""
    return hashlib.sha256(image).hexdigest()


def image_file(folder: Path, name: str, location: str) -> Path:
    """Return the path of an image that a record names. A relative name is a path in `folder`.

    `location`: the record, for messages. Raises InvalidInput (`data.image_column`) if the file does
    not exist.
    """
    path = folder / name
    try:
        exists = path.is_file()
    except OSError:  # such as a name that is too long
        exists = False
    if not exists:
        shown_path = (
            str(path) if len(str(path)) < _MAX_SHOWN_CHARS else f"{str(path)[:_MAX_SHOWN_CHARS]}..."
        )
        raise InvalidInput(
            f"{location} names the image {shown_path}, which is not a file",
            field="data.image_column",
            hint="paths are relative to the data file; correct the path",
        )
    return path


def read_image(path: Path, location: str) -> bytes:
    """Return the bytes of an image file. Raises InvalidInput if the file cannot be read.

    `location`: the record that names the image, for messages.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"cannot read the image {path} of {location}: {error.strerror or error}",
            field="data.image_column",
            hint="paths are relative to the data file; correct the path, or the file",
        ) from error


def read_same_image(path: Path, digest: str) -> bytes:
    """Return the bytes of an image file. Raises Corrupt if their sha256 is not `digest`."""
    image = read_image(path, "a prompt")
    if digest_of(image) != digest:
        raise Corrupt(
            f"the image {path} has changed since the job or the capture read it",
            hint="restore the file",
        )
    return image


def expanded_ids(
    ids: NDArray[np.int32], placeholder: int, tokens: Sequence[int]
) -> NDArray[np.int32]:
    """Return the expanded ids of collapsed ids [T]: placeholder i is repeated `tokens[i]` times.

    `tokens`: number of model tokens of each image. Raises ValueError if the number of placeholders
    is not the number of images.
    """
    places = np.flatnonzero(ids == placeholder)
    if len(places) != len(tokens):
        raise ValueError(f"{len(places)} placeholders for {len(tokens)} images")
    counts = np.ones(len(ids), np.int64)
    counts[places] = tokens
    return np.repeat(ids, counts)


def collapsed_ids(
    ids: NDArray[np.int32], placeholder: int, tokens: Sequence[int]
) -> NDArray[np.int32]:
    """Return the collapsed ids of expanded ids, given the same `tokens` as for `expanded_ids`.

    Raises ValueError if the number of placeholders is not the sum of `tokens`.
    """
    places = np.flatnonzero(ids == placeholder)
    if len(places) != sum(tokens):
        raise ValueError(f"{len(places)} placeholders for {sum(tokens)} tokens of images")
    firsts = np.cumsum([0, *tokens])[:-1]
    return np.delete(ids, np.delete(places, firsts))


def require_pillow(field: str) -> None:
    """Raise InvalidInput, naming `field`, if the package that decodes images is not installed."""
    if find_spec("PIL") is None:
        raise InvalidInput(
            "a prompt with images needs the package pillow, which is not installed",
            field=field,
            hint=install_command("images"),
        )


def _decode_image(image: bytes, max_pixels: int, field: str) -> Any:
    """Return an image of at most `max_pixels` pixels as RGB, rotated according to its metadata."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(image), formats=_FORMATS) as opened:
            width, height = opened.size
            if width * height <= max_pixels:
                return ImageOps.exif_transpose(opened).convert("RGB")
            problem = f"{width} x {height} pixels exceed the limit of {max_pixels}"
    except UnidentifiedImageError:
        problem = "the file is not PNG, JPEG or WebP"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        problem = str(error) or type(error).__name__
    raise _unusable_image(problem, field)


def _unusable_image(problem: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"an image cannot be used: {(problem.splitlines() or ['damaged'])[0]}",
        field=field,
        hint="give a PNG, JPEG or WebP file that an image viewer can open",
    )
