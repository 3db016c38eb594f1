"""Malformed and ambiguous HTTP/1.1: requests that a proxy and a server may read differently."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass

from tools.attacks.target import ATTACKER, KEYS, Attack, AttackedCluster

BODY = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"authorization: Bearer " + KEYS[ATTACKER].encode() + b"\r\n"
)
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n"
MAX_ANSWER_NBYTES = 1 << 20


@dataclass(frozen=True)
class RawRequest:
    """Bytes sent over one connection, and the status of each response that must come back before the connection ends.

    Without statuses the frontend closes the connection, because it cannot know where the next request begins, after a
    400 at most.
    """

    name: str
    pieces: tuple[bytes, ...]
    statuses: tuple[int, ...]
    gap_s: float = 0.0  # between two pieces

    def allows(self, statuses: tuple[int, ...]) -> bool:
        """Return True if these are the right responses."""
        return statuses == self.statuses or (not self.statuses and statuses == (400,))

    async def send(self, target: AttackedCluster, *, within_s: float = 20.0, idle_s: float = 0.25) -> tuple[int, ...]:
        """Return the statuses of the responses; (0,) if there is none and the connection stays open `within_s`.

        Reading ends when the connection does, or `idle_s` after a response.
        """
        reader, writer = await asyncio.open_connection(*target.address)
        received = b""
        try:
            with contextlib.suppress(OSError):
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(self.gap_s)
            with contextlib.suppress(OSError):
                while len(received) < MAX_ANSWER_NBYTES:
                    async with asyncio.timeout(idle_s if received else within_s):
                        piece = await reader.read(65536)
                    if not piece:
                        break
                    received += piece
        except TimeoutError:
            if not received:
                return (0,)
        finally:
            writer.transport.abort()
        return tuple(int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received))


def _of(name: str, request: bytes, *statuses: int) -> RawRequest:
    return RawRequest(name, (request,), statuses)


REQUESTS = (
    _of("length and chunks", POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS + SMUGGLED, 400),
    _of("unknown transfer encoding", POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS),
    _of("chunked is not the last encoding", POST + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKS, 400),
    _of("two transfer encodings", POST + CHUNKED + b"transfer-encoding: identity\r\n\r\n" + CHUNKS, 400),
    _of("two lengths", POST + LENGTH + b"content-length: 3\r\n\r\n" + BODY, 400),
    _of("length with a sign", POST + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY, 400),
    _of("negative length", POST + b"content-length: -1\r\n\r\n" + BODY, 400),
    _of("length over 64 bits", POST + b"content-length: 99999999999999999999999\r\n\r\n" + BODY, 400),
    _of("length of 2^63 - 1", POST + b"content-length: 9223372036854775807\r\n\r\n" + BODY, 413),
    _of("chunk size over 64 bits", POST + CHUNKED + b"\r\nfffffffffffffffff\r\nabc"),
    _of("negative chunk size", POST + CHUNKED + b"\r\n-1\r\nabc"),
    _of("chunk extension of 200 kB", POST + CHUNKED + b"\r\n1;" + b"e" * 200_000 + b"\r\n{\r\n0\r\n\r\n"),
    _of(
        "trailers of 200 kB",
        POST
        + CHUNKED
        + b"\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
        + b"".join(b"t%d: %b\r\n" % (at, b"v" * 1000) for at in range(200))
        + b"\r\n",
    ),
    _of("header without a colon", b"GET /live HTTP/1.1\r\nhost x\r\n\r\n", 400),
    _of("folded header", LIVE + b"x: a\r\n b\r\n\r\n", 400),
    _of("space before the colon", b"GET /live HTTP/1.1\r\nhost : x\r\n\r\n", 400),
    _of("bare line feeds", b"GET /live HTTP/1.1\nhost: x\n\n", 400),
    _of("NUL in a header", LIVE + b"x: a\0b\r\n\r\n", 400),
    _of("host [ and no such path", b"GET /nope HTTP/1.1\r\nhost: [\r\n\r\n", 404),
    _of("host [", b"GET /live HTTP/1.1\r\nhost: [\r\n\r\n", 200),
    _of("host [ and no key", b"GET /v1/models/x HTTP/1.1\r\nhost: [\r\n\r\n", 401),
    _of("no host", b"GET /live HTTP/1.1\r\n\r\n", 200),
    _of("CONNECT", b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: elsewhere:443\r\n\r\n", 400),
    _of("absolute form", b"GET http://elsewhere/live HTTP/1.1\r\nhost: elsewhere\r\n\r\n", 200),
    _of(
        "upgrade to websocket",
        POST
        + LENGTH
        + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        + b"sec-websocket-version: 13\r\n\r\n"
        + BODY,
        400,
    ),
    _of(
        "upgrade to h2c",
        POST
        + LENGTH
        + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n"
        + BODY,
        400,
    ),
    _of("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    _of("300 headers", LIVE + b"".join(b"h%d: v\r\n" % at for at in range(300)) + b"\r\n", 431),
    _of("header of 100 kB", LIVE + b"x: " + b"a" * 100_000 + b"\r\n\r\n", 431),
    _of("path of 100 kB", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
    _of("40 requests ahead", (LIVE + b"\r\n") * 40),
    _of("path out of the console", b"GET /console/../../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    _of("encoded path out of the console", b"GET /console/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    _of("invalid percent encoding", b"GET /%ff%fe%zz HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    RawRequest(
        "body after 100 Continue", (POST + LENGTH + b"expect: 100-continue\r\n\r\n", BODY), (100, 200), gap_s=0.3
    ),
    _of("terminal escape in a request id", b"GET /nope HTTP/1.1\r\nhost: x\r\nx-request-id: a\x1b[31mX\r\n\r\n", 400),
    _of("method of 10 kB", b"A" * 10_000 + b" / HTTP/1.1\r\n\r\n", 400),
    _of("body without a length", POST + b"\r\n" + BODY),
    _of("two spaces", b"GET  /live  HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    _of("HTTP/1.0", b"GET /live HTTP/1.0\r\n\r\n", 200),
    _of("TLS to the plain port", b"\x16\x03\x01\x02\x00\x01\x00", 400),
    _of("version 9.9", b"GET / HTTP/9.9\r\n\r\n", 400),
)


async def _run(target: AttackedCluster) -> Counter[str]:
    found = await asyncio.gather(*(request.send(target) for request in REQUESTS))
    return Counter(
        "as expected" if request.allows(statuses) else f"{request.name}: {statuses}"
        for request, statuses in zip(REQUESTS, found, strict=True)
    )


MALFORMED = Attack(
    "malformed HTTP", f"{len(REQUESTS)} malformed or ambiguous requests at once", _run, frozenset({"as expected"})
)
