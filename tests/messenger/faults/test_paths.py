"""Two paths between two nodes, of which one dies, slows down or flaps: the rest goes by the other, each byte once.

By proxies, which hold bytes back and deliver them late, and by two wires between two hosts.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from messenger import Peer, RemoteKey
from messenger.path_policy import STALL_S
from messenger.paths import PeerPaths
from tools.soak.namespaces import TwoHosts
from tools.soak.proxy import UP, FaultProxy

pytestmark = pytest.mark.transports("tcp")

NBYTES = 24 << 20
PIECE = 64 << 10


@dataclass
class TwoPaths:
    """From node `a` to node `b` by two proxies; `key` opens b's whole region."""

    a: Any
    b: Any
    proxies: list[FaultProxy]
    peer: Peer
    key: RemoteKey

    def counter(self, name: str) -> int:
        return int(self.a.messenger.counters().get(name, 0))

    def carried(self, direction: str) -> dict[str, int]:
        return {
            flow.key.rail: flow.nbytes
            for flow in self.a.messenger.flows()
            if flow.key.rail and flow.key.direction == direction
        }

    def write(self, tag: bytes = b"t", **options: Any) -> Any:
        nbytes = self.a.region.nbytes
        return self.peer.write_notify(self.key, self.a.region, [[0, 0, nbytes]], tag, b"", **options)

    def read(self) -> Any:
        return self.peer.read(self.key, self.a.region, [[0, 0, self.a.region.nbytes]])


@pytest.fixture
def paths(make_node: Any) -> Iterator[TwoPaths]:
    a, b = make_node("a", NBYTES), make_node("b", NBYTES)
    a.fill(1)
    target = (b.endpoint.tcp_host, b.endpoint.tcp_port)
    with FaultProxy(target) as first, FaultProxy(target) as second:
        (host, port), other = first.address, second.address
        endpoint = dataclasses.replace(b.endpoint, tcp_host=host, tcp_port=port, tcp_paths=(f"{other[0]}:{other[1]}",))
        paths = TwoPaths(a, b, [first, second], a.messenger.connect(endpoint), b.grant())
        yield paths
        a.messenger.close()
        paths.__dict__.clear()


def test_large_transfers_go_by_both_paths(paths: TwoPaths) -> None:
    paths.write().result()
    assert np.array_equal(paths.a.array, paths.b.array)
    paths.b.fill(2)
    paths.read().result()
    assert np.array_equal(paths.a.array, paths.b.array)
    for direction in ("written", "read"):
        carried = paths.carried(direction)
        assert sum(carried.values()) == NBYTES
        assert min(carried["path0"], carried["path1"]) >= NBYTES // 8
    assert paths.counter("path_failovers") == 0
    assert paths.a.messenger.counters()["paths_down_open"] == 0


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("reads", [False, True], ids=["write", "read"])
def test_what_a_dead_path_carried_goes_by_the_other_and_the_path_returns(
    paths: TwoPaths, wait_until: Callable[..., None], dead: int, reads: bool
) -> None:
    paths.write(b"0").result()
    paths.read().result()
    paths.b.fill(3)
    for proxy in paths.proxies:
        proxy.throttle(100 << 20)
    if not reads:
        paths.a.fill(2)
    future = paths.read() if reads else paths.write(b"1")
    time.sleep(0.1)
    assert not future.done()
    paths.proxies[dead].hold()
    future.result()
    assert np.array_equal(paths.a.array, paths.b.array)
    assert paths.counter("path_failovers") >= 1
    paths.proxies[dead].heal()
    wait_until(lambda: paths.a.messenger.counters()["paths_down_open"] == 0, "it is used again", 20)
    before = paths.carried("written")[f"path{dead}"]
    paths.a.fill(4)
    paths.write(b"2").result()
    assert np.array_equal(paths.a.array, paths.b.array)
    assert paths.carried("written")[f"path{dead}"] > before
    assert [tag for _, tag, _ in paths.b.notes] == [b"0", *([] if reads else [b"1"]), b"2"]
    assert paths.b.lost == paths.a.lost == []


@pytest.mark.parametrize("dead", [0, 1])
def test_late_bytes_of_a_path_that_was_left_never_land(paths: TwoPaths, dead: int) -> None:
    """Between the end of the operation and these bytes, the owner has given the memory to something else."""
    paths.write(b"0").result()
    paths.proxies[dead].throttle(20 << 20, UP)
    paths.a.fill(2)
    future = paths.write(b"1")
    time.sleep(0.1)
    paths.proxies[dead].hold()
    future.result()
    assert paths.counter("path_failovers") >= 1
    paths.b.array[:] = 9
    paths.proxies[dead].heal()
    time.sleep(0.3)
    assert set(np.unique(paths.b.array).tolist()) == {9}
    paths.b.messenger.revoke(paths.key)
    assert [tag for _, tag, _ in paths.b.notes] == [b"0", b"1"]


def test_small_writes_and_notifications_survive_the_death_of_their_path_in_order(paths: TwoPaths) -> None:
    paths.write(b"warm").result()
    paths.b.notes.clear()
    futures: list[Any] = []
    for number in range(200):
        rows = [[number * PIECE, number * PIECE, PIECE]]
        futures.append(paths.peer.write_notify(paths.key, paths.a.region, rows, b"%d" % number, b""))
        if number == 100:
            paths.proxies[0].hold()
    for future in futures:
        future.result()
    assert [int(tag) for _, tag, _ in paths.b.notes] == list(range(200))
    assert np.array_equal(paths.a.array[: 200 * PIECE], paths.b.array[: 200 * PIECE])
    assert paths.counter("path_failovers") == 1


def test_a_path_that_slows_tenfold_is_left(paths: TwoPaths) -> None:
    paths.write(b"0").result()
    for proxy in paths.proxies:
        proxy.throttle(40 << 20, UP)
    paths.a.fill(2)
    future = paths.write(b"1")
    time.sleep(0.3)
    paths.proxies[1].throttle(4 << 20, UP)
    future.result()
    assert np.array_equal(paths.a.array, paths.b.array)


def test_flapping_paths_lose_nothing_and_double_nothing(paths: TwoPaths) -> None:
    paths.write(b"warm").result()
    paths.b.notes.clear()
    stop = threading.Event()

    def flap() -> None:
        held_s = 0.4, 0.4, 0.15, 0.15  # longer and shorter than a dead path takes to be noticed
        for number in range(1000):
            proxy = paths.proxies[number % 2]
            proxy.hold()
            if stop.wait(held_s[number % 4]):
                break
            proxy.heal()
            if stop.wait(0.1):
                break
        for proxy in paths.proxies:
            proxy.heal()

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        for number in range(4):
            paths.a.fill(10 + number)
            paths.write(b"%d" % number).result()
            assert np.array_equal(paths.a.array, paths.b.array)
            paths.b.fill(50 + number)
            paths.read().result()
            assert np.array_equal(paths.a.array, paths.b.array)
    finally:
        stop.set()
        flapping.join()
    assert [int(tag) for _, tag, _ in paths.b.notes] == list(range(4))
    assert paths.counter("path_failovers") >= 1


def test_a_dead_path_at_the_first_connection_costs_little(paths: TwoPaths) -> None:
    paths.proxies[0].hold()
    began_s = time.monotonic()
    paths.write(b"0").result()
    assert time.monotonic() - began_s < 4
    assert np.array_equal(paths.a.array, paths.b.array)
    assert paths.a.messenger.counters()["paths_down_open"] == 1


def test_a_process_that_stands_still_is_not_a_failed_path(make_node: Any, make_child: Any) -> None:
    a, b = make_node("a", NBYTES), make_child("b", NBYTES)
    target = (b.endpoint.tcp_host, b.endpoint.tcp_port)
    with FaultProxy(target) as first, FaultProxy(target) as second:
        (host, port), other = first.address, second.address
        endpoint = dataclasses.replace(b.endpoint, tcp_host=host, tcp_port=port, tcp_paths=(f"{other[0]}:{other[1]}",))
        peer = a.messenger.connect(endpoint)
        peer.write(b.key, a.region, [[0, 0, NBYTES]]).result()
        b.stop()
        future = peer.write(b.key, a.region, [[0, 0, NBYTES]])
        time.sleep(5 * STALL_S)
        assert not future.done()
        b.go_on()
        future.result()
        assert a.messenger.counters().get("path_failovers", 0) == 0
        a.messenger.close()


@dataclass
class TwoWires:
    """From node `a` on host 0 to node `b` on host 1, by two wires; `left_s` are the times at which paths were left."""

    hosts: TwoHosts
    paths: TwoPaths
    left_s: list[float]


@pytest.fixture
def wires(namespaces: None, make_node: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoWires]:
    left_s: list[float] = []
    leave = PeerPaths._leave_locked

    def leave_and_note(self: PeerPaths, path: int, reason: str) -> None:
        left_s.append(time.monotonic())
        leave(self, path, reason)

    monkeypatch.setattr(PeerPaths, "_leave_locked", leave_and_note)
    with TwoHosts(wires=2) as hosts:
        with hosts.inside(1):
            b = make_node("b", NBYTES, data_host=hosts.address(1, 0), data_paths=(hosts.address(1, 1),))
        with hosts.inside(0):
            a = make_node("a", NBYTES, data_host=hosts.address(0, 0), data_paths=(hosts.address(0, 1),))
            a.fill(1)
            wires = TwoWires(hosts, TwoPaths(a, b, [], a.messenger.connect(b.endpoint), b.grant()), left_s)
            yield wires
            hosts.heal()
            a.messenger.close()
            b.messenger.close()
            wires.paths.__dict__.clear()
            wires.__dict__.clear()


def _unplug(hosts: TwoHosts, wire: int) -> None:
    hosts.unplug(1, wire)


def _drop(hosts: TwoHosts, wire: int) -> None:
    hosts.firewall(1, "-A", "INPUT", "-d", hosts.address(1, wire), "-j", "DROP")


def _slow(hosts: TwoHosts, wire: int) -> None:
    hosts.limit(0, wire, 5_000_000)


@pytest.mark.parametrize(
    ("harm", "wire"), [(_unplug, 0), (_drop, 0), (_drop, 1), (_slow, 1)], ids=["unplugged", "dropped", "other", "slow"]
)
def test_a_wire_that_fails_in_the_middle_of_a_transfer(
    wires: TwoWires, wait_until: Callable[..., None], harm: Callable[[TwoHosts, int], None], wire: int
) -> None:
    paths, hosts = wires.paths, wires.hosts
    for each in range(2):
        hosts.limit(0, each, 50_000_000)
    paths.write(b"0").result()
    paths.a.fill(2)
    future = paths.write(b"1")
    time.sleep(0.15)
    assert not future.done()
    harm(hosts, wire)
    future.result()
    assert np.array_equal(paths.a.array, paths.b.array)
    assert wires.left_s
    assert [tag for _, tag, _ in paths.b.notes] == [b"0", b"1"]
    hosts.heal()
    wait_until(lambda: paths.a.messenger.counters()["paths_down_open"] == 0, "it is used again", 20)
    paths.a.fill(3)
    paths.write(b"2").result()
    assert np.array_equal(paths.a.array, paths.b.array)
    assert [tag for _, tag, _ in paths.b.notes] == [b"0", b"1", b"2"]
