"""Descriptors that travel with a frame arrive with it, whatever is received before it."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from messenger.frames import Notify, Offer
from messenger.sockets import SocketLink


@pytest.fixture
def links() -> Iterator[tuple[SocketLink, SocketLink]]:
    ours, theirs = socket.socketpair()
    sender, receiver = SocketLink(ours, "receiver"), SocketLink(theirs, "sender")
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.mark.parametrize("payload_nbytes", [10, 1 << 10, 40 << 10, 2 << 20])
def test_a_descriptor_comes_with_its_frame_after_one_of(
    payload_nbytes: int, links: tuple[SocketLink, SocketLink]
) -> None:
    sender, receiver = links
    reading, writing = os.pipe()
    note, offer = Notify(1, b"tag", bytes(payload_nbytes)), Offer(3, 4096)

    def send() -> None:
        sender.send(note)
        sender.send(offer, fd=reading)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        found = receiver.receive()
        sending.join()
        assert (found, receiver.receive()) == (note, offer)
        os.write(writing, b"same pipe")
        taken = receiver.take_fd()
        assert os.read(taken, 100) == b"same pipe"
        os.close(taken)
    finally:
        receiver.cut()
        sending.join()
        os.close(reading)
        os.close(writing)
