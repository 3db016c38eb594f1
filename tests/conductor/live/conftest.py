"""A conductor behind real gRPC over a unix socket, and those who talk with it."""

import asyncio
import contextlib
import json

import grpc
import pytest

from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from frontend.conductor import ConductorStream
from kvpool import KvGroup, KvSpec
from kvpool.config import PoolNodeConfig
from kvpool.server import serve_pool_node
from messenger import MessengerConfig
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc
from rpc.control import open_channel
from settings.keys import assemble

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)
NAMESPACE = bytes(range(16))


class Running:
    """A coroutine `serve(stop, on_ready)` run as a task, with the target it told."""

    def __init__(self, serve):
        self._stop = asyncio.Event()
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve(self._stop, self._ready.set_result))

    async def start(self):
        await asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return self._ready.result()

    async def stop(self):
        self._stop.set()
        return await self.ended()

    async def ended(self):
        """Return its exit code after it has ended."""
        return await asyncio.wait_for(asyncio.shield(self._task), 20)


class Worker:
    """The Join stream of a worker, without the worker."""

    def __init__(self, stub, node):
        self._call = stub.Join()
        self.node = node

    async def join(self, **report):
        await self._call.write(conductor_pb2.NodeReport(node=self.node, **report))
        command = await asyncio.wait_for(self._call.read(), 10)
        assert command.HasField("accepted"), command
        return self

    async def refusal(self):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.join()  # the refusal may come while it writes
        return caught.value

    async def report(self, **report):
        await self._call.write(conductor_pb2.NodeReport(**report))

    async def end_reports(self):
        """End its side of the stream, and read the conductor's to its end."""
        await self._call.done_writing()
        async with asyncio.timeout(10):
            while await self._call.read() is not grpc.aio.EOF:
                pass

    async def command(self):
        return await self._call.read()

    async def ended(self):
        """Why the conductor ended the stream."""
        return await asyncio.wait_for(self._call.code(), 10)

    def leave(self):
        self._call.cancel()


class Client:
    """A frontend's and an operator's view."""

    def __init__(self, target):
        self.channel = open_channel(target)
        self.stub = conductor_pb2_grpc.ConductorStub(self.channel)
        self.line = ConductorStream(target)
        self.workers = []

    async def join(self, node_id, role, *, pool="pool-0", **fields):
        worker = self.worker(node_id, role, pool=pool, **fields)
        await worker.join()
        return worker

    async def join_pair(self):
        """A prefill and a decode node."""
        prefill = await self.join("prefill-0", common_pb2.ROLE_PREFILL)
        return prefill, await self.join("decode-0", common_pb2.ROLE_DECODE)

    def worker(self, node_id, role, *, pool="pool-0", incarnation=1, spec=SPEC, namespace=NAMESPACE, model="m"):
        node = conductor_pb2.Node(
            node_id=node_id,
            role=role,
            incarnation=incarnation,
            target=f"unix:/nowhere/{node_id}.sock",
            pool_node_id=pool,
            model=model,
            kv_namespace=namespace,
            spec=spec.to_proto(),
            capacity_tokens=4096,
            max_model_len=4096,
            max_batch=8,
            kv_bytes_per_token=spec.bytes_per_token,
        )
        self.workers.append(Worker(self.stub, node))
        return self.workers[-1]

    async def schedule(self, request_id="r", *, model="m", prompt=256, new=32, **fields):
        request = conductor_pb2.ScheduleRequest(
            request_id=request_id, frontend_id="f", model=model, prompt_tokens=prompt, max_new_tokens=new, **fields
        )
        return await self.line.schedule(request, waits=False, deadline_s=10)

    async def complete(self, request_id="r", outcome="finished"):
        ended = conductor_pb2.CompleteRequest(request_id=request_id, outcome=outcome)
        await self.line.complete(ended, deadline_s=10)

    async def cluster(self):
        return await self.stub.Cluster(conductor_pb2.ClusterRequest(), timeout=10)

    async def drain(self, node_id):
        await self.stub.DrainNode(conductor_pb2.DrainNodeRequest(node_id=node_id), timeout=10)

    async def json(self, name):
        return json.loads((await getattr(self.stub, name)(common_pb2.JsonRequest(), timeout=10)).json)

    async def explain(self, request_id):
        return json.loads((await self.stub.Explain(conductor_pb2.ExplainRequest(request_id=request_id))).json)

    async def until(self, condition):
        """Poll the conductor until `await condition()` holds."""
        async with asyncio.timeout(20):
            while not await condition():
                await asyncio.sleep(0.01)

    async def until_joined(self, *node_ids):
        async def joined():
            return {status.node.node_id for status in (await self.cluster()).nodes} == set(node_ids)

        await self.until(joined)

    async def close(self):
        for worker in self.workers:
            worker.leave()
        await self.line.close()
        await self.channel.close()


@pytest.fixture
async def conductor(tmp_path):
    """Factory of (Running, Client); all are stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def factory(**config):
            config = assemble(
                ConductorConfig,
                **{"listen": f"unix:{tmp_path}/c.sock", "tick_s": 0.05, "report_timeout_s": 60.0, **config},
            )
            service = Running(lambda stop, ready: serve_conductor(config, stop, ready))
            target = await service.start()
            client = Client(target)
            stack.push_async_callback(service.stop)
            stack.push_async_callback(client.close)
            return service, client

        yield factory


@pytest.fixture
async def start_pool(tmp_path):
    """Factory of pool nodes that join that conductor; all are stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name):
            config = assemble(
                PoolNodeConfig,
                node_id=name,
                listen=f"unix:{tmp_path}/{name}.sock",
                conductor_targets=(f"unix:{tmp_path}/c.sock",),
                pool_bytes=4 << 20,
                messenger=assemble(MessengerConfig, transport="tcp"),
            )
            pool = Running(lambda stop, ready: serve_pool_node(config, stop, ready))
            pool.target = await pool.start()
            stack.push_async_callback(pool.stop)
            return pool

        yield start
