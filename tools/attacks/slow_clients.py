"""Clients that are slow on purpose: heads sent byte by byte, bodies without their last byte, answers never read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from tools.attacks.target import ATTACKER, KEYS, Attack, AttackedCluster

POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"authorization: Bearer " + KEYS[ATTACKER].encode() + b"\r\n"
)
_HOLD_S = 3.0
_HEADS, _READERS, _PIPELINES, _BODIES = 500, 2, 32, 64
_BODY_NBYTES = 16 << 20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connections(target: AttackedCluster, count: int, *, receive_nbytes: int = 0) -> AsyncIterator[list[Streams]]:
    """Open connections to the frontend, which are reset in the end."""
    opened: list[Streams] = []
    try:
        for _ in range(count):
            raw = socket.socket()
            if receive_nbytes:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, target.address)
            opened.append(await asyncio.open_connection(sock=raw, limit=1024))
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def _send(opened: Sequence[Streams], data: bytes) -> Counter[str]:
    """Send the same bytes over all connections; they may stop reading or close."""

    async def one(writer: asyncio.StreamWriter) -> str:
        try:
            async with asyncio.timeout(_HOLD_S):
                writer.write(data)
                await writer.drain()
        except TimeoutError:
            return "stalled"
        except OSError:
            return "closed"
        return "sent"

    return Counter(await asyncio.gather(*(one(writer) for _, writer in opened)))


async def _slow_heads(target: AttackedCluster) -> Counter[str]:
    async with connections(target, _HEADS) as opened:
        found = await _send(opened, b"GET /live HTTP/1.1\r\nx: ")
        for _ in range(int(_HOLD_S * 2)):
            await _send(opened, b"a")
            await asyncio.sleep(0.5)
    return found


async def _unread(target: AttackedCluster) -> Counter[str]:
    body = json.dumps({"prompt": "hi", "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
    request = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with (
        connections(target, _READERS, receive_nbytes=2048) as streams,
        connections(target, _PIPELINES, receive_nbytes=2048) as pages,
    ):
        found = await _send(streams, request)
        found += await _send(pages, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 16)
        await asyncio.sleep(_HOLD_S)
    return found


async def _bodies(target: AttackedCluster) -> Counter[str]:
    data = POST + b"content-length: %d\r\n\r\n" % _BODY_NBYTES + b" " * (_BODY_NBYTES - 1)
    async with connections(target, _BODIES) as opened:
        found = await _send(opened, data)
        await asyncio.sleep(_HOLD_S)
    return found


_SEEN = frozenset({"sent", "stalled", "closed"})
SLOW_HEADS = Attack("slow heads", f"{_HEADS} connections that send a head byte by byte", _slow_heads, _SEEN)
UNREAD = Attack(
    "unread answers",
    f"{_READERS} streams of 1,000 tokens and {_PIPELINES} connections of 16 pages each, never read",
    _unread,
    _SEEN,
)
BODIES = Attack("unfinished bodies", f"{_BODIES} bodies of 16 MiB without their last byte", _bodies, _SEEN)
ATTACKS = (SLOW_HEADS, UNREAD, BODIES)
