"""A prefill and a decode node in this process, over real gRPC and a real messenger, with a bare-bones frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
import pytest

from decode_node.server import DecodeService
from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from kvpool import PoolNodeConfig, chain_keys, chain_seed, node_metrics
from kvpool.node import PoolNode
from kvpool.service import PoolService
from messenger import MessengerConfig
from moonpool_proto.v1 import pool_pb2_grpc
from moonpool_proto.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL, Software
from moonpool_proto.v1.conductor_pb2 import NodeRef
from moonpool_proto.v1.worker_pb2 import FINISH_NONE, Cancel, Failure, FrontendMessage, Hello, Submit, Token
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub, add_WorkerServicer_to_server
from prefill_node.server import PrefillService
from rpc.control import ControlServer, open_channel, start_server
from rpc.versions import own_software
from settings.keys import assemble
from worker.aggregated import AggregatedService
from worker.config import WorkerConfig
from worker.node import WorkerNode
from worker.servicer import WorkerService

BLOCK = 8


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("model"), RandomModelSpec(layers=2, vocab=256, max_len=512, scale=3.0, seed=3)
    )


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    return load_model(model_path, threads=1)


@dataclass
class Request:
    """State of one request as the frontend sees it."""

    tokens: dict[int, int] = field(default_factory=dict)
    messages: dict[int, Token] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    cached_tokens: int = 0
    total: int = 0  # tokens in all, once known
    first: int = 0  # index of its first token
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
        self._forgotten: set[tuple[str, int]] = set()
        self.calls: dict[str, Any] = {}
        self._writing = asyncio.Lock()
        self._readers: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []

    async def attach(self, node_id: str, target: str, software: Software | None = None) -> None:
        channel = open_channel(target)
        self._channels.append(channel)
        call = WorkerStub(channel).Attach()
        await call.write(
            FrontendMessage(hello=Hello(frontend_id="front", incarnation=1, software=software or own_software()))
        )
        await call.read()
        self.calls[node_id] = call
        self._readers.append(asyncio.create_task(self._read(call)))

    async def _read(self, call: Any) -> None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for token in message.tokens:
                    self._take(token)
                for failure in message.failures:
                    if (failure.request_id, failure.attempt) in self._forgotten:
                        continue
                    request = self.requests[failure.request_id, failure.attempt]
                    request.failures.append(failure)
                    request.ended.set()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass

    def forget(self, name: str, attempt: int) -> None:
        """Drop what is known of a request, and what may still come of it."""
        del self.requests[name, attempt]
        self._forgotten.add((name, attempt))

    def _take(self, token: Token) -> None:
        if (token.request_id, token.attempt) in self._forgotten:
            return
        request = self.requests[token.request_id, token.attempt]
        assert token.index not in request.tokens
        request.tokens[token.index] = token.token_id
        request.messages[token.index] = token
        if token.HasField("timing") and not token.timing.HasField("handoff"):
            request.cached_tokens = token.timing.cached_tokens
        request.progressed.set()
        if token.finish != FINISH_NONE:
            request.total = token.index + 1
        if request.first + len(request.tokens) == request.total:  # the two nodes' streams may overtake each other
            request.ended.set()

    async def submit(self, submit: Submit, node_id: str = "prefill") -> Request:
        request = self.requests[submit.request_id, submit.attempt] = Request(first=submit.generated)
        await self._send(node_id, FrontendMessage(submit=submit))
        return request

    async def cancel(self, node_id: str, request_id: str, attempt: int, **options: Any) -> None:
        cancel = Cancel(request_id=request_id, attempt=attempt, **options)
        await self._send(node_id, FrontendMessage(cancel=cancel))

    async def _send(self, node_id: str, message: FrontendMessage) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self.calls[node_id].write(message)

    async def close(self) -> None:
        for call in self.calls.values():
            call.cancel()
        await asyncio.gather(*self._readers)
        for channel in self._channels:
            await channel.close()


def forget(face: PrefillService | DecodeService) -> None:
    """Reuse every slot of a node, so that it has nothing left to share."""
    slots = face.node.slots.pool
    slots.release(slots.allocate(slots.num_available))


@dataclass
class Pair:
    prefill: PrefillService
    decode: DecodeService
    frontend: Frontend
    decode_target: str
    pool: PoolNode | None = None
    helpers: tuple[PrefillService, ...] = ()  # placements name them
    prefix: str = ""  # of the nodes' ids

    def submit(
        self,
        prompt: list[int],
        name: str,
        *,
        max_tokens: int = 12,
        attempt: int = 1,
        generated: int = 0,
        head_tokens: int = 0,
    ) -> Submit:
        """`generated` of the prompt's tokens are an earlier attempt's; `max_tokens` counts over all attempts."""
        ids = np.array(prompt, dtype=np.int32)
        seed = chain_seed("", "test", BLOCK)
        message = Submit(
            request_id=name,
            attempt=attempt,
            generated=generated,
            head_tokens=head_tokens,
            frontend_id="front",
            model="m",
            prompt_ids=ids.astype("<i4").tobytes(),
            chain=chain_keys(seed, ids, BLOCK).tobytes(),
            chain_seed=seed,
            timeout_s=60,
        )
        message.sampling.max_tokens = max_tokens
        message.sampling.top_p = 1.0
        message.placement.decode.CopyFrom(NodeRef(node_id=f"{self.prefix}decode", target=self.decode_target))
        for helper in self.helpers:
            node = helper.node
            message.placement.helpers.append(NodeRef(node_id=node.config.node_id, target=node.target))
        return message

    async def ask(self, prompt: list[int], name: str, **options: Any) -> Request:
        """Return a request that has ended without a failure, once no node holds anything; `options` as `submit`."""
        request = await self.frontend.submit(self.submit(prompt, name, **options))
        await request.ended.wait()
        assert request.failures == []
        await self.at_rest()
        return request

    async def ask_all(self, prompts: list[list[int]], **options: Any) -> list[Request]:
        """Return the requests of all prompts, asked at once, as `ask` returns one."""
        requests = [await self.frontend.submit(self.submit(ids, f"r{i}", **options)) for i, ids in enumerate(prompts)]
        for request in requests:
            await request.ended.wait()
            assert request.failures == []
        await self.at_rest()
        return requests

    def forget(self) -> None:
        """Reuse every slot of both nodes, so that nothing is left to share but what the pool has."""
        for face in (self.prefill, self.decode):
            forget(face)

    async def at_rest(self) -> None:
        """Returns once no node holds anything; fails after 20 s with what is held."""
        try:
            async with asyncio.timeout(20):
                while self.problems():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(self.problems()) from None

    def problems(self) -> list[str]:
        found = [problem for face in (self.prefill, self.decode, *self.helpers) for problem in face.node.validate()[0]]
        return found + (node_metrics.validate(self.pool)["problems"] if self.pool is not None else [])


Start = Callable[..., Awaitable[Pair]]


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    return lambda length, seed=0: np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.fixture
def greedy() -> Callable[[Model, list[int], int], list[int]]:
    """The dense reference's answer."""

    def answer(model: Model, ids: list[int], count: int) -> list[int]:
        out = list(ids)
        for _ in range(count):
            out.append(int(model.score(np.array(out, dtype=np.int32))[-1].argmax()))
        return out[len(ids) :]

    return answer


@pytest.fixture
async def start_pair(tmp_path: Path, model_path: Path) -> AsyncIterator[Start]:
    pairs: list[Pair] = []
    started: list[tuple[PrefillService, DecodeService]] = []
    servers: list[ControlServer] = []

    pools: list[PoolNode] = []

    async def start_pool(**options: Any) -> str:
        config = assemble(
            PoolNodeConfig,
            node_id="pool",
            listen=f"unix:{tmp_path}/pool.sock",
            messenger=assemble(MessengerConfig, shm_dir=tmp_path),
            **{"pool_bytes": 64 << 20, **options},
        )
        pools.append(PoolNode(config, 1))
        await pools[-1].start()
        servers.append(
            await start_server(
                config.listen.listen, lambda s: pool_pb2_grpc.add_PoolServicer_to_server(PoolService(pools[-1]), s)
            )
        )
        return servers[-1].target

    async def start(
        transport: str = "auto",
        *,
        pool: bool | dict[str, Any] | PoolNode = False,
        prefix: str = "",
        parity: float = 0.0,
        storage: Literal["exact", "int8"] = "exact",
        path: Path = model_path,
        helpers: int = 0,
        prefill_options: Mapping[str, Any] = {},
        helper_options: Mapping[str, Any] = {},
        **decode_options: Any,
    ) -> Pair:
        """`pool`: with a pool node, perhaps of these options, or that of another pair; `prefix`: of the nodes' ids;
        `parity`, `storage`, `path` of the model: of all nodes; `helpers`: so many further prefill nodes."""
        if isinstance(pool, PoolNode):
            pool_target = pool.config.listen.listen
        else:
            pool_target = await start_pool(**(pool if isinstance(pool, dict) else {})) if pool else ""

        def config(name: str, **options: Any) -> WorkerConfig:
            return assemble(
                WorkerConfig,
                node_id=f"{prefix}{name}",
                listen=f"unix:{tmp_path}/{prefix}{name}.sock",
                conductor_targets=(f"unix:{tmp_path}/nobody.sock",),
                model=path,
                served_model_name=("m",),
                threads=1,
                block_tokens=BLOCK,
                messenger=assemble(MessengerConfig, transport=transport, shm_dir=tmp_path),  # type: ignore[arg-type]
                kv_parity_sample=parity,
                kv_storage=storage,
                **{
                    "device": "cpu",
                    "capacity_tokens": 1024,
                    "prefill_chunk_tokens": 32,
                    "pool_target": pool_target,
                    **options,
                },
            )

        frontend = Frontend()
        parts: dict[str, tuple[PrefillService, DecodeService]] = {}
        nodes = [(f"helper-{i}", ROLE_PREFILL, {**prefill_options, **helper_options}) for i in range(helpers)]
        nodes += [("prefill", ROLE_PREFILL, dict(prefill_options)), ("decode", ROLE_DECODE, decode_options)]
        for name, role, options in nodes:
            node = WorkerNode(config(name, **options), role)
            prefill, decode = parts[name] = PrefillService(node), DecodeService(node)
            face = WorkerService(
                node, prefill=prefill.serve, whole=AggregatedService(node).serve, decode=decode, helper=prefill.helper
            )
            server = await start_server(
                node.config.listen.listen, lambda s, face=face: add_WorkerServicer_to_server(face, s)
            )
            servers.append(server)
            await node.start(server.target)
            await frontend.attach(name, server.target)
        pair = Pair(
            parts["prefill"][0],
            parts["decode"][1],
            frontend,
            servers[-1].target,
            pools[-1] if pool else None,
            tuple(parts[f"helper-{i}"][0] for i in range(helpers)),
            prefix,
        )
        pairs.append(pair)
        started.extend(parts.values())
        return pairs[-1]

    yield start
    for pair in pairs:
        await pair.frontend.close()
    for server in servers:
        await server.stop(0.1)
    for prefill, _ in started:
        await prefill.node.close()
        await prefill.close()
    for one in pools:
        await one.close()
