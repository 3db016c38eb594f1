"""Connections: made again when they break, bounded, and gone without a trace."""

import contextlib
import dataclasses
import gc
import itertools
import socket
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from messenger import TransferDeadlineExceeded, alarms
from messenger.frames import ConnectionReject, encode


def test_a_connection_dropped_while_idle_is_made_again(make_node: Any, wait_until: Callable[..., None]) -> None:
    a, b = make_node("a"), make_node("b")
    a.array[:] = 4
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    for round_number in range(1, 6):
        peer.write(key, a.region, [[0, 100 * round_number, 10]]).result()
        peer.read(key, a.region, [[9000, 5000, 10]]).result()
        b.cut_inbound()
        peer.write(key, a.region, [[0, 100 * round_number + 10, 10]]).result()
    assert int(b.array.sum()) == 5 * 20 * 4
    assert a.lost == b.lost == []
    assert a.messenger.counters()["connects"] >= 6


def test_every_notify_is_delivered_once_and_in_order_however_often_the_connection_breaks(
    make_node: Any, fewer: Callable[[int], int]
) -> None:
    end = 2000 * max(100, fewer(500))
    a, b = make_node("a", 1 << 20), make_node("b", 1 << 20)
    a.array[:] = np.arange(1 << 20) % 251
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    done = threading.Event()

    def vandalise() -> None:
        delivered = cuts = 0
        while not done.wait(0.01) and cuts < 40:
            if len(b.notes) > delivered:  # a connection takes longer to make on some transports than on others
                delivered = len(b.notes)
                b.cut_inbound()
                cuts += 1

    vandal = threading.Thread(target=vandalise)
    vandal.start()
    try:
        futures = [peer.write_notify(key, a.region, [[i, i, 2000]], b"%d" % i, b"") for i in range(0, end, 2000)]
        for future in futures:
            future.result()
    finally:
        done.set()
        vandal.join()
    assert [int(tag) for _, tag, _ in b.notes] == list(range(0, end, 2000))
    assert np.array_equal(b.array[:end], a.array[:end])
    assert a.messenger.counters()["connects"] > 1


def test_connections_beyond_the_limit_are_turned_away_and_served_when_there_is_room(
    make_node: Any, patience: float
) -> None:
    owner = make_node("a", max_inbound_connections=1)
    first, second = make_node("b"), make_node("c")
    # Only a connection that has presented a key keeps its place.
    writing = first.messenger.connect(owner.endpoint)
    writing.write_notify(owner.grant(), first.region, [[0, 0, 10]], b"first", b"").result()
    peer = second.messenger.connect(owner.endpoint)
    with pytest.raises(TransferDeadlineExceeded, match="no connection is free"):
        peer.notify(b"too many", b"", deadline_s=0.3 * patience).result()
    first.messenger.connect(owner.endpoint).notify(b"again", b"").result()
    first.messenger.close()
    peer.notify(b"second", b"").result()
    assert [tag for _, tag, _ in owner.notes] == [b"first", b"again", b"second"]


def test_many_rounds_leave_no_thread_and_no_descriptor_behind(make_node: Any) -> None:
    def one_round(incarnation: int) -> None:
        a, b = make_node(f"a{incarnation}", 4096, incarnation), make_node(f"b{incarnation}", 4096, incarnation)
        peer, key = a.messenger.connect(b.endpoint), b.grant()
        peer.write_notify(key, a.region, [[0, 0, 4096]], b"t", b"").result()
        peer.read(key, a.region, [[0, 0, 4096]]).result()
        a.messenger.close()
        b.messenger.close()

    for incarnation in range(1, 5):
        one_round(incarnation)


def traced_nbytes() -> int:
    gc.collect()
    # The clock forgets an alarm that is no longer needed when it would have rung.
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, alarms.__file__)])
    return sum(trace.size for trace in snapshot.traces)


def test_operations_leave_no_memory_behind(make_node: Any, fewer: Callable[[int], int]) -> None:
    rounds = fewer(40)
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    b.messenger.on_notify(lambda *_: b.notes.clear())

    def work() -> None:
        for _ in range(rounds):
            key = b.messenger.grant(b.region, 0, 4096, read=True, write=True)
            futures: list[Any] = [peer.write(key, a.region, [[n, n, 7]]) for n in range(0, 80, 8)]
            futures += [peer.read(key, a.region, [[0, 0, 4096]]), peer.notify(b"t", bytes(1000))]
            for future in futures:
                future.result()
            b.messenger.revoke(key)

    tracemalloc.start()
    try:
        held_nbytes = []
        for _ in range(4):  # the first time, what is bounded grows to its bound
            work()
            held_nbytes.append(traced_nbytes())
    finally:
        tracemalloc.stop()
    # A single object kept per operation would be so many of them, every time.
    grown = [after - before for before, after in itertools.pairwise(held_nbytes)]
    assert min(grown) < 12 * rounds * 48, grown


@pytest.mark.transports("tcp", "shm")
def test_a_caller_turned_away_before_it_could_greet_is_told_why(make_node: Any, transport: str, tmp_path: Path) -> None:
    a = make_node("a")
    path = str(tmp_path / "full.sock")
    listener = socket.create_server(("127.0.0.1", 0)) if transport == "tcp" else socket.socket(socket.AF_UNIX)
    if transport == "shm":
        listener.bind(path)
        listener.listen()
    port = listener.getsockname()[1] if transport == "tcp" else 0

    def turn_away() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(encode(ConnectionReject("full", "there is no room")))
                connection.close()

    thread = threading.Thread(target=turn_away)
    thread.start()
    try:
        endpoint = dataclasses.replace(a.endpoint, node_id="full", tcp_port=port, shm_socket=path)
        for _ in range(5):
            with pytest.raises(TransferDeadlineExceeded, match="there is no room"):
                a.messenger.connect(endpoint).notify(b"t", b"", deadline_s=0.2).result()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
