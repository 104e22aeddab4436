"""vLLM's scheduler with shorter steps, for clients that send one query at a time."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from teacher_service.engines.vllm_wire import PACE


class SharingScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler of vLLM whose steps are short if the newest request sets a limit of tokens.

    A client that sends one query at a time sends "single" requests, see QuerySchedule. A new single
    request must wait for the end of the running step. Therefore, steps with a single request
    running or waiting use the whole limit, and other steps half of it.

    vLLM continues the running requests before it begins new requests. Of the running requests,
    single requests come first. When a single request waits, the other requests pause for one step,
    but never for two steps in a row, so that long requests always end.
    """

    max_num_scheduled_tokens: int
    running: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._full_step_tokens = self.max_num_scheduled_tokens
        self._short_step_tokens = 0
        self._has_paused = False

    def add_request(self, request: Any) -> None:
        """Add a request; its limit of tokens per step replaces the limit of earlier requests."""
        self._short_step_tokens, _ = _read_pace(request)
        super().add_request(request)

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Return vLLM's SchedulerOutput of the next step."""
        paused_requests: list[Any] = []
        if self._short_step_tokens:
            paused_requests = self._prepare_short_step()
        else:
            self.max_num_scheduled_tokens = self._full_step_tokens
        try:
            return super().schedule(*arguments, **options)
        finally:
            self.running = [*paused_requests, *self.running]

    def _prepare_short_step(self) -> list[Any]:
        """Set the limit of a short step, and remove the requests that pause from `running`.

        Returns the removed requests.
        """
        single_requests = [request for request in self.running if _is_single(request)]
        other_requests = [request for request in self.running if not _is_single(request)]
        is_single_waiting = any(_is_single(request) for request in self.waiting)
        self.max_num_scheduled_tokens = (
            self._short_step_tokens
            if is_single_waiting or single_requests
            else max(1, self._short_step_tokens // 2)
        )
        self._has_paused = is_single_waiting and not self._has_paused
        self.running = single_requests if self._has_paused else [*single_requests, *other_requests]
        return other_requests if self._has_paused else []


def _read_pace(request: Any) -> tuple[int, bool]:
    params = request.pooling_params
    tokens, single = (params.extra_kwargs or {}).get(PACE, (0, False)) if params else (0, False)
    return tokens, single


def _is_single(request: Any) -> bool:
    return _read_pace(request)[1]
