"""Scenarios for test_simulated_rpc.py: real `rpc.control` and generated stubs over the simulated gRPC.

`python rpc_scenarios.py SEED` runs all of them, and writes a JSON object of their outcomes and of their digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from tools.prove import imports
from tools.prove.world import basics
from tools.prove.world.network import SimNetwork
from tools.prove.world.process import Process
from tools.prove.world.rpc import REPLACED, aio, grpc
from tools.prove.world.scheduler import World, set_world

imports.install(
    {
        **REPLACED,
        **basics.REPLACED,
    }
)

from moonpool_proto.v1 import common_pb2, conductor_pb2, pool_pb2, worker_pb2  # noqa: E402
from moonpool_proto.v1.conductor_pb2_grpc import (  # noqa: E402
    ConductorServicer,
    ConductorStub,
    add_ConductorServicer_to_server,
)
from moonpool_proto.v1.pool_pb2_grpc import PoolServicer, PoolStub, add_PoolServicer_to_server  # noqa: E402
from moonpool_proto.v1.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server  # noqa: E402
from rpc import control  # noqa: E402
from rpc.join_tokens import JoinTokens  # noqa: E402

logging.disable(logging.CRITICAL)
TARGET = "h0:7000"
KIB = 1 << 10
Outcome = dict[str, Any]


class Scene:
    """A world with a server process on host h0 and client processes on host h1."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, most_steps=2_000_000)
        set_world(self.world)
        self.network = SimNetwork(self.world)
        self.world.at(10_000.0, lambda: None)  # nothing may be left to do
        self.log: list[Any] = []  # what servicers have seen
        self.sent = 0  # messages whose write was done
        self.serving = False
        self.stop_grace_s: float | None = None
        self._stop: asyncio.Event | None = None
        self.server = self.start_server()

    @property
    def now_s(self) -> float:
        return self.world.now_ns / 1e9

    def start(self, name: str, host: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        process = Process(self.world, name, host)
        process.at_death.append(lambda: self.network.close_all(process))
        process.start(main)
        return process

    def start_server(self, tokens: JoinTokens | None = None) -> Process:
        async def serve() -> None:
            def add(server: Any) -> None:
                add_WorkerServicer_to_server(Worker(self), server)
                add_PoolServicer_to_server(Pool(self), server)
                add_ConductorServicer_to_server(Conductor(self), server)
                server.add_generic_rpc_handlers((Summing(),))

            self._stop = asyncio.Event()
            control.admit_by(tokens)
            server = await control.start_server(TARGET, add)
            control.admit_by(None)
            self.serving = True
            await self._stop.wait()
            began_s = self.now_s
            await server.stop(self.stop_grace_s)
            self.log.append(["stopped", round(self.now_s - began_s, 2)])

        self.serving = False
        return self.start("server", "h0", serve)

    def stop_server(self) -> None:
        assert self._stop is not None
        self.server.loop.call_soon_threadsafe(self._stop.set)

    def client(self, main: Callable[[Scene], Coroutine[Any, Any, Outcome]], limit_s: float = 120.0) -> Outcome:
        """Run a client once the server serves; return its outcome, and the servicers' log."""
        assert self.world.run(lambda: self.serving, 10.0)
        client = self.start("client", "h1", lambda: main(self))
        if not self.world.run(lambda: client.is_dead, limit_s):
            raise TimeoutError("the client has not ended")
        if isinstance(client.exit, Exception):
            raise client.exit
        self.world.run(lambda: False, 0.5)
        return {**client.exit, "log": self.log}


class Worker(WorkerServicer):
    """The request's id says what to do."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    async def Reserve(self, request: Any, context: Any) -> Any:
        how = request.request.request_id
        if how == "abort":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no room")
        elif how == "raise":
            raise ValueError("a bug")
        elif how == "set code":
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("not here")
        elif how == "wait":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.scene.log.append("cancelled")
                raise
        elif how == "wait a second":
            await asyncio.sleep(1.0)
            self.scene.log.append("finished")
        return worker_pb2.ReserveReply(epoch=len(request.request.request_id))

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Answer each message with its request's id; then as the id says."""
        try:
            async for message in request_iterator:
                how = message.cancel.request_id
                if how == "abort":
                    await context.abort(grpc.StatusCode.ABORTED, "enough")
                elif how == "write, then abort":
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            while True:
                                await context.write(answer("x" * KIB))
                                self.scene.sent += 1
                    self.scene.log.append("aborts")
                    try:
                        await context.abort(grpc.StatusCode.ABORTED, "you do not read")
                    finally:
                        self.scene.log.append("has aborted")
                elif how == "do not read":
                    await asyncio.sleep(10.0)
                elif how == "write":
                    while True:
                        await context.write(answer("x" * KIB))
                        self.scene.sent += 1
                await context.write(answer(how))
            self.scene.log.append("all read")
            await asyncio.sleep(0.01)
            self.scene.log.append("not cancelled")
        except asyncio.CancelledError:
            self.scene.log.append("cancelled")
            raise
        except aio.InternalError:
            self.scene.log.append("write failed")
            raise


class Pool(PoolServicer):
    """Its blocks are yielded by a generator."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    async def ReadCoded(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        for index in request.blocks:
            self.scene.sent += 1
            yield pool_pb2.CodedBlock(plain=bytes([index]) * 4 * KIB)

    async def Events(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        yield pool_pb2.PoolEvents(seq=1)
        await asyncio.sleep(1000)


class Conductor(ConductorServicer):
    """Accepts joins; tells when its calls begin."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        async for report in request_iterator:
            accepted = conductor_pb2.JoinAccepted(conductor_incarnation=report.num_waiting)
            yield conductor_pb2.NodeCommand(accepted=accepted)

    async def Cluster(self, request: Any, context: Any) -> Any:
        self.scene.log.append(request.frontend_id)
        return conductor_pb2.ClusterReply()


class Summing(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A method with a stream of requests and one answer, which no service of Moonpool has."""

    def service(self, handler_call_details: Any) -> Any:
        async def total(requests: Any, context: Any) -> bytes:
            return str(sum([int(each) async for each in requests])).encode()

        return grpc.stream_unary_rpc_method_handler(total) if handler_call_details.method == "/test/Sum" else None


def asked(how: str) -> Any:
    return worker_pb2.ReserveRequest(request=worker_pb2.Submit(request_id=how))


def said(how: str) -> Any:
    return worker_pb2.FrontendMessage(cancel=worker_pb2.Cancel(request_id=how))


def answer(text: str) -> Any:
    return worker_pb2.WorkerMessage(failures=[worker_pb2.Failure(message=text)])


async def end_of(call: Awaitable[Any]) -> Any:
    """Return how a call ends."""
    try:
        result = await call
    except aio.AioRpcError as error:
        return [error.code().name, error.details()]
    except asyncio.CancelledError:
        return "CancelledError"
    except asyncio.InvalidStateError as error:
        return str(error)
    return "EOF" if result is aio.EOF else getattr(result, "epoch", str(result))


async def texts(call: Any) -> list[str]:
    return [message.failures[0].message async for message in call]


# Scenarios


async def unary(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        stub = WorkerStub(channel)
        answer = await control.call(stub.Reserve(asked("12345")), what="Reserve", target=TARGET, deadline_s=5.0)
        ends = {how: await end_of(stub.Reserve(asked(how))) for how in ("abort", "raise", "set code")}
        unknown = channel.unary_unary("/moonpool.v1.Worker/Unknown")
        return {
            "epoch": answer.epoch,
            "ends": ends,
            "unknown method": await end_of(unknown(b"")),
            "not implemented": await end_of(stub.State(common_pb2.JsonRequest())),
            "malformed": (await end_of(channel.unary_unary("/moonpool.v1.Worker/Reserve")(b"\xff\xff")))[0],
            "state": channel.get_state().name,
        }


async def streams(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        blocks = [block async for block in PoolStub(channel).ReadCoded(pool_pb2.ReadCodedRequest(blocks=range(100)))]

        async def reports() -> AsyncIterator[Any]:
            for number in range(5):
                yield conductor_pb2.NodeReport(num_waiting=number)

        commands = [command async for command in ConductorStub(channel).Join(reports())]
        call = WorkerStub(channel).Attach()
        await call.write(said("one"))
        first = await call.read()
        await call.write(said("two"))
        await call.done_writing()
        after = await end_of(call.write(said("three")))
        second = await call.read()
        ends = [await end_of(call.read()) for _ in range(2)]
        total = channel.stream_unary("/test/Sum")
        return {
            "blocks": [block.plain[:1].hex() for block in blocks] == [f"{i:02x}" for i in range(100)],
            "joins": [command.accepted.conductor_incarnation for command in commands],
            "read": [message.failures[0].message for message in (first, second)],
            "write after done_writing": after,
            "ends": ends,
            "code": (await call.code()).name,
            "sum": (await total(iter([b"1", b"2", b"39"]))).decode(),
        }


async def deadline(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        began_s = scene.now_s
        end = await end_of(WorkerStub(channel).Reserve(asked("wait"), timeout=2.0))
        took_s = scene.now_s - began_s
        await asyncio.sleep(0.1)
        by_server = list(scene.log)
        try:
            await control.call(WorkerStub(channel).Reserve(asked("wait")), what="w", target=TARGET, deadline_s=1.0)
        except control.ControlDeadlineExceeded as error:
            return {"end": end, "took_s": round(took_s, 2), "by server": by_server, "call": error.code}
        return {}


async def cancel(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        unary = WorkerStub(channel).Reserve(asked("wait"))
        waiting = asyncio.ensure_future(end_of(unary))
        await asyncio.sleep(0.1)
        unary.cancel()
        first = await waiting, (await unary.code()).name, await unary.details(), unary.cancelled()
        await asyncio.sleep(0.1)
        scene.log.append("and the stream")
        stream = WorkerStub(channel).Attach()
        await stream.write(said("hello"))
        await stream.read()
        reading = asyncio.ensure_future(end_of(stream.read()))
        await asyncio.sleep(0.1)
        stream.cancel()
        return {"unary": first, "read": await reading, "later": await end_of(stream.write(said("x")))}


async def abort_of_stream(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(said("one"))
        await call.write(said("abort"))
        await asyncio.sleep(0.1)
        # The status comes after the messages before it, even if they are read late.
        is_done, message = call.done(), await call.read()
        end = await end_of(call.read())
        return {"done": is_done, "read": message.failures[0].message, "end": end}


async def crash(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        stream = WorkerStub(channel).Attach()
        await stream.write(said("one"))
        await stream.read()
        unary = asyncio.ensure_future(end_of(WorkerStub(channel).Reserve(asked("wait"))))
        reading = asyncio.ensure_future(end_of(stream.read()))
        await asyncio.sleep(0.1)
        began_s = scene.now_s
        scene.world.at(0.0, lambda: scene.server.end("is killed"))
        ends = [await reading, await unary]
        took_s = scene.now_s - began_s
        later = await end_of(stream.write(said("x")))
        refused = await end_of(WorkerStub(channel).Reserve(asked("1")))

        def restart() -> None:
            scene.server = scene.start_server()

        scene.world.at(3.0, restart)
        began_s = scene.now_s
        waited = await end_of(WorkerStub(channel).Reserve(asked("1234"), wait_for_ready=True))
        return {
            "ends": ends,
            "at once": took_s < 0.1,
            "later": later,
            "refused": refused,
            "waited": waited,
            "reconnects": 3.0 <= scene.now_s - began_s < 5.0,
            "again": await end_of(WorkerStub(channel).Reserve(asked("123456"))),
        }


async def crash_of_client(scene: Scene) -> Outcome:
    async def attached() -> None:
        async with control.open_channel(TARGET) as channel:
            call = WorkerStub(channel).Attach()
            await call.write(said("one"))
            await call.read()
            scene.log.append("attached")
            await asyncio.sleep(1000)

    other = scene.start("other client", "h2", attached)
    while "attached" not in scene.log:
        await asyncio.sleep(0.1)
    scene.world.at(0.0, lambda: other.end("is killed"))
    await asyncio.sleep(0.5)
    return {}


async def partition(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(said("one"))
        await call.read()
        await asyncio.sleep(25.0)
        is_alive = not call.done()  # pings are answered
        began_s = scene.now_s
        scene.network.cut("h0", "h1")
        scene.network.cut("h1", "h0")
        end = await end_of(call.read())
        took_s = scene.now_s - began_s
        began_s = scene.now_s
        connecting = await end_of(WorkerStub(channel).Reserve(asked("1")))
        connecting_s = scene.now_s - began_s
        await asyncio.sleep(25.0)
        by_server = list(scene.log)
        scene.network.heal("h0", "h1")
        scene.network.heal("h1", "h0")
        await asyncio.sleep(2.0)
        return {
            "alive": is_alive,
            "end": end,
            "by keepalive": 10.0 <= took_s <= 20.5,
            "connecting": connecting,
            "in time": connecting_s <= 1.3,
            "by server": by_server,
            "again": await end_of(WorkerStub(channel).Reserve(asked("12"))),
        }


async def loss_of_host(scene: Scene) -> Outcome:
    """Nothing answers until the host is back; then its kernel knows nothing of the connection."""
    async with control.open_channel(TARGET) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(said("one"))
        await call.read()
        began_s = scene.now_s
        scene.network.kill_host("h0")
        scene.server.end("is lost with its host")
        scene.world.at(3.0, lambda: scene.network.revive_host("h0"))
        end = await end_of(call.read())
        return {"end": end, "by the ping": 9.0 <= scene.now_s - began_s <= 11.0}


async def pause_of_server(scene: Scene) -> Outcome:
    """The kernel of a stopped process accepts connections, but it says nothing."""
    scene.world.pause(scene.server)
    async with control.open_channel(TARGET) as channel:
        end = await end_of(WorkerStub(channel).Reserve(asked("1")))
        scene.world.go_on(scene.server)
        return {"end": end, "again": await end_of(WorkerStub(channel).Reserve(asked("1"), wait_for_ready=True))}


async def backoff(scene: Scene) -> Outcome:
    """Count the attempts to connect to a host where nothing listens."""
    attempts = 0
    dial = scene.network.dial

    def counting(*details: Any) -> None:
        nonlocal attempts
        attempts += 1
        dial(*details)

    scene.network.dial = counting  # type: ignore[method-assign]
    async with control.open_channel("h0:7999") as channel:
        stub = WorkerStub(channel)
        ends = [await end_of(stub.Reserve(asked("1"))) for _ in range(50)]
        at_once = attempts
        await asyncio.sleep(10.0)
        return {"unavailable": {end[0] for end in ends} == {"UNAVAILABLE"}, "at once": at_once, "attempts": attempts}


async def flow_to_server(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        call = WorkerStub(channel).Attach()
        num_written = 0

        async def write() -> None:
            nonlocal num_written
            await call.write(said("do not read"))
            for _ in range(1_000):
                await call.write(said("y" * KIB))
                num_written += 1
            await call.done_writing()

        writing = asyncio.ensure_future(write())
        reading = asyncio.ensure_future(texts(call))
        await asyncio.sleep(5.0)
        blocked_at = num_written
        await asyncio.sleep(4.0)
        is_blocked = num_written == blocked_at
        await writing
        answers = await reading
        return {"bytes": blocked_at * KIB, "blocked": is_blocked, "then": num_written, "answers": len(answers)}


async def flow_of_a_large_message(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(said("do not read"))
        writing = asyncio.ensure_future(call.write(said("y" * 200 * KIB)))
        await asyncio.sleep(5.0)
        was_blocked = not writing.done()
        await writing
        answers = [await call.read() for _ in range(2)]
        return {"blocked": was_blocked, "answer": len(answers[-1].failures[0].message)}


async def flow_to_client(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        call = PoolStub(channel).ReadCoded(pool_pb2.ReadCodedRequest(blocks=range(200)))
        await call.read()
        await asyncio.sleep(1.0)
        generated = scene.sent
        for _ in range(20):
            await call.read()
        await asyncio.sleep(1.0)
        more = scene.sent - generated
        call.cancel()
        scene.sent = 0
        writer = WorkerStub(channel).Attach()
        await writer.write(said("write"))
        await writer.read()
        await asyncio.sleep(1.0)
        written = scene.sent
        writer.cancel()
        return {"generated": generated, "more": more, "written": written}


async def blocked_write_and_abort(scene: Scene) -> Outcome:
    """As in gRPC, a write that is cancelled stays pending, and the status waits behind it."""
    async with control.open_channel(TARGET) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(said("write, then abort"))
        await asyncio.sleep(3.0)
        before = list(scene.log)
        num_read = 0
        try:
            async for _ in call:
                num_read += 1
        except aio.AioRpcError as error:
            return {"before": before, "the cancelled one, too": num_read == scene.sent + 1, "end": error.details()}
        return {}


async def blocked_write_and_crash(scene: Scene) -> Outcome:
    """As grpc.aio does: a write that fails replaces the status by INTERNAL."""
    async with control.open_channel(TARGET) as channel:
        call = WorkerStub(channel).Attach()

        async def write() -> None:
            await call.write(said("do not read"))
            while True:
                await call.write(said("y" * KIB))

        writing = asyncio.ensure_future(end_of(write()))
        await asyncio.sleep(1.0)
        scene.server.end("is killed")
        return {"write": await writing, "read": await end_of(call.read())}


async def stop(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        scene.stop_grace_s = 2.0
        stub = WorkerStub(channel)
        short = asyncio.ensure_future(end_of(stub.Reserve(asked("wait a second"))))
        long = asyncio.ensure_future(end_of(stub.Reserve(asked("wait"))))
        await asyncio.sleep(0.1)
        scene.stop_server()
        await asyncio.sleep(0.1)
        new = await end_of(stub.Reserve(asked("1")))
        return {"short": await short, "long": await long, "new": new}


async def generator_raises(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:

        async def reports() -> AsyncIterator[Any]:
            yield conductor_pb2.NodeReport(num_waiting=1)
            raise ValueError("a bug")

        call = ConductorStub(channel).Join(reports())
        return {"end": await end_of(asyncio.ensure_future(anext(aiter(call)))), "code": (await call.code()).name}


async def close_of_channel(scene: Scene) -> Outcome:
    channel = control.open_channel(TARGET)
    stub = WorkerStub(channel)
    unary = asyncio.ensure_future(end_of(stub.Reserve(asked("wait"))))
    stream = stub.Attach()
    await stream.write(said("one"))
    await stream.read()
    reading = asyncio.ensure_future(end_of(stream.read()))
    await asyncio.sleep(0.1)
    await channel.close()
    try:
        stub.Attach()
    except aio.UsageError as error:
        return {"ends": [await unary, await reading], "new": str(error)}
    return {}


async def too_large(scene: Scene) -> Outcome:
    small = [("grpc.max_receive_message_length", 1000), ("grpc.max_send_message_length", 2000)]
    async with aio.insecure_channel(TARGET, options=small) as channel:
        stub = WorkerStub(channel)
        sent = await end_of(stub.Reserve(asked("x" * 3000)))
        call = PoolStub(channel).ReadCoded(pool_pb2.ReadCodedRequest(blocks=[1]))
        return {"sent": sent, "received": await end_of(call.read())}


async def order_of_starts(scene: Scene) -> Outcome:
    """Calls that are sent one after the other may begin in another order, but a stream's messages stay in order."""
    async with control.open_channel(TARGET) as channel:
        stub = ConductorStub(channel)
        names = [f"{number:02}" for number in range(30)]
        await asyncio.gather(*(stub.Cluster(conductor_pb2.ClusterRequest(frontend_id=name)) for name in names))
        starts = list(scene.log)
        call = WorkerStub(channel).Attach()
        for name in names:
            await call.write(said(name))
        await call.done_writing()
        return {
            "all": sorted(starts) == names,
            "reordered": starts != names,
            "stream in order": await texts(call) == names,
        }


async def metadata(scene: Scene) -> Outcome:
    async with control.open_channel(TARGET) as channel:
        call = PoolStub(channel).Events(pool_pb2.EventsRequest())
        first = await call.read()
        remaining = WorkerStub(channel).Reserve(asked("wait"), timeout=5.0).time_remaining()
        await call.wait_for_connection()
        ended: list[bool] = []
        call.add_done_callback(lambda each: ended.append(each.cancelled()))
        call.cancel()
        return {"seq": first.seq, "remaining": 4.9 < remaining <= 5.0, "callback": ended}


async def addresses(scene: Scene) -> Outcome:
    """A free port, this host's other names, a port in use, and one that was freed."""

    def add(server: Any) -> None:
        add_WorkerServicer_to_server(Worker(scene), server)

    server = await control.start_server("0.0.0.0:0", add)
    port = int(server.target.rpartition(":")[2])
    ends = []
    for host in ("h1", "127.0.0.1", "localhost"):
        async with control.open_channel(f"{host}:{port}") as channel:
            ends.append(await end_of(WorkerStub(channel).Reserve(asked("12"))))
    in_use = ""
    try:
        aio.server().add_insecure_port(f"h1:{port}")
    except RuntimeError as error:
        in_use = str(error)
    await server.stop()
    again = await control.start_server(f"h1:{port}", add)
    await again.stop()
    return {
        "port": 1024 <= port < 65536,
        "ends": ends,
        "in use": in_use == f"Failed to bind to address h1:{port}: Address already in use",
        "again": again.target == f"h1:{port}",
    }


def tokens(scene: Scene) -> Outcome:
    """Calls with and without a join token, through the production interceptor and channel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"
        path.write_text("a" * 40 + "\n")
        path.chmod(0o600)
        known = JoinTokens(path)
        scene.server.end("is replaced")
        scene.server = scene.start_server(known)

        async def main(scene: Scene) -> Outcome:
            async with control.open_channel(TARGET) as channel:
                without = await end_of(WorkerStub(channel).Reserve(asked("1")))
            control.admit_by(known)
            channel = control.open_channel(TARGET)
            control.admit_by(None)
            async with channel:
                return {"without": without[0], "with": await end_of(WorkerStub(channel).Reserve(asked("1")))}

        return scene.client(main)


CLIENTS = [
    unary,
    streams,
    deadline,
    cancel,
    abort_of_stream,
    crash,
    crash_of_client,
    partition,
    loss_of_host,
    pause_of_server,
    backoff,
    flow_to_server,
    flow_of_a_large_message,
    flow_to_client,
    blocked_write_and_abort,
    blocked_write_and_crash,
    stop,
    generator_raises,
    close_of_channel,
    too_large,
    order_of_starts,
    metadata,
    addresses,
]


def run(scenario: Callable[[Scene], Outcome], seed: int) -> Outcome:
    scene = Scene(seed)
    try:
        outcome = scenario(scene)
    except Exception:
        outcome = {"failed": traceback.format_exc(), "story": scene.world.story[-30:]}
    return {**outcome, "digest": scene.world.digest}


def main() -> None:
    seed, names = int(sys.argv[1]), sys.argv[2:]
    outcomes = {
        each.__name__: run(lambda scene, main=each: scene.client(main), seed)  # type: ignore[misc]
        for each in CLIENTS
        if not names or each.__name__ in names
    }
    if not names or "tokens" in names:
        outcomes["tokens"] = run(tokens, seed)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
