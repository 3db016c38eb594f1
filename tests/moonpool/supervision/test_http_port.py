"""Asking a frontend for a sign of life: whatever answers at its port, the answer is yes or no."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moonpool.cluster_view.collector import _validate_frontend
from moonpool.supervision.http_port import is_alive


@asynccontextmanager
async def talker(said: bytes) -> AsyncIterator[str]:
    """The URL of a server that says the same to everybody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_what_speaks_no_http_is_not_alive() -> None:
    async with talker(b"SSH-2.0-OpenSSH\r\n") as url:
        assert not await is_alive(url, 10.0)
    async with talker(b"HTTP/1.0 200 OK\r\n\r\n") as url:
        assert await is_alive(url, 10.0)


async def test_a_frontend_that_breaks_off_is_a_problem_of_its_own() -> None:
    for said in (
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.0 200 OK\r\n\r\n\xff",
    ):
        async with talker(said) as url:
            answer = await _validate_frontend("frontend", url, "")
        assert not answer.ok
        assert answer.problems[0].startswith("no answer")
