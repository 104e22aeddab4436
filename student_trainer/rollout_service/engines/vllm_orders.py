"""The orders that vLLM's worker samples: random numbers, records, and sampling steps.

vLLM passes one row of logits for each sequence in its batch. The order of the rows changes from
step to step. Shapes: B sequences in the batch, V ids, N sequences of an order.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from student_trainer.rollout_service.engines.vllm_wire import record_type
from student_trainer.rollouts.sample_step import SampledStep, sample_step
from student_trainer.rollouts.sampler import rollout_noise

Numbers = NDArray[np.int64]

_MAP_NORESERVE = 0x4000  # Linux's value; the module mmap does not define it


class WorkerOrders:
    """Samples the steps of all orders, and keeps their records until `take` returns them.

    `version`: the version of the model's weights. It is stored in every record.
    """

    def __init__(self) -> None:
        self.version = 0
        self._orders: dict[str, _Order] = {}
        self._names: list[str] = []  # of the batch that `_groups` describes
        self._groups: list[_Group] = []
        self._records_in_transit: deque[_RecordsInTransit] = deque()

    def sample(
        self,
        logits: Tensor,
        names: Sequence[str],
        fields_of: Callable[[str], Mapping[str, Any] | None],
        positions: Numbers,
        is_due: NDArray[np.bool_],
    ) -> Tensor:
        """Sample one step and record it; return the tokens [B] int64.

        - names [B]: names of the requests in the batch.
        - fields_of: a function that returns the `request_fields` of a request; None for a request
          that belongs to no order.
        - positions [B]: positions of the new tokens; 0 for the first sampled token.
        - is_due [B]: False for a request whose prompt is not completely processed. It gets token 0.

        If a position is sampled again, the new record replaces the old one.
        """
        if names != self._names:
            self._names, self._groups = list(names), self._group_rows(names, fields_of)
        token_ids = torch.zeros(len(names), dtype=torch.long, device=logits.device)
        for group in self._groups:
            order = group.order
            is_sampled = is_due[group.batch_rows] & (positions[group.batch_rows] < order.longest)
            batch_rows, order_rows = group.batch_rows[is_sampled], group.order_rows[is_sampled]
            if not len(batch_rows):
                continue
            index = torch.from_numpy(batch_rows).to(logits.device)
            step = order.sample(
                logits if len(batch_rows) == len(names) else logits[index],
                order_rows,
                positions[batch_rows],
            )
            token_ids[index] = step.token_ids
            self._records_in_transit.append(
                _RecordsInTransit(order, order_rows, positions[batch_rows], self.version, step)
            )
        self._store_arrived(wait=False)
        return token_ids

    def take(self, name: str, index_lengths: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the records of sequences of the order `name`, as bytes.

        `index_lengths`: for each sequence, its index in the order and the number of its first
        tokens whose records are returned.
        """
        self._store_arrived(wait=True)
        records = self._orders[name].records
        return [records[index, :length].tobytes() for index, length in index_lengths]

    def started_indices(self, name: str) -> list[int]:
        """Return the indices of the sequences of an order that have been in a batch before."""
        return [*self._orders[name].started_indices] if name in self._orders else []

    def drop(self, name: str) -> None:
        """Delete an order.

        Unknown orders are ignored: none of their requests was in a batch.
        """
        self._names, self._groups = [], []
        self._orders.pop(name, None)

    def _group_rows(
        self, names: Sequence[str], fields_of: Callable[[str], Mapping[str, Any] | None]
    ) -> list[_Group]:
        row_pairs: dict[str, list[tuple[int, int]]] = {}
        for batch_row, name in enumerate(names):
            fields = fields_of(name)
            if fields is None:
                continue
            key = fields["order"]
            if key not in self._orders:
                self._orders[key] = _Order(fields)
            self._orders[key].add(fields)
            row_pairs.setdefault(key, []).append((batch_row, fields["index"]))
        return [
            _Group(self._orders[key], *np.array(pairs, np.int64).T)
            for key, pairs in row_pairs.items()
        ]

    def _store_arrived(self, *, wait: bool) -> None:
        """Store the records that have arrived on the CPU. With `wait`, wait for all records."""
        while self._records_in_transit and (wait or self._records_in_transit[0].has_arrived()):
            self._records_in_transit.popleft().store()


class _Order:
    """An order: its settings, random numbers and records.

    - _noise [N, longest] float64: the random numbers for the tokens; None without a seed.
    - _draw_noise [N, longest] float64: the random numbers for the draws; None without draws.
    - records [N, longest]: one record per token.
    - started_indices: the indices of the sequences that have been in a batch.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        shape = fields["sequences"], fields["longest"]
        self.longest: int = fields["longest"]
        self.records = _sparse_array(shape, record_type(fields["top_k"], fields["draws"]))
        self._fields = fields
        self._noise = _sparse_array(shape, np.float64) if fields["seed"] is not None else None
        self._draw_noise = _sparse_array(shape, np.float64) if fields["draws"] else None
        self.started_indices: set[int] = set()

    def add(self, fields: Mapping[str, Any]) -> None:
        """Generate the random numbers of a sequence, if they do not exist yet."""
        index = fields["index"]
        if index in self.started_indices:
            return
        self.started_indices.add(index)
        used_range = slice(fields["used"], fields["used"] + fields["limit"])
        for table, draws in ((self._noise, False), (self._draw_noise, True)):
            if table is not None:
                stream = rollout_noise(
                    fields["number"], fields["seed"], fields["stream_tokens"], draws=draws
                )
                table[index, : fields["limit"]] = stream[used_range].numpy()

    def sample(self, logits: Tensor, order_rows: Numbers, positions: Numbers) -> SampledStep:
        noise, draw_noise = (
            None
            if table is None
            else torch.from_numpy(table[order_rows, positions]).to(logits.device)
            for table in (self._noise, self._draw_noise)
        )
        return sample_step(
            logits[:, : self._fields["vocab_size"]],
            top_k=self._fields["top_k"],
            temperature=self._fields["temperature"],
            uniforms=noise,
            draws=self._fields["draws"],
            draw_uniforms=draw_noise,
        )


def _sparse_array(shape: tuple[int, int], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of zeros that uses memory only for the pages that are written.

    Most sequences end before their limit, so the largest part of an order's arrays is never
    written.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


@dataclass(frozen=True)
class _Group:
    """The sequences of one order in the batch.

    - batch_rows: the row of each sequence in the batch.
    - order_rows: the row of each sequence in the arrays of the order.
    """

    order: _Order
    batch_rows: Numbers
    order_rows: Numbers


class _RecordsInTransit:
    """The records of a step during their copy to the CPU. The GPU does not wait for it."""

    def __init__(
        self,
        order: _Order,
        order_rows: Numbers,
        positions: Numbers,
        version: int,
        step: SampledStep,
    ) -> None:
        self._order = order
        self._rows, self._positions = order_rows, positions
        self._version = version
        columns = {"token": step.token_ids, "logprob": step.logprobs, "head": step.head_ids}
        if step.draws is not None:
            columns |= {"draw": step.draws.ids, "draw_logprob": step.draws.logprobs}
        int32_columns = {
            name: column if column.is_floating_point() else column.int()
            for name, column in columns.items()
        }
        self._columns = {
            name: column.to("cpu", non_blocking=True) for name, column in int32_columns.items()
        }
        self._event: Any = None
        if step.token_ids.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def has_arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def store(self) -> None:
        """Wait until the records are on the CPU, then store them in their order."""
        if self._event is not None:
            self._event.synchronize()
        for name, column in self._columns.items():
            self._order.records[name][self._rows, self._positions] = column.numpy()
        self._order.records["version"][self._rows, self._positions] = self._version
