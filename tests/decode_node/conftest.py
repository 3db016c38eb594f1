"""A prefill and a decode node in this process, over real gRPC and a real messenger, with a bare-bones frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from decode_node.server import DecodeFace
from engine import Model, load_model
from engine.random_model import write_random_model
from kvpool import chain_keys, chain_seed
from messenger import MessengerConfig
from messenger.control import ControlServer, open_channel, start_server
from moonpool_proto.v1.conductor_pb2 import NodeRef
from moonpool_proto.v1.worker_pb2 import FINISH_NONE, Cancel, Failure, FrontendMessage, Hello, Submit, Token
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub, add_WorkerServicer_to_server
from prefill_node.server import PrefillFace
from worker.config import WorkerConfig

BLOCK = 8


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), layers=2, vocab=256, max_len=512, scale=3.0, seed=3)


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    return load_model(model_path, threads=1)


@dataclass
class Request:
    """What the frontend has seen of one request."""

    tokens: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    cached_tokens: int = 0
    total: int = 0  # tokens in all, once known
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    progressed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> list[int]:
        return [self.tokens[i] for i in range(len(self.tokens))]

    async def reaches(self, count: int) -> None:
        while len(self.tokens) < count:
            self.progressed.clear()
            await self.progressed.wait()


class Frontend:
    """Attached to both nodes."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], Request] = {}
        self._calls: dict[str, Any] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []

    async def attach(self, node_id: str, target: str) -> None:
        channel = open_channel(target)
        self._channels.append(channel)
        call = WorkerStub(channel).Attach()
        await call.write(FrontendMessage(hello=Hello(frontend_id="front", incarnation=1)))
        await call.read()
        self._calls[node_id] = call
        self._readers.append(asyncio.create_task(self._read(call)))

    async def _read(self, call: Any) -> None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for token in message.tokens:
                    self._take(token)
                for failure in message.failures:
                    request = self.requests[failure.request_id, failure.attempt]
                    request.failures.append(failure)
                    request.ended.set()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass

    def _take(self, token: Token) -> None:
        request = self.requests[token.request_id, token.attempt]
        assert token.index not in request.tokens
        request.tokens[token.index] = token.token_id
        if token.HasField("timing"):
            request.cached_tokens = token.timing.cached_tokens
        request.progressed.set()
        if token.finish != FINISH_NONE:
            request.total = token.index + 1
        if len(request.tokens) == request.total:  # the two nodes' streams may overtake each other
            request.ended.set()

    async def submit(self, submit: Submit) -> Request:
        request = self.requests[submit.request_id, submit.attempt] = Request()
        await self._calls["prefill"].write(FrontendMessage(submit=submit))
        return request

    async def cancel(self, node_id: str, request_id: str, attempt: int) -> None:
        await self._calls[node_id].write(FrontendMessage(cancel=Cancel(request_id=request_id, attempt=attempt)))

    async def close(self) -> None:
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._readers)
        for channel in self._channels:
            await channel.close()


@dataclass
class Pair:
    prefill: PrefillFace
    decode: DecodeFace
    frontend: Frontend
    decode_target: str

    def submit(self, prompt: list[int], name: str, *, max_tokens: int = 12, attempt: int = 1) -> Submit:
        ids = np.array(prompt, dtype=np.int32)
        seed = chain_seed("", "test", BLOCK)
        message = Submit(
            request_id=name,
            attempt=attempt,
            frontend_id="front",
            model="m",
            prompt_ids=ids.astype("<i4").tobytes(),
            chain=chain_keys(seed, ids, BLOCK).tobytes(),
            chain_seed=seed,
            timeout_s=60,
        )
        message.sampling.max_tokens = max_tokens
        message.sampling.top_p = 1.0
        message.placement.decode.CopyFrom(NodeRef(node_id="decode", target=self.decode_target))
        return message

    async def at_rest(self) -> None:
        """Returns once neither node holds anything; fails after 20 s with what is held."""
        try:
            async with asyncio.timeout(20):
                while any(face.node.validate()[0] for face in (self.prefill, self.decode)):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError([face.node.validate() for face in (self.prefill, self.decode)]) from None


Start = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def start_pair(tmp_path: Path, model_path: Path) -> AsyncIterator[Start]:
    pairs: list[Pair] = []
    servers: list[ControlServer] = []

    async def start(transport: str = "auto", **decode_options: Any) -> Pair:
        def config(name: str, **options: Any) -> WorkerConfig:
            return WorkerConfig(
                node_id=name,
                listen=f"unix:{tmp_path}/{name}.sock",
                conductor_target=f"unix:{tmp_path}/nobody.sock",
                pool_target="",
                model_path=model_path,
                served_model_name="m",
                block_tokens=BLOCK,
                messenger=MessengerConfig(transport=transport, run_dir=tmp_path),  # type: ignore[arg-type]
                **{"capacity_tokens": 1024, "prefill_chunk_tokens": 32, **options},
            )

        prefill, decode = PrefillFace(config("prefill")), DecodeFace(config("decode", **decode_options))
        frontend = Frontend()
        for name, face in (("prefill", prefill), ("decode", decode)):
            server = await start_server(
                face.node.config.listen, lambda s, face=face: add_WorkerServicer_to_server(face, s)
            )
            servers.append(server)
            await face.node.start(server.target)
            await frontend.attach(name, server.target)
        pairs.append(Pair(prefill, decode, frontend, servers[-1].target))
        return pairs[-1]

    yield start
    for pair in pairs:
        await pair.frontend.close()
    for server in servers:
        await server.stop(0.1)
    for pair in pairs:
        await pair.prefill.node.close()
        await pair.decode.node.close()
        await pair.prefill.close()
        pair.decode.close()
