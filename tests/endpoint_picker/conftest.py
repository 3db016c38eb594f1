"""Endpoints that report their load, a picker in front of them, the gateway that asks it, and a real conductor."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from endpoint_picker import EndpointPickerConfig, serve_endpoint_picker
from frontend import FrontendConfig, ServedModelConfig
from kvpool import KvGroup, KvSpec
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc
from rpc.control import open_channel
from settings.endpoint_picker import EndpointPickerSettings
from settings.frontend import HttpSettings
from settings.keys import assemble
from settings.node import ListenSettings
from telemetry import RoleMetrics, exposition
from tests.endpoint_picker.gateway import WAIT_S, Gateway

MODEL = Path(__file__).parents[1] / "data" / "nano-model"
BLOCK_TOKENS = 16
_SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=BLOCK_TOKENS)


class Running:
    """A coroutine `serve(stop, on_ready)` run as a task."""

    def __init__(self, serve: Callable[[asyncio.Event, Callable[[str], None]], Awaitable[None]]) -> None:
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(serve(self._stop, self._ready.set_result))

    async def start(self) -> str:
        await asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return self._ready.result()

    def tell(self) -> None:
        self._stop.set()

    async def stop(self) -> None:
        self.tell()
        await asyncio.wait_for(asyncio.shield(self._task), WAIT_S)


class Endpoint:
    """An HTTP server with the routes that the picker polls."""

    def __init__(self, models: tuple[str, ...] | None = ("m",)) -> None:
        self.models = models  # None: it requires an API key, as a vLLM may
        self.metrics = ""
        self.address = ""
        self._num_polls = 0
        self._polled = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> "Endpoint":
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def polled(self) -> None:
        """Wait until two more polls have asked it: the first may have begun earlier, and is over."""
        async with self._polled, asyncio.timeout(WAIT_S):
            seen = self._num_polls
            await self._polled.wait_for(lambda: self._num_polls >= seen + 2)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, _: web.Request) -> web.Response:
        async with self._polled:
            self._num_polls += 1
            self._polled.notify_all()
        if self.models is None:
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})


StartEndpoint = Callable[..., Awaitable[Endpoint]]


@pytest.fixture
async def start_endpoint() -> AsyncIterator[StartEndpoint]:
    """Factory of endpoints; all are stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(models: tuple[str, ...] | None = ("m",)) -> Endpoint:
            endpoint = await Endpoint(models).start()
            stack.push_async_callback(endpoint.stop)
            return endpoint

        yield start


class Picker(Gateway):
    """A running picker, as its gateway sees it."""

    def __init__(self, target: str, metrics: RoleMetrics, running: Running) -> None:
        super().__init__(target)
        self.target = target
        self._metrics = metrics
        self._running = running

    def stop(self) -> None:
        """Tell it to stop, which it does once its exchanges have ended."""
        self._running.tell()

    def metric(self, name: str) -> float:
        """Return a metric's value; `name` includes its labels."""
        text, _ = exposition(self._metrics.by_path["/metrics"], "")
        lines = [line for line in text.decode().splitlines() if line.startswith(f"{name} ")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


StartPicker = Callable[..., Awaitable[Picker]]


@pytest.fixture
async def start_picker() -> AsyncIterator[StartPicker]:
    """Factory of pickers for endpoints; all are stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*endpoints: Endpoint | str, admission: FrontendConfig | None = None, **settings: Any) -> Picker:
            named = tuple(each if isinstance(each, str) else each.address for each in endpoints)
            settings = {"picker_poll_s": 0.05, **settings}
            config = EndpointPickerConfig(
                EndpointPickerSettings(endpoints=named, **settings),
                listen=ListenSettings("127.0.0.1:0"),
                http=HttpSettings(drain_grace_s=20.0),
                admission=admission,
            )
            metrics = RoleMetrics()
            running = Running(lambda stop, ready: serve_endpoint_picker(config, stop, ready, metrics))
            picker = Picker(await running.start(), metrics, running)
            stack.push_async_callback(running.stop)
            stack.push_async_callback(picker.close)
            return picker

        yield start


class SmallConductor:
    """A real conductor at a unix socket, with a prefill and a decode node that have joined and compute nothing."""

    def __init__(self, folder: Path) -> None:
        self.target = f"unix:{folder}/c.sock"
        self._running: Running | None = None
        self._channel: grpc.aio.Channel | None = None
        self._streams: list[Any] = []

    async def start(self) -> None:
        config = assemble(ConductorConfig, listen=self.target, tick_s=0.05, report_timeout_s=0.0)
        self._running = Running(lambda stop, ready: serve_conductor(config, stop, ready))
        await self._running.start()
        self._channel = open_channel(self.target)
        self.stub = conductor_pb2_grpc.ConductorStub(self._channel)
        for name, role in (("prefill-0", common_pb2.ROLE_PREFILL), ("decode-0", common_pb2.ROLE_DECODE)):
            await self._join(name, role)

    async def stop(self) -> None:
        for stream in self._streams:
            stream.cancel()
        self._streams.clear()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        if self._running is not None:
            await self._running.stop()
            self._running = None

    async def validation(self) -> str:
        """Return the conductor's own check of what it holds, as JSON."""
        reply = await self.stub.Validate(common_pb2.JsonRequest(), timeout=WAIT_S)
        return str(reply.json)

    async def counters(self) -> str:
        reply = await self.stub.State(common_pb2.JsonRequest(), timeout=WAIT_S)
        return str(reply.json)

    async def _join(self, node_id: str, role: common_pb2.Role.ValueType) -> None:
        stream = self.stub.Join()
        self._streams.append(stream)
        node = conductor_pb2.Node(
            node_id=node_id,
            role=role,
            incarnation=1,
            target=f"unix:/nowhere/{node_id}.sock",
            pool_node_id="pool-0",
            model="m",
            kv_namespace=bytes(range(16)),
            spec=_SPEC.to_proto(),
            capacity_tokens=4096,
            max_model_len=1024,
            max_batch=8,
            kv_bytes_per_token=_SPEC.bytes_per_token,
        )
        await stream.write(conductor_pb2.NodeReport(node=node))
        assert (await asyncio.wait_for(stream.read(), WAIT_S)).HasField("accepted")


@pytest.fixture
async def conductor(short_path: Path) -> AsyncIterator[SmallConductor]:
    small = SmallConductor(short_path)
    await small.start()
    yield small
    await small.stop()


@pytest.fixture
def admission(conductor: SmallConductor) -> FrontendConfig:
    """Configuration of an API server of that conductor."""
    return assemble(
        FrontendConfig,
        models=(ServedModelConfig(MODEL, "m"),),
        conductor_targets=(conductor.target,),
        node_id=f"picker-{os.getpid()}",
        block_tokens=BLOCK_TOKENS,
        cluster_interval_s=0.05,
    )
