"""A small OpenAI-compatible server with a real model, which counts its requests.

Its sampler shares no code with the product: probabilities of a plain forward pass, reduced to
their nucleus, sampled by the request's seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Fault = Callable[[int], bytes | None]  # request number -> the bytes sent in place of an answer


class OpenAIServer:
    """`requests_by_seed`: number of requests of each seed; a seed identifies prompt and sample."""

    def __init__(self, model: Path, fault: Fault = lambda number: None) -> None:
        self.requests_by_seed: Counter[int] = Counter()
        self.authorizations: set[str | None] = set()
        self.paths: set[str] = set()
        self.fault = fault
        self.requests = 0
        self.most_at_once = 0
        self._open = 0
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._next_probabilities = lru_cache(maxsize=None)(self._compute_probabilities)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, daemon=True)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop_requested.set)
        self._thread.join(60)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def _run_loop(self) -> None:
        self._loop.run_until_complete(self._run_until_stopped())
        self._loop.close()

    async def _run_until_stopped(self) -> None:
        self._stop_requested = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._handle_connection, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop_requested.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.05)

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers.add(writer)
        try:
            while await self._handle_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.paths.add(first.split()[1])
        self.authorizations.add(headers.get("authorization"))
        self.requests_by_seed[body["seed"]] += 1
        self.requests += 1
        number = self.requests
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        await asyncio.sleep(0.002)  # let other requests arrive meanwhile
        self._open -= 1
        fault = self.fault(number)
        if fault == b"":
            return False
        writer.write(fault or http_response(200, self._complete(body)))
        await writer.drain()
        return not (fault and fault.endswith(b"["))

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        chat = "messages" in body
        text = body["messages"][0]["content"] if chat else body["prompt"]
        prompt = tuple(self._tokenizer(text)["input_ids"])
        dice = random.Random(body["seed"])
        ids: list[int] = []
        while len(ids) < body["max_tokens"] and self._tokenizer.eos_token_id not in ids:
            chances = self._next_probabilities(
                prompt + tuple(ids), body["temperature"], body["top_p"]
            )
            ids += dice.choices(range(len(chances)), chances)
        is_finished = self._tokenizer.eos_token_id in ids
        text_of_answer = self._tokenizer.decode(ids, skip_special_tokens=True)
        choice: dict[str, Any] = {"finish_reason": "stop" if is_finished else "length", "index": 0}
        choice |= {"message": {"content": text_of_answer}} if chat else {"text": text_of_answer}
        return {"choices": [choice], "usage": {"completion_tokens": len(ids)}}

    @torch.no_grad()
    def _compute_probabilities(
        self, ids: tuple[int, ...], temperature: float, top_p: float
    ) -> list[float]:
        logits = self._model(torch.tensor([ids])).logits[0, -1].double()
        chances: list[float] = (logits / temperature).softmax(0).tolist()
        kept_mass = 0.0
        for token_id in sorted(range(len(chances)), key=lambda i: -chances[i]):
            if kept_mass >= top_p:
                chances[token_id] = 0.0
            else:
                kept_mass += chances[token_id]
        return chances


def http_response(status: int, document: Any, headers: str = "") -> bytes:
    body = json.dumps(document).encode()
    return f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
