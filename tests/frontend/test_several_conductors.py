"""Several conductors: one is asked; an absent or slow one holds nothing up."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from frontend.conductor import ConductorClient
from frontend.errors import RequestDeadline
from moonpool_proto.v1 import conductor_pb2, conductor_pb2_grpc
from rpc.control import ControlServer, start_server
from tests.frontend.scripted import answer_calls

ASKED_BY = next(name for name in map(str, range(100)) if zlib.crc32(name.encode()) % 2 == 0)  # prefers the first
REQUEST = conductor_pb2.ScheduleRequest(request_id="r", attempt=0, model="m")
RETRY = conductor_pb2.CompleteRequest(request_id="r", attempt=0, outcome="retry")


class Conductor(conductor_pb2_grpc.ConductorServicer):
    """Places everything on a node of its own name, once it `may`."""

    def __init__(self, name: str, target: str) -> None:
        self.name, self.target = name, target
        self.may = asyncio.Event()
        self.may.set()
        self.heard: list[str] = []
        self.server: ControlServer | None = None

    async def start(self) -> "Conductor":
        self.server = await start_server(
            self.target, lambda server: conductor_pb2_grpc.add_ConductorServicer_to_server(self, server)
        )
        return self

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
        self.server = None

    async def Schedule(self, request_iterator: Any, context: Any) -> None:
        await answer_calls(request_iterator, context, self._schedule, self._complete)

    async def _schedule(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        self.heard.append(f"schedule {request.attempt}")
        await self.may.wait()
        node = conductor_pb2.NodeRef(node_id=self.name)
        return conductor_pb2.ScheduleReply(placement=conductor_pb2.Placement(prefill=node))

    def _complete(self, request: conductor_pb2.CompleteRequest) -> None:
        self.heard.append(f"{request.outcome} {request.attempt}")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Conductor, Conductor]]:
    one, other = [await Conductor(name, f"unix:{tmp_path}/{name}").start() for name in ("one", "other")]
    yield one, other
    for each in (one, other):
        each.may.set()
        await each.stop()


@pytest.fixture
async def client(pair: tuple[Conductor, Conductor]) -> AsyncIterator[ConductorClient]:
    client = ConductorClient([each.target for each in pair], asked_by=ASKED_BY)
    yield client
    await client.close()


async def placed_by(client: ConductorClient, request: conductor_pb2.ScheduleRequest = REQUEST) -> str:
    reply, _ = await client.schedule(request, deadline_s=monotonic() + 60)
    assert isinstance(reply, conductor_pb2.Placement)
    return reply.prefill.node_id


async def test_a_request_without_time_says_nothing_about_the_conductor(
    client: ConductorClient, pair: tuple[Conductor, Conductor]
) -> None:
    one, other = pair
    assert await placed_by(client) == "one"
    one.may.clear()
    with pytest.raises(RequestDeadline):
        await client.schedule(REQUEST, deadline_s=monotonic() + 0.2)
    with pytest.raises(RequestDeadline):
        await client.schedule(REQUEST, deadline_s=monotonic() - 1)
    assert client.target == one.target
    assert all(line.failed_s is None for line in client._streams)
    assert not other.heard, "there was no time left to ask anybody else"


async def test_the_next_attempt_does_not_wait_for_a_conductor_that_is_gone(
    client: ConductorClient, pair: tuple[Conductor, Conductor]
) -> None:
    _, line = await client.schedule(REQUEST, deadline_s=monotonic() + 60)
    await pair[0].stop()
    async with asyncio.timeout(10):  # a conductor that is away is told for longer
        await client.complete(RETRY, line)
        assert await placed_by(client) == "other"


async def test_a_conductor_hears_of_an_attempts_end_before_it_is_asked_for_the_next(
    client: ConductorClient, pair: tuple[Conductor, Conductor]
) -> None:
    one, other = pair
    _, line = await client.schedule(REQUEST, deadline_s=monotonic() + 60)
    for attempt in range(1, 20):
        await client.complete(conductor_pb2.CompleteRequest(attempt=attempt - 1, outcome="retry"), line)
        assert await placed_by(client, conductor_pb2.ScheduleRequest(attempt=attempt)) == "one"
    turns = [text for n in range(1, 20) for text in (f"retry {n - 1}", f"schedule {n}")]
    assert one.heard == ["schedule 0", *turns]
    assert not other.heard


async def test_one_request_alone_finds_out_whether_a_silent_conductor_is_back(
    client: ConductorClient, pair: tuple[Conductor, Conductor]
) -> None:
    one, _ = pair
    one.may.clear()
    assert await placed_by(client) == "other"
    line = client._streams[0]
    assert line.failed_s is not None
    line.failed_s -= 60  # it is time to ask it again
    assert await asyncio.gather(*(placed_by(client) for _ in range(8))) == ["other"] * 8
    assert one.heard.count("schedule 0") == 2
