"""Converts queries with images to the inputs of the hf engine's model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.data.images import ImageReader, Pixels, expanded_ids, plain_image
from clients.teacher.query import ScoreQuery

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ExpandedQuery(ScoreQuery):
    """A query whose `token_ids` and `start` count every image token; `images` are empty.

    Its rows are the rows of the original query, which has one placeholder per image: all
    placeholders are before `start`.
    """

    pixels: Pixels = field(kw_only=True)


def expand_query(query: ScoreQuery, reader: ImageReader, max_length: int) -> ExpandedQuery:
    """Return a query with images as the model reads it. Decodes the images.

    Raises InvalidInput if an image cannot be used, or if the sequence would have more than
    `max_length` tokens.
    """
    text_tokens = len(query.token_ids) - len(query.images)
    pixels = reader.read(query.images, max_tokens=max_length - text_tokens)
    token_ids = expanded_ids(query.token_ids, reader.placeholder, pixels.tokens)
    query_fields: dict[str, Any] = {
        field_info.name: getattr(query, field_info.name) for field_info in fields(ScoreQuery)
    }
    extra_tokens = len(token_ids) - len(query.token_ids)
    query_fields |= {"token_ids": token_ids, "start": query.start + extra_tokens, "images": ()}
    return ExpandedQuery(**query_fields, pixels=pixels)


def build_image_inputs(
    queries: Sequence[ScoreQuery], ids: Tensor, reader: ImageReader | None
) -> dict[str, Tensor]:
    """Return the model's inputs for the images of a batch; {} if no query has an image.

    `ids` [B, T] are the padded token ids of the queries, on the device of the model. `reader` is
    the reader that has decoded the images.
    """
    pixels = [query.pixels for query in queries if isinstance(query, ExpandedQuery)]
    if not pixels or reader is None:
        return {}
    values = np.concatenate([query_pixels.values for query_pixels in pixels])
    grid = np.concatenate([query_pixels.grid for query_pixels in pixels])
    return {
        "pixel_values": torch.from_numpy(values).to(ids.device),
        "image_grid_thw": torch.from_numpy(grid).to(ids.device),
        "mm_token_type_ids": ids.eq(reader.placeholder).int(),
    }


@torch.inference_mode()
def reads_images(body: Any, reader: ImageReader, device: torch.device) -> bool:
    """Return True if images change the last hidden states of a model.

    `body` is the module that returns the states. A model may need other inputs, or ignore its image
    inputs; the reason is logged.
    """
    states = []
    for grey in (0, 255):
        tokens = np.array([0, reader.placeholder, 0, 0], np.int32)
        query = ScoreQuery(tokens, 3, top_k=1, images=(plain_image(grey),))
        expanded = expand_query(query, reader, 1 << 20)
        ids = torch.from_numpy(expanded.token_ids).long()[None].to(device)
        try:
            inputs = build_image_inputs([expanded], ids, reader)
            states.append(body(input_ids=ids, use_cache=False, **inputs).last_hidden_state[0, -1])
        except Exception as error:  # noqa: BLE001 (a model may raise anything)
            log.warning("the teacher reads no images: %s", " ".join(str(error).split())[:300])
            return False
    if torch.equal(*states):
        log.warning("the teacher reads no images: they do not change its hidden states")
        return False
    return True
