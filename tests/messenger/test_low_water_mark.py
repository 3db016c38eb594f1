"""How much of a payload is slept through, and that a payload's end never waits for bytes that are not of it."""

import socket
from typing import Any

import numpy as np
import pytest

from messenger.frames import Ack, Hello, Welcome, Write
from messenger.link import LOW_WATER_MIN_NBYTES, low_water_mark
from messenger.sockets import SocketLink

pytestmark = pytest.mark.transports("tcp")

KIB, MIB = 1 << 10, 1 << 20


def test_small_payloads_are_taken_as_they_come() -> None:
    assert low_water_mark(LOW_WATER_MIN_NBYTES - 1, 64 * MIB) == 0


@pytest.mark.parametrize(("nbytes", "mark"), [(512 * KIB, 256 * KIB), (MIB, 512 * KIB), (8 * MIB, MIB)])
def test_half_a_payload_is_slept_through_and_never_more_than_a_mebibyte(nbytes: int, mark: int) -> None:
    assert low_water_mark(nbytes, 64 * MIB) == mark


def test_a_small_receive_buffer_is_never_slept_full() -> None:
    assert low_water_mark(8 * MIB, 128 * KIB) == 32 * KIB


@pytest.mark.parametrize("nbytes", [512 * KIB, 512 * KIB + 1, MIB - 1, 3 * MIB + 17])
def test_a_large_payload_is_over_when_its_last_byte_is_there(make_node: Any, nbytes: int) -> None:
    """Nothing comes behind it that could wake whoever sleeps."""
    a, b = make_node("a", 4 * MIB), make_node("b", 4 * MIB)
    a.fill(1)
    peer, key, sent = a.messenger.connect(b.endpoint), b.grant(), a.array[:nbytes].copy()
    third = nbytes // 3
    peer.write(key, a.region, [(0, 5, third), (third, third + 9, nbytes - third)]).result()
    assert np.array_equal(b.array[5 : 5 + third], sent[:third])
    assert np.array_equal(b.array[third + 9 : nbytes + 9], sent[third:])
    a.array[:] = 0
    peer.read(key, a.region, [(third, third + 9, nbytes - third), (0, 5, third)]).result()
    assert np.array_equal(a.array[:nbytes], sent)


@pytest.mark.parametrize("drop_nbytes", [100, 99_999])
def test_a_large_payload_may_come_in_drops(make_node: Any, drop_nbytes: int) -> None:
    owner = make_node("b", 2 * MIB)
    key, payload = owner.grant(), bytes(range(256)) * (4 * KIB)
    with socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port)) as sock:
        caller = SocketLink(sock, "owner")
        caller.set_timeout(60)
        caller.send(Hello("raw", 9, "b", 1, bytes(16), "tcp"))
        assert isinstance(caller.receive(), Welcome)
        for seq in (1, 2):
            rows = np.array([(seq, len(payload))], np.int64).tobytes()
            caller.send(Write(seq, seq, key.region_id, key.token, 0, len(payload), rows, False, b"", b""))
            for start in range(0, len(payload), drop_nbytes):
                sock.sendall(payload[start : start + drop_nbytes])
            assert caller.receive() == Ack(seq, len(payload))
            assert owner.array[seq : seq + len(payload)].tobytes() == payload
