"""A small real server that speaks the completions protocol, and what the replay's tests are made of."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web

from engine import Model, SamplingRow, load_model, sample
from engine.random_model import RandomModelSpec, write_random_model
from loadtest.plan import PlannedRequest
from loadtest.tokens import ModelTokens, load_model_tokens
from traces import Trace, TraceRow

BUNDLED_MODEL = Path(__file__).parents[2] / "moonpool" / "data" / "model"
BLOCK = 8

Answer = Callable[[dict[str, Any]], list[int]]
Handler = Callable[["CompletionServer", web.Request, dict[str, Any]], Any]


@dataclass
class CompletionServer:
    """An OpenAI-compatible completions server on a thread of its own.

    `answer` gives the output tokens of a request; `behave` may take a request over entirely. Prefix reuse is counted
    as by an infinite cache of blocks, per cache salt. Everything that came in is kept in `bodies`.
    """

    answer: Answer
    tokens: ModelTokens
    behave: Handler | None = None
    api_key: str = ""
    max_model_len: int | None = 2048
    tokenize: bool = True
    fingerprint: str = ""
    token_delay_s: float = 0.0
    usage: bool = True
    token_ids: bool = True
    answer_metrics: bool = True
    metrics_path: str = "/metrics"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    running: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    _blocks: set[bytes] = field(default_factory=set)

    async def models(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        card: dict[str, Any] = {"id": "tiny", "object": "model", "max_model_len": self.max_model_len}
        if self.fingerprint:
            card["moonpool"] = {"fingerprint": self.fingerprint, "block_tokens": BLOCK}
        return web.json_response({"object": "list", "data": [card]})

    async def tokenise(self, request: web.Request) -> web.StreamResponse:
        if not self.tokenize:
            raise web.HTTPNotFound
        body = await request.json()
        return web.json_response({"tokens": self.tokens.encode_all([body["prompt"]])[0]})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if not self.answer_metrics:
            raise web.HTTPServiceUnavailable
        lines = [
            f'vllm:num_requests_running{{node="p0",role="prefill"}} {self.running}',
            'vllm:num_requests_waiting{node="p0",role="prefill"} 0',
            *(
                f'moonpool:kv_bytes_moved_total{{node="p0",role="prefill",path="{path}"}} {moved}'
                for path, moved in self.counters.items()
            ),
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(dict(body))
        if self.behave is not None:
            taken = await self.behave(self, request, body)
            if taken is not None:
                return taken
        return await self.stream(request, body, self.answer(body))

    async def stream(self, request: web.Request, body: dict[str, Any], ids: list[int]) -> web.StreamResponse:
        chat = "messages" in body
        body["prompt"] = self.prompt_ids(body)
        cached = self.reuse(body)
        self.running += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in ids:
            choice = {"index": 0, "text": "x", "token_ids": [token], "finish_reason": None}
            if chat:
                choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
            if not self.token_ids:
                choice.pop("token_ids", None)
            await response.write(event({"choices": [choice]}))
            await asyncio.sleep(self.token_delay_s)
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        extension = {"request_id": f"r{len(self.bodies)}", "queue_s": 0.001, "prefill_s": 0.002, "attempts": 1}
        if self.usage:
            await response.write(event({"choices": [], "usage": usage, "moonpool": extension}))
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        self.counters["push"] += 100 * len(body["prompt"])
        return response

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        return self.tokens.encode_all([prompt])[0] if isinstance(prompt, str) else list(prompt)

    def reuse(self, body: dict[str, Any]) -> int:
        ids, salt = np.array(body["prompt"], np.int32), body.get("cache_salt", "").encode()
        ends = range(BLOCK, len(ids) + 1, BLOCK)
        known = 0
        while known < (len(ids) - 1) // BLOCK and salt + ids[: BLOCK * (known + 1)].tobytes() in self._blocks:
            known += 1
        self._blocks.update(salt + ids[:end].tobytes() for end in ends)
        return BLOCK * known


def event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


class ServerThread:
    """Runs a CompletionServer on a loop of its own."""

    def __init__(self, server: CompletionServer) -> None:
        self.server = server
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self.server.models)
        app.router.add_post("/tokenize", self.server.tokenise)
        app.router.add_get(self.server.metrics_path, self.server.metrics)
        app.router.add_post("/v1/completions", self.server.completions)
        app.router.add_post("/v1/chat/completions", self.server.completions)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.server.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def tokens() -> ModelTokens:
    return load_model_tokens(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with confident random weights and the bundled tokenizer."""
    return write_random_model(
        tmp_path_factory.mktemp("model"),
        RandomModelSpec(vocab=2048, hidden=32, layers=2, scale=3.0),
        tokenizer=BUNDLED_MODEL,
    )


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    return load_model(model_path)


@pytest.fixture(scope="session")
def generate(model: Model) -> Answer:
    """The model's own answers, token by token, as the cluster's sampler would give them."""

    def answer(body: dict[str, Any]) -> list[int]:
        ids = list(body["prompt"])
        for index in range(body["max_tokens"]):
            row = SamplingRow(body["temperature"], 1.0, 0, body["seed"], 0, index)
            logits = torch.from_numpy(model.score(np.array(ids, np.int32))[-1:])
            ids.append(int(sample(logits, [row])[0]))
        return ids[len(body["prompt"]) :]

    return answer


@pytest.fixture
def serve(tokens: ModelTokens) -> Iterator[Callable[..., CompletionServer]]:
    """Starts servers; by default they answer with the token 7."""
    threads: list[ServerThread] = []

    def start(**options: Any) -> CompletionServer:
        options.setdefault("answer", lambda body: [7] * (body.get("max_tokens") or body["max_completion_tokens"]))
        threads.append(ServerThread(CompletionServer(tokens=tokens, **options)))
        return threads[-1].server

    yield start
    for thread in threads:
        thread.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as opened:
        yield opened


def request_of(index: int, **changes: Any) -> PlannedRequest:
    values: dict[str, Any] = {
        "index": index,
        "arrival_s": 0.0,
        "prompt": np.arange(20, dtype=np.int32) + index,
        "block_ids": (index, 1000 + index),
        "max_tokens": 3,
        "temperature": 0.0,
        "seed": index,
        "overlong": False,
    }
    return PlannedRequest(**(values | changes))


@pytest.fixture
def make_request() -> Callable[..., PlannedRequest]:
    return request_of


@pytest.fixture
def small_trace() -> Trace:
    """24 requests in 2.3 s; families of three that share their beginnings."""
    rows = []
    for i in range(24):
        family = i % 8
        ids = (0, *(100 * (family + 1) + j for j in range(3 + family)), 10_000 + i)
        rows.append(TraceRow(i, 100 * i, 512 * (len(ids) - 1) + 200, 64 * (1 + i % 5), ids))
    return Trace("small", tuple(rows))
