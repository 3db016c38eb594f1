"""Unauthorised talk on the sockets of a node's messenger, and the replies."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from messenger.frames import (
    MAGIC,
    MAX_BODY_NBYTES,
    PREFIX,
    VERSION,
    ConnectionReject,
    Hello,
    Message,
    Offer,
    Welcome,
    encode,
)
from messenger.sockets import SocketLink

GREETING = Hello("stranger", 9, "elsewhere", 1, b"s" * 16, "tcp")
KIND_OF_HELLO = encode(GREETING)[5]
NOISES = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random": np.random.default_rng(5).bytes(5000),
    "another version": PREFIX.pack(MAGIC, VERSION + 1, KIND_OF_HELLO, 0, 10) + bytes(10),
    "a body over the limit": PREFIX.pack(MAGIC, VERSION, KIND_OF_HELLO, 0, MAX_BODY_NBYTES + 1),
    "a body that is no msgpack": PREFIX.pack(MAGIC, VERSION, KIND_OF_HELLO, 0, 20) + b"\xc1" * 20,
}


@contextlib.contextmanager
def dialled(address: int | str) -> Iterator[socket.socket]:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as raw:
        raw.settimeout(20)
        raw.connect(address if isinstance(address, str) else ("127.0.0.1", address))
        yield raw


def greeted(raw: socket.socket, greeting: Hello) -> SocketLink:
    link = SocketLink(raw, "node")
    link.send(greeting._replace(transport="shm" if raw.family == socket.AF_UNIX else "tcp"))
    assert isinstance(link.receive(), Welcome)
    return link


def answer(link: SocketLink) -> Message:
    """The next message but for offers of memory."""
    while isinstance(message := link.receive(), Offer):
        os.close(link.take_fd())
    return message


def rows(offset: int, nbytes: int) -> bytes:
    return np.array([[offset, nbytes]], dtype=np.int64).tobytes()


def reason_of_rejection(link: SocketLink) -> str:
    """Return what the node sends before it closes the connection."""
    reject = answer(link)
    assert isinstance(reject, ConnectionReject)
    with pytest.raises(OSError):
        link.receive()
    return reject.reason
