"""Live conductors, and the calls of those who set their objectives."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from frontend.conductor import ConductorStream
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc
from rpc.control import open_channel
from settings.keys import assemble


class Operator:
    """A running conductor, and the calls of one who operates it."""

    def __init__(self, config: ConductorConfig) -> None:
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve_conductor(config, self._stop, self._ready.set_result))
        self._channel = open_channel(config.listen.listen)
        self.stub = conductor_pb2_grpc.ConductorStub(self._channel)
        self._line = ConductorStream(config.listen.listen)

    async def up(self) -> "Operator":
        await asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._line.close()
            await self._channel.close()
            await self._task
        return self

    async def show(self, history: int = 0) -> conductor_pb2.ShowSloReply:
        return await self.stub.ShowSlo(conductor_pb2.ShowSloRequest(history=history))

    async def version(self) -> int:
        return (await self.show()).current.version

    async def set(self, objectives: dict[str, Any], **fields: Any) -> conductor_pb2.ChangeSloReply:
        fields = {"author": "alice", "reason": "a test", **fields}
        return await self.stub.ChangeSlo(conductor_pb2.ChangeSloRequest(content=json.dumps(objectives), **fields))

    async def rollback(self, version: int, **fields: Any) -> conductor_pb2.ChangeSloReply:
        fields = {"author": "bob", "reason": "it was better", **fields}
        return await self.stub.ChangeSlo(conductor_pb2.ChangeSloRequest(rollback_to=version, **fields))

    async def refusal(self, asked: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked
        return caught.value.code(), caught.value.details() or ""

    async def schedule(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        return await self._line.schedule(request, waits=False, deadline_s=20)

    async def numbers(self, frontend_id: str = "", tenants: tuple[str, ...] = ()) -> dict[str, float]:
        request = conductor_pb2.ClusterRequest(frontend_id=frontend_id, tenants=tenants)
        return {sample.name: sample.value for sample in (await self.stub.Cluster(request)).samples}

    async def end(self) -> None:
        await self._line.close()
        await self._channel.close()
        self._stop.set()
        async with asyncio.timeout(60):
            await self._task

    async def acknowledged(self) -> dict[str, int]:
        """Return the version that each conductor has acknowledged."""
        return {each.node_id: each.version for each in (await self.show()).acknowledged}

    async def agrees_with(self, *others: "Operator") -> bool:
        """All go by one version, and know of each other that they do."""
        seen = [await each.show() for each in (self, *others)]
        told = {(each.version, each.digest) for reply in seen for each in (reply.current, *reply.acknowledged)}
        return len(told) == 1 and all(len(reply.acknowledged) == len(seen) for reply in seen)

    async def is_troubled(self) -> bool:
        return bool((await self.show()).trouble)

    async def warns_of(self, objectives: dict[str, Any]) -> bool:
        return bool((await self.set(objectives, trial=True)).warnings)

    async def join(self) -> Any:
        """A worker that does both phases."""
        node = conductor_pb2.Node(
            node_id="w", role=common_pb2.ROLE_AGGREGATED, incarnation=1, target="unix:/w", host_id="h", model="m",
            kv_namespace=bytes(16), capacity_tokens=4096, max_model_len=4096, max_batch=8,
        )  # fmt: skip
        node.spec.block_tokens = 16
        joining = self.stub.Join()
        await joining.write(conductor_pb2.NodeReport(node=node))
        await joining.read()
        return joining


class Conductors:
    """Starts conductors in a folder; all are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[Operator] = []

    async def __call__(self, name: str = "c", **fields: Any) -> Operator:
        fields = {"node_id": name, "shared_refresh_s": 0.05, **fields}
        operator = Operator(assemble(ConductorConfig, listen=f"unix:{self._folder}/{name}.sock", **fields))
        await operator.up()
        self._running.append(operator)
        return operator

    async def end(self, operator: Operator) -> None:
        self._running.remove(operator)
        await operator.end()

    async def close(self) -> None:
        for operator in reversed(list(self._running)):
            await self.end(operator)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Conductors]:
    conductors = Conductors(tmp_path)
    yield conductors
    await conductors.close()


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """`await until(asked, wanted)`: until `await asked()` gives what is wanted."""

    async def wait(asked: Callable[[], Awaitable[Any]], wanted: Any = True) -> None:
        async with asyncio.timeout(60):
            while await asked() != wanted:
                await asyncio.sleep(0.02)

    return wait
