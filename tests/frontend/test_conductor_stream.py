"""A frontend's line to one conductor: one stream for all requests' calls, and what becomes of them when it breaks."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from frontend.conductor import ConductorStream
from moonpool_proto.v1 import conductor_pb2, conductor_pb2_grpc
from rpc.control import CallRefused, ControlDeadlineExceeded, ControlServer, Unavailable, start_server


class Conductor(conductor_pb2_grpc.ConductorServicer):
    """Refuses every call by its request's id; `before` is awaited before each message's answers."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.outcomes: list[tuple[str, str]] = []  # (request, outcome) of those that were answered
        self.messages: list[int] = []  # calls in each
        self.num_streams = 0
        self.refuses = False  # every stream, after its first message
        self.before: Callable[[], Awaitable[None]] | None = None
        self.server: ControlServer | None = None

    async def start(self) -> None:
        self.server = await start_server(
            self.target, lambda server: conductor_pb2_grpc.add_ConductorServicer_to_server(self, server)
        )

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
        self.server = None

    async def Schedule(self, request_iterator: Any, context: Any) -> None:
        self.num_streams += 1
        await context.write(conductor_pb2.ConductorAnswers())
        async for message in request_iterator:
            if self.refuses:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another version")
            self.messages.append(len(message.calls))
            if self.before is not None:
                await self.before()
            answers = conductor_pb2.ConductorAnswers()
            for call in message.calls:
                answers.answers.add(number=call.number, refused=call.schedule.request_id or call.complete.request_id)
                if call.HasField("complete"):
                    self.outcomes.append((call.complete.request_id, call.complete.outcome))
            await context.write(answers)


@pytest.fixture
async def conductor(tmp_path: Path) -> AsyncIterator[Conductor]:
    conductor = Conductor(f"unix:{tmp_path}/c.sock")
    yield conductor
    await conductor.stop()


@pytest.fixture
async def line(conductor: Conductor) -> AsyncIterator[ConductorStream]:
    line = ConductorStream(conductor.target)
    yield line
    await line.close()


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def request(name: str, chain: bytes = b"") -> conductor_pb2.ScheduleRequest:
    return conductor_pb2.ScheduleRequest(request_id=name, chain=chain)


async def ask(
    line: ConductorStream, name: str, *, waits: bool = True, deadline_s: float = 20.0, chain: bytes = b""
) -> str:
    """Return the description of the call."""
    with pytest.raises((CallRefused, Unavailable, ControlDeadlineExceeded)) as caught:
        await line.schedule(request(name, chain), waits=waits, deadline_s=deadline_s)
    return caught.value.reason if isinstance(caught.value, CallRefused) else type(caught.value).__name__


async def test_calls_that_come_together_share_messages_and_each_gets_its_own_answer(
    conductor: Conductor, line: ConductorStream
) -> None:
    await conductor.start()
    names = [f"r{number}" for number in range(200)]
    assert await asyncio.gather(*(ask(line, name) for name in names)) == names
    assert conductor.num_streams == 1
    assert sum(conductor.messages) == 200
    assert len(conductor.messages) < 20


async def test_long_prompts_do_not_make_one_message(conductor: Conductor, line: ConductorStream) -> None:
    await conductor.start()
    await asyncio.gather(*(ask(line, f"r{number}", chain=bytes(600_000)) for number in range(6)))
    assert max(conductor.messages) == 2


async def test_who_waits_is_answered_once_the_conductor_is_there_and_who_does_not_is_told_at_once(
    conductor: Conductor, line: ConductorStream
) -> None:
    waiting = asyncio.create_task(ask(line, "patient"))
    assert await ask(line, "hasty", waits=False) == "Unavailable"
    await conductor.start()
    assert await waiting == "patient"


async def test_a_stream_that_breaks_fails_what_was_sent_and_the_next_call_opens_another(
    conductor: Conductor, line: ConductorStream
) -> None:
    never, heard = asyncio.Event(), asyncio.Event()

    async def silent() -> None:
        heard.set()
        await never.wait()

    await conductor.start()
    conductor.before = silent
    waiting = asyncio.create_task(ask(line, "lost"))
    await heard.wait()
    await conductor.stop()
    assert await waiting == "Unavailable"
    conductor.before = None
    await conductor.start()
    assert await ask(line, "again") == "again"
    assert conductor.num_streams == 2


async def test_an_outcome_that_is_owed_to_a_conductor_that_refuses_the_line_is_not_sent_again_without_pauses(
    conductor: Conductor, line: ConductorStream
) -> None:
    await conductor.start()
    conductor.refuses = True
    owed = conductor_pb2.CompleteRequest(request_id="r", outcome="finished")
    with pytest.raises(ControlDeadlineExceeded):
        await line.complete(owed, deadline_s=1.0)
    assert 0 < conductor.num_streams < 20


async def test_outcomes_are_owed_to_a_conductor_that_stood_still_also_for_placements_whose_answer_was_lost(
    conductor: Conductor, line: ConductorStream
) -> None:
    never, heard = asyncio.Event(), asyncio.Event()

    async def silent() -> None:
        heard.set()
        await never.wait()

    await conductor.start()
    conductor.before = silent
    done = conductor_pb2.CompleteRequest(request_id="ended", outcome="finished")
    placing = asyncio.create_task(ask(line, "placed"))
    await heard.wait()
    with pytest.raises(ControlDeadlineExceeded):
        await line.complete(done, deadline_s=0.01)  # its caller waits no longer
    await conductor.stop()
    assert await placing == "Unavailable"
    conductor.before = None
    await conductor.start()
    assert await ask(line, "next") == "next"
    assert conductor.outcomes == [("placed", "retry"), ("ended", "finished")]
    assert await ask(line, "last") == "last"
    assert len(conductor.outcomes) == 2, "once each"


async def test_a_stream_that_breaks_is_opened_again_without_a_further_call(
    conductor: Conductor, line: ConductorStream
) -> None:
    await conductor.start()
    assert await ask(line, "first") == "first"
    await conductor.stop()
    await conductor.start()
    async with asyncio.timeout(20):
        while conductor.num_streams < 2:
            await asyncio.sleep(0.01)


async def test_a_call_given_up_before_it_was_sent_is_never_sent(conductor: Conductor, line: ConductorStream) -> None:
    assert await ask(line, "given up", deadline_s=0.01) == "ControlDeadlineExceeded"
    await conductor.start()
    assert await ask(line, "next") == "next"
    assert [count for count in conductor.messages if count] == [1]  # the stream's first message has no calls


async def test_an_answer_that_comes_too_late_disturbs_nobody(conductor: Conductor, line: ConductorStream) -> None:
    go_on = asyncio.Event()

    async def slow() -> None:
        await go_on.wait()

    await conductor.start()
    conductor.before = slow
    assert await ask(line, "slow", deadline_s=0.05) == "ControlDeadlineExceeded"
    go_on.set()
    assert await ask(line, "next") == "next"


async def test_the_end_fails_what_is_under_way(conductor: Conductor, line: ConductorStream) -> None:
    waiting = asyncio.create_task(ask(line, "r"))
    await asyncio.sleep(0)
    await line.close()
    assert await waiting == "Unavailable"


async def test_a_line_to_a_conductor_that_is_away_ends_when_told_to_whatever_it_is_at(free_port: int) -> None:
    """A task that waits for a stream in the moment in which it breaks is told that by gRPC, not that it is to end."""
    rng = random.Random(1)

    async def close_at_some_time() -> None:
        line = ConductorStream(f"127.0.0.1:{free_port}")
        asking = asyncio.create_task(line.schedule(request("a"), waits=True, deadline_s=60.0))
        await asyncio.sleep(0.03 * rng.random())
        await line.close()
        with pytest.raises(Unavailable):
            await asking

    async with asyncio.timeout(60):
        for _ in range(40):
            await asyncio.gather(*(close_at_some_time() for _ in range(10)))
