"""Queries with images, as the hf engine gives them to its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.data.images import ImageReader, Pixels, expanded_ids
from clients.teacher.query import ScoreQuery


@dataclass(frozen=True, eq=False)
class ExpandedQuery(ScoreQuery):
    """A query whose `token_ids` and `start` count every image token; `images` are empty.

    Its rows are those of the query with one placeholder an image: all placeholders are before
    `start`.
    """

    pixels: Pixels = field(kw_only=True)


def expanded_query(query: ScoreQuery, reader: ImageReader, max_length: int) -> ExpandedQuery:
    """Return a query with images as the model reads it. Decodes the images.

    Raises InvalidInput if an image cannot be used, or if the sequence would have more than
    `max_length` tokens.
    """
    others = len(query.token_ids) - len(query.images)
    pixels = reader.read(query.images, most_tokens=max_length - others)
    token_ids = expanded_ids(query.token_ids, reader.placeholder, pixels.tokens)
    values: dict[str, Any] = {one.name: getattr(query, one.name) for one in fields(ScoreQuery)}
    more = len(token_ids) - len(query.token_ids)
    values |= {"token_ids": token_ids, "start": query.start + more, "images": ()}
    return ExpandedQuery(**values, pixels=pixels)


def image_inputs(
    queries: Sequence[ScoreQuery], ids: Tensor, reader: ImageReader | None
) -> dict[str, Tensor]:
    """Return the model's inputs for the images of a batch; {} if no query has one.

    `ids` [B, T]: the token ids of the queries, padded, on the device of the model. `reader`: has
    read the images.
    """
    pixels = [query.pixels for query in queries if isinstance(query, ExpandedQuery)]
    if not pixels or reader is None:
        return {}
    values = np.concatenate([one.values for one in pixels])
    grid = np.concatenate([one.grid for one in pixels])
    return {
        "pixel_values": torch.from_numpy(values).to(ids.device),
        "image_grid_thw": torch.from_numpy(grid).to(ids.device),
        "mm_token_type_ids": ids.eq(reader.placeholder).int(),
    }
