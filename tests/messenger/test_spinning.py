"""Spins before a wait: they end when bytes arrive, and become rare on a connection that is seldom used."""

import os
import socket
from collections.abc import Iterator

import pytest
from numba import njit

from messenger.frames import Ack, Offer
from messenger.link import LinkClosed
from messenger.native import socket_io
from messenger.native.socket_io import SocketState, socket_at
from messenger.sockets import SocketLink


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, SocketLink]]:
    other, own = socket.socketpair()
    link = SocketLink(own, "other")
    yield other, link
    link.close()
    other.close()


def state_of(link: SocketLink, monkeypatch: pytest.MonkeyPatch, cores: int) -> SocketState:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    return SocketState(link)


def spin(state: SocketState) -> None:
    compiled_spin(state.address)


@njit
def compiled_spin(address):  # type: ignore[no-untyped-def]
    socket_io.spin(socket_at(address))


def test_vain_spins_become_rare(ends: tuple[socket.socket, SocketLink], monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(ends[1], monkeypatch, cores=4)
    waits = []
    for _ in range(8):
        spin(state)
        waits.append(state.fields.spins_to_skip[0])
        while state.fields.spins_to_skip[0]:
            spin(state)
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64]


def test_a_spin_ends_when_bytes_are_there_and_the_next_wait_spins_again(
    ends: tuple[socket.socket, SocketLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, link = ends
    state = state_of(link, monkeypatch, cores=4)
    spin(state)
    while state.fields.spins_to_skip[0]:
        spin(state)
    state.fields.spin_s[0] = 1e9  # would never end without the bytes
    other.send(b"x")
    spin(state)
    assert (state.fields.vain_spins[0], state.fields.spins_to_skip[0]) == (0, 0)


def test_a_spin_ends_when_the_other_side_is_gone(
    ends: tuple[socket.socket, SocketLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, link = ends
    state = state_of(link, monkeypatch, cores=4)
    state.fields.spin_s[0] = 1e9
    other.shutdown(socket.SHUT_RDWR)
    spin(state)
    assert state.fields.vain_spins[0] == 0


def test_few_cores_never_spin(ends: tuple[socket.socket, SocketLink], monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(ends[1], monkeypatch, cores=3)
    spin(state)
    assert state.fields.vain_spins[0] == 0


def test_a_receiver_that_polls_takes_frames_and_descriptors_in_order(ends: tuple[socket.socket, SocketLink]) -> None:
    other, link = ends
    link.polls = True
    sender = SocketLink(other, "own")
    with open(os.devnull) as file:
        sender.send(Ack(1, 2))
        sender.send(Offer(7, 4096), fd=file.fileno())
        sender.send(Ack(3, 4))
        assert [link.receive(), link.receive(), link.receive()] == [Ack(1, 2), Offer(7, 4096), Ack(3, 4)]
        passed = link.take_fd()
        assert os.path.sameopenfile(passed, file.fileno())
        os.close(passed)
    other.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LinkClosed, match="other closed the connection"):
        link.receive()
