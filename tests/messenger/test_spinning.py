"""Spins before a wait: they end when bytes arrive, and become rare on a connection that is seldom used."""

import os
import socket
from collections.abc import Iterator

import pytest

from messenger.native.socket_io import NativeReceiver
from messenger.sockets import SocketLink


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, SocketLink]]:
    other, own = socket.socketpair()
    link = SocketLink(own, "other")
    yield other, link
    link.close()
    other.close()


def receiver_of(link: SocketLink, monkeypatch: pytest.MonkeyPatch, cores: int) -> NativeReceiver:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    return NativeReceiver(link)


def test_vain_spins_become_rare(ends: tuple[socket.socket, SocketLink], monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = receiver_of(ends[1], monkeypatch, cores=2)
    fields = receiver._socket.fields
    waits = []
    for _ in range(8):
        receiver.spin()
        waits.append(fields.spins_to_skip[0])
        while fields.spins_to_skip[0]:
            receiver.spin()
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64]


def test_a_spin_ends_when_bytes_are_there_and_the_next_wait_spins_again(
    ends: tuple[socket.socket, SocketLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, link = ends
    receiver = receiver_of(link, monkeypatch, cores=2)
    fields = receiver._socket.fields
    receiver.spin()
    while fields.spins_to_skip[0]:
        receiver.spin()
    fields.spin_s[0] = 1e9  # would never end without the bytes
    other.send(b"x")
    receiver.spin()
    assert (fields.vain_spins[0], fields.spins_to_skip[0]) == (0, 0)
    other.shutdown(socket.SHUT_RDWR)
    receiver.spin()
    assert fields.vain_spins[0] == 0


def test_a_single_core_never_spins(ends: tuple[socket.socket, SocketLink], monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = receiver_of(ends[1], monkeypatch, cores=1)
    receiver.spin()
    assert receiver._socket.fields.vain_spins[0] == 0
