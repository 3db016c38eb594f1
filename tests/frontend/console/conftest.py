"""A frontend before a real conductor whose nodes have joined in word only: cheap, and as many as a test wants."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from frontend import FrontendConfig, ServedModelConfig, serve_frontend
from frontend.conductor import ConductorStream
from kvpool import KvGroup, KvSpec
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc
from rpc.control import open_channel
from settings.keys import assemble
from tests.conductor.world import NAMESPACE, World

ADMIN, USER = "mp-admins-key", "mp-users-key"
SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=4)
ROLES = {
    "prefill": common_pb2.ROLE_PREFILL,
    "decode": common_pb2.ROLE_DECODE,
    "aggregated": common_pb2.ROLE_AGGREGATED,
    "pool": common_pb2.ROLE_POOL,
}
WAIT_S = 60.0
Phase = conductor_pb2.Phase


class Node:
    """One node's Join stream."""

    def __init__(self, stub: Any, node: conductor_pb2.Node) -> None:
        self.node = node
        self._call = stub.Join()

    async def join(self, **report: Any) -> None:
        await self._call.write(conductor_pb2.NodeReport(node=self.node, **report))
        assert (await asyncio.wait_for(self._call.read(), WAIT_S)).HasField("accepted")

    async def report(self, **report: Any) -> None:
        await self._call.write(conductor_pb2.NodeReport(**report))

    async def command(self) -> conductor_pb2.NodeCommand:
        """The next one."""
        return await asyncio.wait_for(self._call.read(), WAIT_S)

    def leave(self) -> None:
        self._call.cancel()


class Bed:
    """The frontend at `url`, and its conductor."""

    def __init__(self, folder: Path, model_path: Path) -> None:
        self.target = f"unix:{folder}/conductor.sock"
        self._model_path = model_path
        self._keys = folder / "keys.yaml"
        self.url = ""
        self.nodes: dict[str, Node] = {}
        self._conductor: tuple[asyncio.Event, asyncio.Task[None]] | None = None
        self._front: tuple[asyncio.Event, asyncio.Task[None]] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._line: ConductorStream | None = None
        self.pools = World(folder)

    async def start_conductor(self, **config: Any) -> None:
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        settings = assemble(ConductorConfig, listen=self.target, report_timeout_s=0.0, shared_refresh_s=0.2, **config)
        task = asyncio.create_task(serve_conductor(settings, stop, ready.set_result))
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        assert not task.done() or task.result() is None
        self._conductor = stop, task
        self._channel, self._line = open_channel(self.target), ConductorStream(self.target)
        self.stub: Any = conductor_pb2_grpc.ConductorStub(self._channel)

    async def stop_conductor(self) -> None:
        assert self._conductor is not None
        assert self._channel is not None
        assert self._line is not None
        stop, task = self._conductor
        stop.set()  # first: the frontend is not to see that nodes leave
        await asyncio.wait_for(task, WAIT_S)
        self._conductor = None
        for node in self.nodes.values():
            node.leave()
        self.nodes.clear()
        await self._line.close()
        await self._channel.close()

    async def start_front(self, *, with_keys: bool) -> None:
        stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
        if with_keys:
            self._keys.write_text(_keys_file())
        config = assemble(
            FrontendConfig,
            models=(ServedModelConfig(self._model_path, "tiny"),),
            conductor_targets=(self.target,),
            port=0,
            node_id="front",
            block_tokens=4,
            cluster_interval_s=0.2,
            api_keys_file=self._keys if with_keys else None,
        )
        task = asyncio.create_task(serve_frontend(config, stop, url.set_result))
        await asyncio.wait((task, url), return_when=asyncio.FIRST_COMPLETED)
        self.url, self._front = url.result(), (stop, task)

    async def stop_front(self) -> None:
        assert self._front is not None
        stop, task = self._front
        stop.set()
        await asyncio.wait_for(task, WAIT_S)
        self._front = None

    async def stop(self) -> None:
        await self.pools.close()
        if self._front is not None:
            await self.stop_front()
        if self._conductor is not None:
            await self.stop_conductor()

    async def join(self, node_id: str, role: str, *, model: str = "tiny", **report: Any) -> Node:
        node = conductor_pb2.Node(
            node_id=node_id, role=ROLES[role], incarnation=1, target=f"unix:/nowhere/{node_id}.sock", host_id="host-0"
        )
        if role != "pool":
            node.model, node.kv_namespace, node.pool_node_id = model, NAMESPACE, "pool-0"
            node.spec.CopyFrom(SPEC.to_proto())
            node.capacity_tokens, node.max_model_len, node.max_batch = 4096, 4096, 8
            node.kv_bytes_per_token = SPEC.bytes_per_token
        self.nodes[node_id] = Node(self.stub, node)
        await self.nodes[node_id].join(**report)
        return self.nodes[node_id]

    async def join_usual(self) -> None:
        """Two of each role, and a pool node with something in it."""
        for number in range(2):
            await self.join(f"prefill-{number}", "prefill", free_tokens=4000, num_running=1)
            await self.join(f"decode-{number}", "decode", free_tokens=1024 * (number + 1), num_running=3, num_waiting=2)

    async def start_pool(self) -> None:
        """Start a real pool node, "pool-0", that joins the conductor."""
        await self.pools.pool("pool-0", "conductor")

    async def place(self, request_id: str, *, prompt: int = 64, **fields: Any) -> conductor_pb2.ScheduleReply:
        """Have a request placed or rejected."""
        assert self._line is not None
        request = conductor_pb2.ScheduleRequest(
            request_id=request_id, frontend_id="f", model="tiny", prompt_tokens=prompt, max_new_tokens=8, **fields
        )
        return await self._line.schedule(request, waits=False, deadline_s=WAIT_S)

    async def serve(
        self, request_id: str, *, prompt: int = 64, ttft_s: float = 0.25, cached: int = 16, **fields: Any
    ) -> bool:
        """Have a request placed, and finished with these times; False: it was rejected."""
        assert self._line is not None
        reply = await self.place(request_id, prompt=prompt, **fields)
        if not reply.HasField("placement"):
            return False
        prefill, decode = reply.placement.prefill.node_id, reply.placement.decode.node_id
        phases = (
            (prefill, conductor_pb2.PHASE_PREFILL_STARTED),
            (prefill, conductor_pb2.PHASE_PREFILL_ENDED),
            (decode, conductor_pb2.PHASE_DECODE_JOINED),
        )
        for node_id, phase in phases:
            progress = conductor_pb2.Progress(request_id=request_id, attempt=0, phase=phase)
            await self.nodes[node_id].report(progress=[progress], free_tokens=2048)
        ended = conductor_pb2.CompleteRequest(
            request_id=request_id, outcome="finished", ttft_s=ttft_s, mean_tbt_s=0.02, generated=8, cached_tokens=cached
        )
        await self._line.complete(ended, deadline_s=WAIT_S)
        return True


def _keys_file() -> str:
    entries = [
        f"- {{name: {name}, hash: 'sha256:{hashlib.sha256(key.encode()).hexdigest()}', tenant: {name}, scope: {scope}}}"
        for name, key, scope in (("ops", ADMIN, "admin"), ("acme", USER, "user"))
    ]
    return "\n".join(("keys:", *entries, ""))


OpenBed = Callable[..., Any]


@pytest.fixture
def open_bed(run_dir: Path, model_path: Path) -> OpenBed:
    """`async with open_bed(with_keys=…, **conductor) as bed`."""

    @asynccontextmanager
    async def opened(*, with_keys: bool = False, **conductor: Any) -> AsyncIterator[Bed]:
        bed = Bed(run_dir, model_path)
        try:
            await bed.start_conductor(**conductor)
            await bed.start_front(with_keys=with_keys)
            yield bed
        finally:
            await bed.stop()

    return opened


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        yield session
