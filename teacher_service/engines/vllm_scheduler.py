"""vLLM's scheduler with steps that may be shorter, for the queries of clients that wait for one."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from teacher_service.engines.vllm_wire import PACE


class SharingScheduler(Scheduler):  # type: ignore[misc]
    """Limits the tokens of a step as the newest request says: short steps.

    A single request that arrives waits for the step that runs, so a short step without one has only
    half of the tokens. vLLM gives tokens to requests that are partly computed before others: single
    ones are the first of them, and the others pause for the step that begins single ones, but for
    no two steps in a row, so that a long request ends also where single ones always wait.
    """

    max_num_scheduled_tokens: int
    running: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._whole = self.max_num_scheduled_tokens
        self._short = 0
        self._paused = False

    def add_request(self, request: Any) -> None:
        """Add a request, and take over the limit that it names."""
        self._short, _ = _pace_of(request)
        super().add_request(request)

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Return what the next step computes."""
        paused: list[Any] = []
        if self._short:
            paused = self._prepare()
        else:
            self.max_num_scheduled_tokens = self._whole
        try:
            return super().schedule(*arguments, **options)
        finally:
            self.running = [*paused, *self.running]

    def _prepare(self) -> list[Any]:
        """Prepare a short step; return the requests that pause, which are no longer running."""
        begun = [request for request in self.running if _is_single(request)]
        others = [request for request in self.running if not _is_single(request)]
        waits = any(_is_single(request) for request in self.waiting)
        self.max_num_scheduled_tokens = self._short if waits or begun else max(1, self._short // 2)
        self._paused = waits and not self._paused
        self.running = begun if self._paused else [*begun, *others]
        return others if self._paused else []


def _pace_of(request: Any) -> tuple[int, bool]:
    params = request.pooling_params
    tokens, single = (params.extra_kwargs or {}).get(PACE, (0, False)) if params else (0, False)
    return tokens, single


def _is_single(request: Any) -> bool:
    return _pace_of(request)[1]
