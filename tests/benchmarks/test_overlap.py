"""The overlap benchmark's throttled proxy, and the bound to which times are compared."""

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.overlap import OPEN_ADDRESS, PROXIED_ADDRESS, Setup, free_port
from benchmarks.throttle import ThrottledProxy


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that returns what it receives; its port."""
    port = free_port()
    listener = socket.create_server((OPEN_ADDRESS, port))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield port
    listener.close()
    thread.join(60)


@pytest.mark.parametrize("rate", [0.0, 2e6])
def test_the_proxy_forwards_every_byte_at_no_more_than_its_rate(echo: int, rate: float) -> None:
    proxy = ThrottledProxy(PROXIED_ADDRESS, OPEN_ADDRESS, echo)
    proxy.bytes_per_s = rate
    sent = np.random.default_rng(0).bytes(400_000)
    with socket.create_connection((PROXIED_ADDRESS, echo), timeout=60) as client:
        began = time.monotonic()
        sender = threading.Thread(target=client.sendall, args=(sent,))
        sender.start()
        found = bytearray()
        while len(found) < len(sent):
            found += client.recv(1 << 16)
        took_s = time.monotonic() - began
        sender.join()
    proxy.close()
    assert bytes(found) == sent
    if rate:
        assert took_s > 0.95 * len(sent) / rate - 0.005


@pytest.mark.parametrize(("ratio", "expected_s"), [(0.5, 1.0 + 0.05), (1.0, 1.0 + 0.1), (4.0, 4.0 + 0.1)])
def test_the_bound_is_the_longer_time_and_a_layer_of_the_shorter_one(ratio: float, expected_s: float) -> None:
    assert Setup("load", 10, 1.0).bound_s(ratio) == pytest.approx(expected_s)
