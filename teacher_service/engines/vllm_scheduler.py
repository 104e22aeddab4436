"""vLLM's scheduler with steps that may be shorter, for the queries of clients that wait for one."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from teacher_service.engines.vllm_wire import PACE


class SharingScheduler(Scheduler):  # type: ignore[misc]
    """Limits the tokens of a step as the newest request says.

    Before each step: if the first request that waits is a single one, the requests that are partly
    computed pause for this step, because vLLM gives them tokens first. They pause for no two steps
    in a row, so that a long query ends also where single ones always wait.
    """

    max_num_scheduled_tokens: int
    running: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._whole = self.max_num_scheduled_tokens
        self._paused = False

    def add_request(self, request: Any) -> None:
        """Add a request, and take over the limit that it names."""
        tokens, _ = _pace_of(request)
        self.max_num_scheduled_tokens = tokens or self._whole
        super().add_request(request)

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Return what the next step computes."""
        paused: list[Any] = []
        if self.running and not self._paused and self.waiting:
            _, single = _pace_of(self.waiting.peek_request())
            if single:
                paused, self.running = self.running, []
        self._paused = bool(paused)
        try:
            return super().schedule(*arguments, **options)
        finally:
            self.running = [*paused, *self.running]


def _pace_of(request: Any) -> tuple[int, bool]:
    params = request.pooling_params
    tokens, single = (params.extra_kwargs or {}).get(PACE, (0, False)) if params else (0, False)
    return tokens, single
