"""Targets: gRPC messages to the conductor, a pool node, a prefill and a decode node, over real calls to real servers.

A case is a msgpack list of [method, messages]; a unary method takes the first message. Messages are valid on the wire,
with hostile values. A call may be refused with a status that names the caller's fault; UNKNOWN and INTERNAL, and
exceptions in the server's log, are defects, and so is anything that is still held after the case.
"""

import asyncio
import json
import random
import tempfile
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import grpc
import msgpack
import numpy as np
from google.protobuf.message import DecodeError, Message
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found]

from conductor.config import ConductorConfig
from conductor.errors import JoinRefused
from conductor.server import serve_conductor
from decode_node.server import DecodeService
from kvpool import KvGroup, KvSpec, PoolNodeConfig, chain_keys, chain_seed
from kvpool.server import serve_pool_node
from messenger import MessengerConfig
from moonpool_proto.v1 import common_pb2, conductor_pb2, pool_pb2, worker_pb2
from moonpool_proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from prefill_node.server import PrefillService
from rpc.control import open_channel, start_server
from rpc.versions import own_software
from settings.keys import assemble
from settings.worker import BUNDLED_MODEL
from tools.fuzz import mutation
from tools.fuzz.target import FuzzTarget, Misjudged
from worker.aggregated import AggregatedService
from worker.config import WorkerConfig
from worker.node import WorkerNode
from worker.servicer import WorkerService

_CALL_S: Final = 2.0
_REST_S: Final = 8.0
_BLOCK: Final = 8
_SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), _BLOCK)
_FAULTS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})
# gRPC's own answer to garbage, and its client's to a stream that the server ends while the client writes.
_OF_GRPC: Final = ("DecodeError", "Internal error from Core")
_LEFT: Final = "gave up the request"  # a helper's end, when the case's stream ends
_LAST_NUMBER: Final = 7777
"""Stands for the epoch of the last reply; "@" does for its put or lease."""


class RefusedByServer(Exception):
    """The server refused a call by a status that names the caller's fault."""


@dataclass(frozen=True)
class Method:
    """One method of a service. `kind`: unary, stream (both ways) or events (unary, with a stream of replies)."""

    request: type[Message]
    reply: type[Message]
    kind: str = "unary"


class CallsTarget(FuzzTarget):
    """Base of the targets: a server and a channel to it in this process's event loop."""

    allowed: tuple[type[BaseException], ...] = (RefusedByServer, DecodeError, JoinRefused, ExecuteBatchError)
    deadline_s = 60.0
    package: ClassVar[str] = "moonpool.v1"
    service: str
    methods: ClassVar[Mapping[str, Method]]

    def open(self) -> None:
        """Start the server."""
        self._folder = tempfile.TemporaryDirectory(prefix="mpf-")
        self.path = Path(self._folder.name)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._unhandled)
        self._unhandled_error: BaseException | None = None
        self.stop = asyncio.Event()
        self._serving: asyncio.Task[Any] | None = None
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        self.channel = open_channel(await self.serve())
        await self.prepare()

    @abstractmethod
    async def serve(self) -> str:
        """Start the server and return its target."""

    async def prepare(self) -> None:
        """Make calls that all cases need."""

    async def run_role(self, serve: Callable[[asyncio.Event, Callable[[str], None]], Awaitable[Any]]) -> str:
        """Run a role's main coroutine in the background and return its target."""
        ready: asyncio.Future[str] = self.loop.create_future()
        self._serving = asyncio.ensure_future(serve(self.stop, ready.set_result))
        await asyncio.wait([ready, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()
        return ready.result()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._unhandled_error = context.get("exception") or Misjudged(str(context.get("message")))

    @abstractmethod
    def scripts(self) -> Sequence[Sequence[tuple[str, Sequence[Message]]]]:
        """Return valid cases."""

    def seeds(self) -> Sequence[bytes]:
        return [
            msgpack.packb([[name, [message.SerializeToString() for message in messages]] for name, messages in script])
            for script in self.scripts()
        ]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate messages, or the order of calls."""
        calls = msgpack.unpackb(case)
        action = rng.randrange(10)
        if action == 0:
            calls += rng.sample(theirs := msgpack.unpackb(other), min(len(theirs), 2))
        elif action == 1 and len(calls) > 1:
            del calls[rng.randrange(len(calls))]
        elif action == 2:
            calls.insert(rng.randrange(len(calls) + 1), rng.choice(calls))
        else:
            for _ in range(rng.choice((1, 1, 2))):
                self._mutate_call(rng, rng.choice(calls))
        packed: bytes = msgpack.packb(calls[:6])
        return packed

    def _mutate_call(self, rng: random.Random, call: list[Any]) -> None:
        name, messages = call
        if rng.random() < 0.1:
            messages.append(messages[-1])
        at = rng.randrange(len(messages))
        if rng.random() < 0.08:
            messages[at] = mutation.mutate_bytes(rng, messages[at], messages[0])
            return
        message = self.methods[name].request()
        try:
            message.ParseFromString(messages[at])
        except DecodeError:
            return
        mutation.mutate_message(rng, message)
        messages[at] = message.SerializeToString()

    def run(self, case: bytes) -> None:
        """Make the calls, then wait until the server holds nothing."""
        self._unhandled_error = None
        refused = self.loop.run_until_complete(
            self._run([(name, list(messages)) for name, messages in msgpack.unpackb(case)])
        )
        if self._unhandled_error is not None:
            raise self._unhandled_error
        if refused:
            raise RefusedByServer(refused)

    async def _run(self, calls: Sequence[tuple[str, list[bytes]]]) -> str:
        refused, replies = "", dict[str, Any]()
        for name, messages in calls:
            method = self.methods[name]
            try:
                for reply in await self._call(
                    name, method, [self.filled(method, one, replies) for one in messages[:4]]
                ):
                    self.remember(replies, reply)
            except grpc.aio.AioRpcError as error:
                details = str(error.details())
                if error.code() in _FAULTS and not any(text in details for text in _OF_GRPC):
                    raise Misjudged(f"{name} ended with {error.code().name}: {details[:200]}") from None
                if _LEFT not in details:
                    refused = refused or f"{name}: {error.code().name}: {details}"
        await self.settle(replies)
        return refused

    async def _call(self, name: str, method: Method, messages: list[bytes]) -> list[Any]:
        path = f"/{self.package}.{self.service}/{name}"
        if method.kind == "unary":
            unary: Any = self.channel.unary_unary(path, None, method.reply.FromString)
            return [await unary(messages[0], timeout=_CALL_S)]
        if method.kind == "events":
            events: Any = self.channel.unary_stream(path, None, method.reply.FromString)
            call = events(messages[0], timeout=_CALL_S)
            reply = await call.read()
            call.cancel()
            return [] if reply is grpc.aio.EOF else [reply]
        stream: Any = self.channel.stream_stream(path, None, method.reply.FromString)(timeout=_CALL_S)
        replies = []
        try:
            for message in messages:
                await stream.write(message)
                if self.reads_between(name) and (reply := await stream.read()) is not grpc.aio.EOF:
                    replies.append(reply)
            await stream.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the server has ended the stream
            pass
        while (reply := await stream.read()) is not grpc.aio.EOF:
            replies.append(reply)
        if await stream.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await stream.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await stream.details()
            )
        return replies

    def reads_between(self, name: str) -> bool:
        """Return True if one reply is awaited after each message of this stream."""
        return False

    def filled(self, method: Method, data: bytes, replies: Mapping[str, Any]) -> bytes:
        """Return the message with references to earlier replies replaced."""
        return data

    def remember(self, replies: dict[str, Any], reply: Any) -> None:
        """Keep what later calls refer to."""

    async def settle(self, replies: Mapping[str, Any]) -> None:
        """End what the case began, and raise Misjudged if the server still holds anything."""

    async def at_rest(self) -> None:
        """Wait until the server's Validate reports nothing. Raises Misjudged."""
        stub: Any = self.channel.unary_unary(
            f"/moonpool.v1.{self.service}/Validate", None, common_pb2.JsonReply.FromString
        )
        end_s = self.loop.time() + _REST_S
        while True:
            report = json.loads((await stub(b"", timeout=_REST_S)).json)
            if report["ok"]:
                return
            if self.loop.time() > end_s:
                raise Misjudged(f"held after the case: {report['problems'][:3]}")
            await asyncio.sleep(0.005)

    def close(self) -> None:
        """Stop the server."""
        self.loop.run_until_complete(self._close())
        self.loop.close()
        self._folder.cleanup()

    async def _close(self) -> None:
        await self.channel.close()
        self.stop.set()
        if self._serving is not None:
            await self._serving


def _node(name: str, role: Any) -> conductor_pb2.Node:
    return conductor_pb2.Node(
        node_id=name, role=role, incarnation=1, target=f"unix:/nowhere/{name}.sock", pool_node_id="pool-0", model="m",
        kv_namespace=bytes(range(16)), spec=_SPEC.to_proto(), capacity_tokens=4096, max_model_len=4096, max_batch=8,
        kv_bytes_per_token=_SPEC.bytes_per_token, software=own_software(), hardware="h", host_id="host",
    )  # fmt: skip


class ConductorCalls(CallsTarget):
    """Calls to a conductor with a prefill and a decode node."""

    name = "grpc-conductor"
    covers: tuple[str, ...] = (
        "conductor/service.py", "conductor/scheduling.py", "conductor/wire.py", "conductor/registry.py",
        "conductor/slo/service.py", "conductor/slo/change.py", "conductor/policy",
    )  # fmt: skip
    service = "Conductor"
    methods: ClassVar[Mapping[str, Method]] = {
        "Join": Method(conductor_pb2.NodeReport, conductor_pb2.NodeCommand, "stream"),
        "Schedule": Method(conductor_pb2.FrontendCalls, conductor_pb2.ConductorAnswers, "stream"),
        "Cluster": Method(conductor_pb2.ClusterRequest, conductor_pb2.ClusterReply),
        "DrainNode": Method(conductor_pb2.DrainNodeRequest, conductor_pb2.DrainNodeReply),
        "SwitchNode": Method(conductor_pb2.SwitchNodeRequest, conductor_pb2.SwitchNodeReply),
        "ShowSlo": Method(conductor_pb2.ShowSloRequest, conductor_pb2.ShowSloReply),
        "ChangeSlo": Method(conductor_pb2.ChangeSloRequest, conductor_pb2.ChangeSloReply),
        "State": Method(common_pb2.JsonRequest, common_pb2.JsonReply),
        "Overview": Method(conductor_pb2.OverviewRequest, common_pb2.JsonReply),
        "Explain": Method(conductor_pb2.ExplainRequest, common_pb2.JsonReply),
    }

    async def serve(self) -> str:
        config = assemble(
            ConductorConfig, listen=f"unix:{self.path}/c.sock", decision_log=self.path / "log", decision_log_events=True
        )
        return await self.run_role(lambda stop, ready: serve_conductor(config, stop, ready))

    async def prepare(self) -> None:
        """Join the nodes."""
        self._nodes: dict[str, Any] = {}
        await self._join()

    async def _join(self) -> None:
        for name, role in (("prefill-0", common_pb2.ROLE_PREFILL), ("decode-0", common_pb2.ROLE_DECODE)):
            if name in self._nodes and not self._nodes[name].done():
                continue
            path, kind = "/moonpool.v1.Conductor/Join", self.methods["Join"]
            call = self.channel.stream_stream(path, kind.request.SerializeToString, kind.reply.FromString)()
            await call.write(conductor_pb2.NodeReport(node=_node(name, role), free_tokens=4096))
            await call.read()
            self._nodes[name] = call

    def scripts(self) -> Sequence[Sequence[tuple[str, Sequence[Message]]]]:
        schedule = conductor_pb2.ScheduleRequest(
            request_id="r", frontend_id="f", model="m", prompt_tokens=33, max_new_tokens=8, chain=bytes(64), tenant="t",
            slo_class="chat", ttft_objective_s=1.0, priority=1,
        )  # fmt: skip
        again = conductor_pb2.ScheduleRequest(
            request_id="r", attempt=1, model="m", prompt_tokens=40, max_new_tokens=4, generated=7, exclude_nodes=["x"]
        )
        complete = conductor_pb2.CompleteRequest(
            request_id="r", outcome="finished", ttft_s=0.1, mean_tbt_s=0.01, generated=8
        )
        calls = [
            conductor_pb2.FrontendCalls(
                calls=[conductor_pb2.FrontendCall(number=1, schedule=schedule)], software=own_software()
            ),
            conductor_pb2.FrontendCalls(calls=[conductor_pb2.FrontendCall(number=2, schedule=again)]),
            conductor_pb2.FrontendCalls(calls=[conductor_pb2.FrontendCall(number=3, complete=complete)]),
        ]
        report = conductor_pb2.NodeReport(
            num_waiting=1, num_running=1, free_tokens=1000,
            held=[conductor_pb2.Held(request_id="r", committed_tokens=48, remaining_prefill_tokens=33, prompt_tokens=33,
                                     max_new_tokens=8, decode_node="decode-0", turn=conductor_pb2.Turn(account="t"))],
            progress=[conductor_pb2.Progress(request_id="r", phase=conductor_pb2.PHASE_PREFILL_STARTED)],
            prefills=[conductor_pb2.PrefillSample(new_tokens=33, reused_tokens=8, seconds=0.1)],
            decodes=[conductor_pb2.DecodeSample(batch=2, context_tokens=90, seconds=0.01)],
            transfers=[conductor_pb2.TransferSample(bytes=4096, seconds=0.001, path="push")],
            counters={"kv_push_bytes": 4096.0},
        )  # fmt: skip
        joined = conductor_pb2.NodeReport(node=_node("prefill-1", common_pb2.ROLE_PREFILL), free_tokens=4096)
        pool = conductor_pb2.NodeReport(node=_node("pool-0", common_pb2.ROLE_POOL))
        change = conductor_pb2.ChangeSloRequest(author="a", reason="b", content='{"cluster":{"ttft":"2s"}}', trial=True)
        return [
            [("Schedule", calls)],
            [("Join", [joined, report, report])],
            [("Join", [pool]), ("Cluster", [conductor_pb2.ClusterRequest(frontend_id="f", tenants=["", "t"])])],
            [("Schedule", calls[:1]), ("Overview", [conductor_pb2.OverviewRequest()]),
             ("Explain", [conductor_pb2.ExplainRequest(request_id="r")]), ("State", [common_pb2.JsonRequest()])],
            [("ChangeSlo", [change]), ("ShowSlo", [conductor_pb2.ShowSloRequest(history=3)])],
        ]  # fmt: skip

    async def _run(self, calls: Sequence[tuple[str, list[bytes]]]) -> str:
        await self._join()
        self._requests = set[str]()
        for name, messages in calls:
            if name == "Schedule":
                for data in messages:
                    try:
                        found = conductor_pb2.FrontendCalls.FromString(data)
                    except DecodeError:
                        continue
                    self._requests |= {call.schedule.request_id for call in found.calls if call.HasField("schedule")}
        return await super()._run(calls)

    def remember(self, replies: dict[str, Any], reply: Any) -> None:
        """Raise Misjudged for a call that failed by an internal error."""
        for answer in getattr(reply, "answers", ()):
            if answer.refused.startswith("internal error"):
                raise Misjudged(f"Schedule answered: {answer.refused}")

    async def settle(self, replies: Mapping[str, Any]) -> None:
        """Complete the requests; held ones that only a Join reported end with the node."""
        if not self._requests:
            return
        calls = conductor_pb2.FrontendCalls(software=own_software())
        for request_id in sorted(self._requests):
            ended = conductor_pb2.CompleteRequest(request_id=request_id, attempt=(1 << 32) - 1, outcome="failed")
            calls.calls.add(complete=ended)
        await self._call("Schedule", self.methods["Schedule"], [calls.SerializeToString()])


class PoolCalls(CallsTarget):
    """Calls to a pool node."""

    name = "grpc-pool"
    covers: tuple[str, ...] = (
        "kvpool/service.py",
        "kvpool/node.py",
        "kvpool/spec.py",
        "kvpool/policy",
        "kvpool/remote_copy.py",
        "kvpool/coded_copies.py",
    )
    service = "Pool"
    methods: ClassVar[Mapping[str, Method]] = {
        "Describe": Method(pool_pb2.DescribeRequest, pool_pb2.DescribeReply),
        "Allocate": Method(pool_pb2.AllocateRequest, pool_pb2.AllocateReply),
        "Seal": Method(pool_pb2.SealRequest, pool_pb2.SealReply),
        "AbortPut": Method(pool_pb2.AbortPutRequest, pool_pb2.AbortPutReply),
        "Pin": Method(pool_pb2.PinRequest, pool_pb2.PinReply),
        "Renew": Method(pool_pb2.RenewRequest, pool_pb2.RenewReply),
        "Unpin": Method(pool_pb2.UnpinRequest, pool_pb2.UnpinReply),
        "Evict": Method(pool_pb2.EvictRequest, pool_pb2.EvictReply),
        "Quarantine": Method(pool_pb2.EvictRequest, pool_pb2.EvictReply),
        "Copy": Method(pool_pb2.CopyRequest, pool_pb2.CopyReply),
        "ReadCoded": Method(pool_pb2.ReadCodedRequest, pool_pb2.CodedBlock, "events"),
        "Prefetch": Method(pool_pb2.PrefetchRequest, pool_pb2.PrefetchReply),
        "Hint": Method(pool_pb2.HintRequest, pool_pb2.HintReply),
        "Inspect": Method(pool_pb2.InspectRequest, common_pb2.JsonReply),
        "Flush": Method(pool_pb2.FlushRequest, pool_pb2.FlushReply),
        "Verify": Method(pool_pb2.VerifyRequest, pool_pb2.VerifyProgress, "events"),
        "Events": Method(pool_pb2.EventsRequest, pool_pb2.PoolEvents, "events"),
        "State": Method(common_pb2.JsonRequest, common_pb2.JsonReply),
    }

    async def serve(self) -> str:
        config = assemble(
            PoolNodeConfig,
            node_id="pool",
            listen=f"unix:{self.path}/p.sock",
            pool_bytes=1 << 20,
            sweep_s=0.05,
            messenger=assemble(MessengerConfig, shm_dir=self.path),
        )
        return await self.run_role(lambda stop, ready: serve_pool_node(config, stop, ready))

    def scripts(self) -> Sequence[Sequence[tuple[str, Sequence[Message]]]]:
        namespace, chain, parents = bytes(range(16)), bytes(range(32)), bytes(16) + bytes(range(16))
        allocate = pool_pb2.AllocateRequest(
            kv_namespace=namespace, spec=_SPEC.to_proto(), owner="w", owner_incarnation=1, chain=chain, parents=parents,
            ttl_s=1.0, num_tokens=[0, 3], compute_s=0.5,
        )  # fmt: skip
        block = worker_pb2.PullBlock(offsets=[0], digests=[bytes(16)])
        pin = pool_pb2.PinRequest(
            kv_namespace=namespace, chain=chain, owner="w", owner_incarnation=1, lease_s=1.0, wait_s=0.01, tails=True
        )
        where = {"kv_namespace": namespace, "chain": chain}
        return [
            [("Allocate", [allocate]), ("Seal", [pool_pb2.SealRequest(put_id="@", blocks=[block, block])]), ("Pin",
             [pin]),
             ("Renew", [pool_pb2.RenewRequest(lease_id="@", lease_s=1.0)]),
             ("ReadCoded", [pool_pb2.ReadCodedRequest(lease_id="@", blocks=[0])]),
             ("Unpin", [pool_pb2.UnpinRequest(lease_id="@", superseded=chain[16:], kv_namespace=namespace)])],
            [("Allocate", [allocate]), ("AbortPut", [pool_pb2.AbortPutRequest(put_id="@")])],
            [("Prefetch", [pool_pb2.PrefetchRequest(**where)]), ("Hint", [pool_pb2.HintRequest(**where,
             other_replicas=[1, 2])]),
             ("Evict", [pool_pb2.EvictRequest(**where)]), ("Quarantine", [pool_pb2.EvictRequest(**where)])],
            [("Inspect", [pool_pb2.InspectRequest(kv_namespace=namespace, key_prefix=b"a")]),
             ("Flush", [pool_pb2.FlushRequest(kv_namespace=namespace)]), ("State", [common_pb2.JsonRequest()]),
             ("Describe", [pool_pb2.DescribeRequest()])],
            [("Events", [pool_pb2.EventsRequest(incarnation=1, after_seq=5)]), ("Verify", [pool_pb2.VerifyRequest()])],
        ]  # fmt: skip

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate; now and then, copy from an address where nobody listens."""
        if rng.random() < 0.01:
            copy = pool_pb2.CopyRequest(
                kv_namespace=bytes(range(16)), chain=bytes(32), source_target="unix:/nowhere", timeout_s=0.05
            )
            mutation.mutate_message(rng, copy)
            packed: bytes = msgpack.packb([["Copy", [copy.SerializeToString()]]])
            return packed
        return super().mutate(rng, case, other)

    def filled(self, method: Method, data: bytes, replies: Mapping[str, Any]) -> bytes:
        """Replace "@" by the last put or lease."""
        if method.request not in (
            pool_pb2.SealRequest,
            pool_pb2.AbortPutRequest,
            pool_pb2.RenewRequest,
            pool_pb2.ReadCodedRequest,
            pool_pb2.UnpinRequest,
        ):
            return data
        try:
            message: Any = method.request.FromString(data)
        except DecodeError:
            return data
        for field in ("put_id", "lease_id"):
            if getattr(message, field, "") == "@" and field in replies:
                setattr(message, field, replies[field])
        filled: bytes = message.SerializeToString()
        return filled

    def remember(self, replies: dict[str, Any], reply: Any) -> None:
        """Keep the ids of puts and leases."""
        for field in ("put_id", "lease_id"):
            if found := getattr(reply, field, ""):
                replies[field] = found
                replies.setdefault(f"{field}s", []).append(found)

    async def settle(self, replies: Mapping[str, Any]) -> None:
        """End puts and leases; the node must then be at rest."""
        for put_id in replies.get("put_ids", ()):
            request = pool_pb2.AbortPutRequest(put_id=put_id)
            await self._call("AbortPut", self.methods["AbortPut"], [request.SerializeToString()])
        for lease_id in replies.get("lease_ids", ()):
            await self._call(
                "Unpin", self.methods["Unpin"], [pool_pb2.UnpinRequest(lease_id=lease_id).SerializeToString()]
            )
        await self.at_rest()


class WorkerCalls(CallsTarget):
    """Base of the worker targets: a node with an instant engine, and a frontend attached as "front"."""

    covers: tuple[str, ...] = (
        "worker/servicer.py", "worker/request.py", "worker/sampling.py", "worker/streams.py", "worker/jobs.py",
        "worker/steering.py", "worker/kv_receiver.py",
    )  # fmt: skip
    service = "Worker"
    role: Any
    methods: ClassVar[Mapping[str, Method]] = {
        "Attach": Method(worker_pb2.FrontendMessage, worker_pb2.WorkerMessage, "stream"),
        "Reserve": Method(worker_pb2.ReserveRequest, worker_pb2.ReserveReply),
        "Commit": Method(worker_pb2.CommitRequest, worker_pb2.CommitReply),
        "Abort": Method(worker_pb2.AbortRequest, worker_pb2.AbortReply),
        "Help": Method(worker_pb2.HelpRequest, worker_pb2.HelpReply, "stream"),
        "State": Method(common_pb2.JsonRequest, common_pb2.JsonReply),
    }

    async def serve(self) -> str:
        config = assemble(
            WorkerConfig,
            node_id="node",
            listen=f"unix:{self.path}/n.sock",
            conductor_targets=(f"unix:{self.path}/nobody.sock",),
            model=BUNDLED_MODEL,
            served_model_name=("m",),
            device="cpu",
            threads=1,
            block_tokens=_BLOCK,
            capacity_tokens=1024,
            engine="paced",
            paced_profile="instant",
            pool_target="",
            messenger=assemble(MessengerConfig, transport="shm", shm_dir=self.path),
        )
        self.node = node = WorkerNode(config, self.role)
        self._prefill, decode = PrefillService(node), DecodeService(node)
        service = WorkerService(
            node,
            prefill=self._prefill.serve,
            whole=AggregatedService(node).serve,
            decode=decode,
            helper=self._prefill.helper,
        )
        self._server = await start_server(
            config.listen.listen, lambda server: add_WorkerServicer_to_server(service, server)
        )
        node.warm_up()
        await node.start(self._server.target)
        return self._server.target

    async def prepare(self) -> None:
        """Attach the frontend."""
        self._front: Any = None
        self._case = 0
        await self._attach()

    async def _attach(self) -> None:
        if self._front is None or self._front.done():
            path = "/moonpool.v1.Worker/Attach"
            self._front = self.channel.stream_stream(path, worker_pb2.FrontendMessage.SerializeToString, None)()
            hello = worker_pb2.Hello(frontend_id="front", incarnation=1, software=own_software())
            await self._front.write(worker_pb2.FrontendMessage(hello=hello))
            await self._front.read()

    def submit(self, name: str = "r-000000", length: int = 19, **sampling: Any) -> worker_pb2.Submit:
        """Return a request that the node accepts."""
        ids, seed = np.arange(3, 3 + length, dtype=np.int32), chain_seed("", "test", _BLOCK)
        return worker_pb2.Submit(
            request_id=name, attempt=1, frontend_id="front", model="m", prompt_ids=ids.astype("<i4").tobytes(),
            chain=chain_keys(seed, ids, _BLOCK).tobytes(), chain_seed=seed, timeout_s=0.5,
            sampling=common_pb2.Sampling(**{"max_tokens": 4, "top_p": 1.0, **sampling}),
        )  # fmt: skip

    def attached(self, *messages: worker_pb2.FrontendMessage) -> tuple[str, list[Message]]:
        """Return an Attach call of a further frontend with these messages."""
        hello = worker_pb2.Hello(frontend_id="other", incarnation=2, software=own_software())
        return "Attach", [worker_pb2.FrontendMessage(hello=hello), *messages]

    def scripts(self) -> Sequence[Sequence[tuple[str, Sequence[Message]]]]:
        plain, steered = self.submit(), self.submit(
            temperature=0.7, top_k=5, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1,
            logit_bias={5: 1.0}, min_tokens=1, logprobs=2, prompt_logprobs=1, stop_token_ids=[7], seed=9,
            grammar=common_pb2.Grammar(kind=common_pb2.Grammar.KIND_REGEX, source="[ab]+"),
        )  # fmt: skip
        handed = self.submit("r-000000")
        handed.placement.decode.CopyFrom(conductor_pb2.NodeRef(node_id="d", target="unix:/nowhere/d.sock"))
        handed.placement.turn.account = "t"
        cancel = worker_pb2.FrontendMessage(
            cancel=worker_pb2.Cancel(request_id="r-000000", attempt=1, keep_kv=True, kept_tokens=2)
        )
        reserve = worker_pb2.ReserveRequest(request=plain, writer=self.node.endpoint.to_proto())
        enlist = worker_pb2.HelpRequest(
            enlist=worker_pb2.Enlist(request=plain, kv_namespace=self.node.namespace, num_blocks=2)
        )
        begin = worker_pb2.HelpRequest(begin=worker_pb2.BeginShare(spans=[worker_pb2.Span(start=0, end=8)]))
        return [
            [self.attached(worker_pb2.FrontendMessage(submit=plain), cancel)],
            [self.attached(worker_pb2.FrontendMessage(submit=steered), cancel)],
            [self.attached(worker_pb2.FrontendMessage(submit=handed))],
            [("Reserve", [reserve]), ("Commit", [worker_pb2.CommitRequest(request_id="r-000000", attempt=1,
             epoch=_LAST_NUMBER)]),
             ("Abort", [worker_pb2.AbortRequest(request_id="r-000000", attempt=1, epoch=_LAST_NUMBER)])],
            [("Help", [enlist, begin])],
            [("State", [common_pb2.JsonRequest()])],
        ]  # fmt: skip

    async def _run(self, calls: Sequence[tuple[str, list[bytes]]]) -> str:
        await self._attach()
        # A node remembers the requests that it has ended, so each case has requests of its own.
        self._case += 1
        own = b"r-%06d" % (self._case % 1_000_000)
        return await super()._run(
            [(name, [message.replace(b"r-000000", own) for message in messages]) for name, messages in calls]
        )

    def filled(self, method: Method, data: bytes, replies: Mapping[str, Any]) -> bytes:
        """Replace the epoch's placeholder."""
        if method.request not in (worker_pb2.CommitRequest, worker_pb2.AbortRequest):
            return data
        try:
            message: Any = method.request.FromString(data)
        except DecodeError:
            return data
        if message.epoch == _LAST_NUMBER:
            message.epoch = replies.get("epoch", 1)
        filled: bytes = message.SerializeToString()
        return filled

    def remember(self, replies: dict[str, Any], reply: Any) -> None:
        """Keep the epochs."""
        if epoch := getattr(reply, "epoch", 0):
            replies["epoch"] = epoch
            replies.setdefault("epochs", []).append(epoch)

    async def settle(self, replies: Mapping[str, Any]) -> None:
        """Abort reservations, cancel what other frontends' requests left, and require that the node is at rest."""
        for epoch in replies.get("epochs", ()):
            request = worker_pb2.AbortRequest(epoch=epoch)
            await self._call("Abort", self.methods["Abort"], [request.SerializeToString()])
        await self.node.jobs.cancel_all()
        await self.at_rest()

    async def _close(self) -> None:
        self._front.cancel()
        await self.channel.close()
        await self._server.stop(0.1)
        await self.node.close()
        await self._prefill.close()


class PrefillCalls(WorkerCalls):
    """Calls to a prefill node."""

    name = "grpc-prefill"
    covers: tuple[str, ...] = (*WorkerCalls.covers, "prefill_node")
    role = common_pb2.ROLE_PREFILL


class DecodeCalls(WorkerCalls):
    """Calls to a decode node."""

    name = "grpc-decode"
    covers: tuple[str, ...] = (*WorkerCalls.covers, "decode_node")
    role = common_pb2.ROLE_DECODE
