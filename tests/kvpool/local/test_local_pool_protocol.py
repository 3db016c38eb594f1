"""Clients that break the local pool server's protocol are disconnected; node and other clients are unaffected."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from kvpool.local.block_copy import SpecLayout
from kvpool.local.protocol import MAX_BODY_NBYTES, Attach, Attached, PutBlocks, RegisterMemory, TouchBlocks, encode
from messenger import SharedMemory


class Raw:
    """A raw socket to the local pool server."""

    def __init__(self, door: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(door)

    def hello(self) -> "Raw":
        self.sock.sendall(encode(Attach("raw", 1)))
        _, fds, _, _ = socket.recv_fds(self.sock, 4096, 4)
        for fd in fds:
            os.close(fd)
        return self

    def sent_away(self) -> bytes:
        """Return the bytes received until the node closes the connection."""
        data = b""
        try:
            while part := self.sock.recv(4096):
                data += part
        except ConnectionResetError:
            pass
        self.sock.close()
        return data


def frame(kind: int, body: bytes, *, magic: bytes = b"MPDR", version: int = 1, length: int | None = None) -> bytes:
    return struct.pack("<4sBBHI", magic, version, kind, 0, len(body) if length is None else length) + body


BAD: dict[str, Callable[[], bytes]] = {
    "protocol": lambda: b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n",
    "version": lambda: frame(1, msgpack.packb(["a", 1]), version=9),
    "kind": lambda: frame(77, b""),
    "over the limit": lambda: frame(8, b"", length=MAX_BODY_NBYTES + 1),
    "not valid msgpack": lambda: frame(10, b"\xc1\xc1"),
    "number or type": lambda: frame(10, msgpack.packb([1, 2])),
    "Attach was sent already": lambda: encode(Attach("again", 1)),
    "not a request": lambda: encode(Attached("n", 1, 2, 3)),
    "without a descriptor": lambda: encode(RegisterMemory(1, 4096)),
    "not registered": lambda: encode(PutBlocks(bytes(16), b"", 9, b"", b"", b"", b"", b"", 0.0)),
    "a namespace of": lambda: encode(TouchBlocks(b"short", bytes(16))),
}


@pytest.mark.parametrize("reason", BAD)
async def test_a_malformed_frame_ends_its_connection_and_nothing_else(
    start_pool: Any, enter: Any, chain_of: Any, reason: str
) -> None:
    host = await enter((await start_pool()).target)
    chain = chain_of(2)
    await asyncio.to_thread(host.put, chain)

    def misbehave() -> bytes:
        raw = Raw(str(host.pool._connection.path)).hello()
        raw.sock.sendall(BAD[reason]())
        return raw.sent_away()

    assert reason.encode() in await asyncio.to_thread(misbehave)
    assert await asyncio.to_thread(host.get, chain) == 2


async def test_who_does_not_say_hello_first_is_sent_away(start_pool: Any, enter: Any) -> None:
    host = await enter((await start_pool()).target)

    def misbehave() -> bytes:
        raw = Raw(str(host.pool._connection.path))
        raw.sock.sendall(encode(TouchBlocks(bytes(16), b"")))
        return raw.sent_away()

    assert b"expected Attach" in await asyncio.to_thread(misbehave)


async def test_a_descriptor_that_is_no_sealed_memory_is_refused(start_pool: Any, enter: Any, tmp_path: Any) -> None:
    host = await enter((await start_pool()).target)
    (tmp_path / "file").write_bytes(bytes(4096))

    def misbehave(fd: int) -> bytes:
        raw = Raw(str(host.pool._connection.path)).hello()
        socket.send_fds(raw.sock, [encode(RegisterMemory(1, 4096))], [fd])
        return raw.sent_away()

    file = os.open(tmp_path / "file", os.O_RDONLY)
    assert b"not shared memory" in await asyncio.to_thread(misbehave, file)
    os.close(file)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    assert b"sealed against shrinking" in await asyncio.to_thread(misbehave, unsealed)
    os.close(unsealed)


async def test_a_put_whose_parts_do_not_fit_is_refused_and_the_caller_stays(
    start_pool: Any, enter: Any, chain_of: Any
) -> None:
    host = await enter((await start_pool()).target)
    chain, spec_bytes = chain_of(1).tobytes(), SpecLayout(host.spec).proto_bytes

    def misbehave() -> list[bytes]:
        raw = Raw(str(host.pool._connection.path)).hello()
        memory = SharedMemory.create(4096, "raw")
        socket.send_fds(raw.sock, [encode(RegisterMemory(1, 4096))], [memory.fd])
        raw.sock.recv(4096)
        answers = []
        good = PutBlocks(
            host.ns, spec_bytes, 1, chain, bytes(16), np.zeros(2, np.int64).tobytes(), bytes(40), bytes(4), 0.0
        )
        for change in (
            {"parents": b""},
            {"spec": b"\xff\xff"},
            {"digests": bytes(8)},
            {"compute_s": float("nan")},
            {"num_tokens": (99).to_bytes(4, "little")},
            {"offsets": np.array([0, 1 << 40], np.int64).tobytes()},
            {"kv_namespace": b"ns"},
        ):
            raw.sock.sendall(encode(good._replace(**change)))
            answers.append(raw.sock.recv(4096))
        raw.sock.close()
        memory.close()
        return answers

    answers = await asyncio.to_thread(misbehave)
    for answer, reason in zip(
        answers,
        (
            b"expected [16",
            b"not a KvSpec",
            b"expected [16",
            b"compute_s",
            b"partial block of 99 tokens",
            b"beyond",
            b"namespace",
        ),
        strict=True,
    ):
        assert reason in answer, answer


async def test_a_caller_that_hangs_up_in_mid_frame_leaves_nothing_behind(
    start_pool: Any, enter: Any, chain_of: Any, until: Any
) -> None:
    host = await enter((await start_pool()).target)

    def leave() -> None:
        raw = Raw(str(host.pool._connection.path)).hello()
        raw.sock.sendall(encode(TouchBlocks(bytes(16), bytes(1600)))[:40])
        raw.sock.close()

    for _ in range(20):
        await asyncio.to_thread(leave)
    assert await asyncio.to_thread(host.put, chain_of(1))
