"""Starts, calls, monitors and stops the processes of vLLM; parses `--engine-option`."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import signal
import sys
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from protos.errors import InvalidInput, Unavailable
from protos.vllm_processes import (
    SHUTDOWN_SECONDS,
    DeathWatch,
    set_environment,
    stdout_on_stderr,
)

_T = TypeVar("_T")

OPTION = "--engine-option"
# Options with this word divide the work over processes. Such options change rows only by rounding.
_PARALLELISM = "parallel"

_TASK = "token_embed"
# Arguments of vLLM that this module sets for every teacher.
OWN_OPTIONS = frozenset(
    [
        *("runner", "convert", "pooler_config", "max_model_len", "skip_tokenizer_init"),
        *("trust_remote_code", "load_format", "enforce_eager", "disable_log_stats"),
    ]
)


class VllmProcess:
    """One vLLM engine in pooling mode, and the event loop that calls it.

    `options` are arguments of vLLM's AsyncEngineArgs. If a process of vLLM dies, this process
    exits with code 1, so that a supervisor restarts it. vLLM logs to stderr. `cached_tokens` counts
    the tokens that came from the prefix cache since the start.

    Raises ValueError if vLLM rejects the options, RuntimeError if vLLM does not start.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        set_environment()
        self._ids = itertools.count()
        self.cached_tokens = 0
        self._closing = False
        self._adapters: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        with stdout_on_stderr():
            self._llm = self.run(_start_llm(options))
        self.config = self._llm.vllm_config
        self.version: str = sys.modules["vllm"].__version__
        atexit.register(self.close)
        self._watch = DeathWatch(self._llm, "this teacher")

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work` in the event loop of this engine and return its result.

        Blocks. Do not call it from that event loop.
        """
        return self.begin(work).result()

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start `work` in the event loop of this engine; to cancel `work`, cancel the future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def pool(
        self,
        token_ids: Sequence[int],
        extra: Mapping[str, Any],
        priority: int,
        *,
        read_cache: bool,
        adapter: str = "",
    ) -> Tensor:
        """Return the output of the worker's pooler for `token_ids`, uint8 [n].

        `extra` are the extra arguments that the pooler receives. Under the policy "priority", vLLM
        begins the request of the lowest `priority` first. With `read_cache` False the request does
        not read vLLM's prefix cache. `adapter` is the name of an adapter of `add_adapter`; "" means
        no adapter. Raises Unavailable if vLLM was stopped.
        """
        from vllm import PoolingParams
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        params = PoolingParams(
            task=_TASK, extra_kwargs=dict(extra), skip_reading_prefix_cache=not read_cache
        )
        stream = self._llm.encode(
            tokens_input(list(token_ids)),
            params,
            str(next(self._ids)),
            lora_request=self._adapters.get(adapter),
            priority=priority,
        )
        try:
            async for output in stream:
                pooled: Tensor = output.outputs.data
                self.cached_tokens += output.num_cached_tokens
        except EngineDeadError as error:
            self._watch.check()
            raise Unavailable("the teacher is stopping", hint="start the teacher again") from error
        return pooled

    def add_adapter(self, name: str, number: int, path: Path) -> None:
        """Load the adapter in the directory `path` under `name`. Raises vLLM's error if this
        fails.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, number, str(path.absolute()))
        self.run(self._llm.add_lora(request))
        self._adapters[name] = request

    def call_worker(self, method: str) -> Any:
        """Call `method` on every worker and return the first worker's result."""
        return self.run(self._llm.collective_rpc(method))[0]

    def close(self) -> None:
        """Stop vLLM's processes, also at the exit of Python. Further calls have no effect."""
        if not self._closing:
            self._closing = True
            self._watch.close()
            self.run(self._shut_down())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _shut_down(self) -> None:
        self._llm.shutdown(timeout=SHUTDOWN_SECONDS)
        cancelled = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*cancelled, return_exceptions=True)


async def _start_llm(options: Mapping[str, Any]) -> Any:
    from vllm.config import PoolerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # Ctrl-C reaches every process of the terminal, but vLLM must run until the last row is sent.
    # vLLM's processes inherit the signal mask of this thread, so SIGINT does not end them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    arguments = AsyncEngineArgs(
        **options,
        runner="pooling",
        convert="embed",
        pooler_config=PoolerConfig(
            task=_TASK, seq_pooling_type="LAST", tok_pooling_type="ALL", use_activation=False
        ),
        # The longest context that fits in memory, at most the model's own maximum.
        max_model_len=-1,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="safetensors",
        # CUDA graphs speed up decoding of single tokens; here every pass is a whole prompt.
        enforce_eager=True,
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(arguments)


def read_options(option_texts: Sequence[str], reserved_names: Collection[str]) -> dict[str, Any]:
    """Parse options, each NAME=VALUE, for vLLM's AsyncEngineArgs.

    A value is parsed as JSON, such as 2, true or {"a": 1}. A value that is not JSON is a text.
    `reserved_names` are the options that the engine sets itself. Raises InvalidInput
    (--engine-option) for a reserved name, for a name that vLLM does not have, and for a repeated
    name.
    """
    if not option_texts:
        return {}
    set_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs

    option_names = {field.name for field in fields(AsyncEngineArgs)}
    options: dict[str, Any] = {}
    for option in option_texts:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise _option_error(f"{option!r} is not NAME=VALUE", "write pipeline_parallel_size=2")
        if name not in option_names:
            raise _option_error(
                f"vLLM has no option {name!r}", "names are those of AsyncEngineArgs"
            )
        if name in reserved_names:
            raise _option_error(f"the teacher sets {name} itself", "leave it out")
        if name in options:
            raise _option_error(f"{name} is given twice", "give it once")
        options[name] = _parse_value(value)
    return options


def select_changing_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that may change rows, for the fingerprint; {} if there is none."""
    changing_options = {name: value for name, value in options.items() if _PARALLELISM not in name}
    return {"options": changing_options} if changing_options else {}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _option_error(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, field=OPTION, hint=hint)
