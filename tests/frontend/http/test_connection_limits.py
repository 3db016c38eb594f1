"""Clients that try to fill the frontend: each is refused or sent away, others are served meanwhile and afterwards."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from frontend.http import connections
from moonpool_proto.v1 import worker_pb2

WAIT_S = 60
GIB = 1 << 30
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(front: Any) -> Streams:
    url = urlsplit(front.url)
    return await asyncio.open_connection(url.hostname, url.port)


@asynccontextmanager
async def connected(front: Any) -> AsyncIterator[Streams]:
    reader, writer = await connect(front)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def send_until_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes) -> bytes:
    """The first line of the answer, or nothing if the connection is closed; sent are at most a GiB."""
    answer = asyncio.create_task(reader.readline())
    try:
        async with asyncio.timeout(WAIT_S):
            for _ in range(GIB // len(piece)):
                if answer.done():
                    break
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            assert answer.done(), "a GiB was taken"
    except ConnectionError:
        pass
    try:
        return await asyncio.wait_for(answer, WAIT_S)
    except ConnectionError:
        return b""


@pytest.fixture
def serves(cluster: Any) -> Callable[[Any], Any]:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))

    async def ask(front: Any) -> None:
        status, answer = await front.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 200, answer

    return ask


async def held(front: Any) -> int:
    """Bytes of bodies."""
    return int(json.loads((await front.get("/validate"))[1])["counts"]["body_bytes"])


async def at_rest(front: Any, until: Any) -> None:
    """Nothing is held, and no connection left but the one that asks."""
    await front.quiet()
    await until(lambda: front.get("/metrics"), lambda answer: value(answer[1], "moonpool:http_connections ") == 1)


def value(text: str, start: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(start))


async def turned_away(front: Any, reason: str) -> float:
    return value((await front.get("/metrics"))[1], f'moonpool:http_turned_away_total{{reason="{reason}"}}')


async def test_a_body_of_a_gib_is_refused_by_its_announcement(front: Any, serves: Any, until: Any) -> None:
    async with connected(front) as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % GIB)
        assert b" 413 " in await asyncio.wait_for(reader.readline(), WAIT_S)
        await serves(front)
    await at_rest(front, until)


async def test_a_body_of_a_gib_in_chunks_is_refused_as_soon_as_it_is_over(
    start_front: Any, serves: Any, until: Any
) -> None:
    async with start_front(max_body_nbytes=1 << 20) as front:
        async with connected(front) as (reader, writer):
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            piece = b"%x\r\n%b\r\n" % (1 << 16, bytes(1 << 16))
            assert b" 413 " in await send_until_answered(reader, writer, piece)
            await serves(front)
        await at_rest(front, until)


async def test_bodies_together_take_no_more_memory_than_there_is_for_them(
    start_front: Any, serves: Any, until: Any
) -> None:
    async with start_front(max_body_nbytes=1 << 20, max_bodies_nbytes=2 << 20) as front:
        async with connected(front) as (_, one), connected(front) as (_, other):
            for writer in (one, other):  # each lacks its last byte
                writer.write(HEAD + b"content-length: %d\r\n\r\n" % (1 << 20) + b" " * ((1 << 20) - 1))
                await writer.drain()
            await until(lambda: held(front), lambda nbytes: nbytes == (2 << 20) - 2)
            async with connected(front) as (reader, third):
                third.write(HEAD + b"content-length: 9\r\n\r\n" + b" " * 9)
                answer = await asyncio.wait_for(reader.readuntil(b"}}"), WAIT_S)
                assert b" 503 " in answer
                assert b'"code":"bodies"' in answer
                assert b"retry-after: 1" in answer
        await until(lambda: held(front), lambda nbytes: nbytes == 0)
        await serves(front)
        await at_rest(front, until)


async def test_who_goes_on_sending_a_refused_body_is_sent_away(start_front: Any, serves: Any, until: Any) -> None:
    async with start_front(max_body_nbytes=1 << 20, header_timeout_s=0.2) as front:
        async with connected(front) as (_, writer):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % (GIB * 1024))

            async def go_on() -> None:
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
                    await asyncio.sleep(0.001)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(go_on(), WAIT_S)
        assert await turned_away(front, "header_timeout") >= 1
        await serves(front)
        await at_rest(front, until)


async def test_the_rest_of_a_refused_body_is_read_at_a_bounded_pace(
    start_front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_DROPPED_NBYTES_PER_S", 1 << 20)
    num_sent = 0
    async with start_front(max_body_nbytes=1 << 20, header_timeout_s=2.0) as front, connected(front) as (_, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % (GIB * 1024))
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
                    num_sent += 1 << 16
    assert num_sent < 64 << 20  # 2 MiB, and what the sockets hold; at full speed a GiB


async def test_who_sent_its_small_body_after_the_refusal_keeps_its_connection(start_front: Any, serves: Any) -> None:
    async with start_front() as front, connected(front) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
        assert b" 404 " in await asyncio.wait_for(reader.readline(), WAIT_S)
        writer.write(b"bodyGET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        seen = await asyncio.wait_for(reader.readuntil(b'"ok"}'), WAIT_S)
        assert b"HTTP/1.1 200 OK" in seen


async def test_heads_sent_byte_by_byte_end_after_the_bound(start_front: Any, serves: Any, until: Any) -> None:
    async with start_front(header_timeout_s=0.4) as front:
        clients = [await connect(front) for _ in range(100)]

        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while not reader.at_eof():
                writer.write(b"a")
                await asyncio.sleep(0.02)

        for _, writer in clients[:90]:  # ten say nothing at all
            writer.write(b"GET /live HTTP/1.1\r\nx: ")
        dripping = [asyncio.create_task(drip(*client)) for client in clients[:90]]
        await serves(front)
        ends = [asyncio.wait_for(reader.read(), WAIT_S) for reader, _ in clients]
        assert not b"".join(
            end for end in await asyncio.gather(*ends, return_exceptions=True) if isinstance(end, bytes)
        )
        assert await turned_away(front, "header_timeout") >= 100
        for task in dripping:
            task.cancel()
        for _, writer in clients:
            writer.transport.abort()
        await serves(front)
        await at_rest(front, until)


@pytest.mark.parametrize(
    ("start", "piece", "reason"),
    [
        (b"GET /live HTTP/1.1\r\nx: ", b"a" * 4096, "header_size"),
        (b"GET /live HTTP/1.1\r\n", b"a: b\r\n" * 1000, "header_size"),
        (b"GET /", b"a" * 4096, "header_size"),
        (b"", b"\r\n" * 1000, "header_size"),
        (b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"-", "header_count"),
        (b"GET /" + b"a" * (100 << 10) + b" HTTP/1.1\r\n\r\n", b"-", "header_size"),
    ],
    ids=["endless-header", "endless-headers", "endless-request-line", "empty-lines", "many-headers", "long-line"],
)
async def test_a_head_over_its_bound_is_refused(
    front: Any, serves: Any, until: Any, start: bytes, piece: bytes, reason: str
) -> None:
    async with connected(front) as (reader, writer):
        writer.write(start)
        assert b" 431 " in await send_until_answered(reader, writer, piece)
        assert b"the request" in await asyncio.wait_for(reader.read(), WAIT_S)
        assert await turned_away(front, reason) == 1
        await serves(front)
    await at_rest(front, until)


async def test_endless_trailers_end_the_connection(front: Any, serves: Any, until: Any) -> None:
    async with connected(front) as (reader, writer):
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        await send_until_answered(reader, writer, b"a: b\r\n" * 1000)
        assert await turned_away(front, "header_size") == 1
        await serves(front)
    await at_rest(front, until)


async def test_too_many_requests_ahead_end_the_connection(front: Any, serves: Any, until: Any) -> None:
    async with connected(front) as (reader, writer):
        writer.write(b"GET /live HTTP/1.1\r\n\r\n" * 5000)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readuntil(b"never"), WAIT_S)
        assert await turned_away(front, "pipelined") == 1
        await serves(front)
    await at_rest(front, until)


async def test_a_full_house_sends_idle_connections_away_and_keeps_requests(start_front: Any, cluster: Any) -> None:
    async with start_front(max_connections=20, header_timeout_s=600.0) as front:
        asked = asyncio.create_task(front.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        submit = await cluster.workers["p0"].submitted()
        clients = [await connect(front) for _ in range(60)]
        status, _ = await front.get("/live")
        assert status == 200
        assert await turned_away(front, "no_room") >= 40
        cluster.workers["p0"].send(submit, 0, [20], finish=2)
        status, answer = await asked
        assert status == 200, answer
        for _, writer in clients:
            writer.transport.abort()
        await front.quiet()


@pytest.mark.parametrize(
    ("sent", "problem"),
    [(b"\x16\x03\x01\x02\x00\x01\x00", b"uses plain HTTP"), (b"hello\r\n\r\n", b"malformed HTTP/1.1")],
)
async def test_what_is_no_http_is_told_so(front: Any, serves: Any, sent: bytes, problem: bytes) -> None:
    async with connected(front) as (reader, writer):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert problem in answer
        await serves(front)
