"""Crowds are let in a few at a time: connections by Accepting, requests by the Turnstile. Real sockets."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.event_loop import LoopThrottle
from frontend.http.acceptor import HttpAcceptor


class Greeter(asyncio.Protocol):
    """Greets whoever connects."""

    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Greeter.made += 1
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    Greeter.made = 0
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        listening.setblocking(False)
        yield listening


def crowd(listener: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(count)]


async def test_a_crowd_is_taken_over_several_turns_of_the_loop(listener: socket.socket) -> None:
    clients = crowd(listener, 40)
    accepting = HttpAcceptor(listener, Greeter)
    most = 0
    async with asyncio.timeout(10):
        while Greeter.made < 40:
            before = Greeter.made
            await asyncio.sleep(0)
            most = max(most, Greeter.made - before)
    assert most <= 8
    for client in clients:
        with client:
            assert await asyncio.to_thread(client.recv, 16) == b"hello"
    accepting.close()
    await accepting.wait_closed()


async def test_nobody_is_taken_after_the_end(listener: socket.socket) -> None:
    accepting = HttpAcceptor(listener, Greeter)
    accepting.close()
    await accepting.wait_closed()
    (client,) = crowd(listener, 1)
    with client:
        for _ in range(10):
            await asyncio.sleep(0)
    assert Greeter.made == 0


async def test_without_file_descriptors_it_tries_again_later(
    listener: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.http.acceptor._PAUSE_S", 0.01)

    class Exhausted(socket.socket):
        failures = 1

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    with Exhausted(fileno=listener.dup().detach()) as exhausted:
        exhausted.setblocking(False)
        (client,) = crowd(listener, 1)
        accepting = HttpAcceptor(exhausted, Greeter)
        with client:
            assert await asyncio.wait_for(asyncio.to_thread(client.recv, 16), 10) == b"hello"
        accepting.close()
        await accepting.wait_closed()
    assert "too many open files" in caplog.text


async def test_so_many_pass_in_one_turn_and_in_order() -> None:
    throttle, passed, turn = LoopThrottle(per_iteration=3), [], 0

    async def one(number: int) -> None:
        await throttle.take()
        passed.append((number, turn))

    tasks = [asyncio.create_task(one(number)) for number in range(10)]
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    assert [number for number, _ in passed] == list(range(10))
    by_turn = [sum(at == each for _, at in passed) for each in range(turn + 1)]
    assert max(by_turn) == 3


async def test_who_leaves_while_waiting_takes_nobodys_turn() -> None:
    throttle, passed = LoopThrottle(per_iteration=1), []

    async def one(number: int) -> None:
        await throttle.take()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(5)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert passed == [0, 1, 3, 4]
    await asyncio.wait_for(throttle.take(), 10)


async def test_the_end_of_the_last_request_is_told(front: Any, cluster: Any) -> None:
    first, second = (
        asyncio.create_task(front.post("/v1/completions", {"prompt": [20], "max_tokens": 1})) for _ in "ab"
    )
    submits = [await cluster.workers["p0"].submitted() for _ in "ab"]
    cluster.workers["p0"].send(submits[0], 0, [20], finish=2)
    await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert front.rests == []
    cluster.workers["p0"].send(submits[1], 0, [20], finish=2)
    await asyncio.gather(first, second)
    await front.quiet()
    assert len(front.rests) == 1
