"""Guarantees of the counters: no count is lost, whichever threads add and end, and the names stay few."""

import gc
import threading
from typing import Any

import pytest

from messenger.backlog import Backlog, QueueKind, StreamRole
from messenger.counters import LATENCY_EDGES_S, MAX_PEERS, OTHER_PEERS, Counters, Flow
from messenger.operation import Kind, Notification, Operation, Part
from messenger.priority import Priority


@pytest.fixture
def counters() -> Counters:
    return Counters()


def flow_of(counters: Counters, peer: str = "p0") -> Flow:
    return counters.flow(peer=peer, transport="tcp", direction="written")


def test_flows_of_one_way_are_added_up_whether_open_or_ended(counters: Counters) -> None:
    first, second = flow_of(counters), flow_of(counters)
    first.add(100, 2, 0.001)
    second.add(11, 1, 0.002)
    del first
    gc.collect()
    (totals,) = counters.flows()
    assert (totals.nbytes, totals.slices, totals.operations) == (111, 3, 2)
    assert totals.seconds == pytest.approx(0.003)
    second.add(1, 1, 0.001)
    assert counters.snapshot()["bytes_written_tcp"] == 112


def test_ways_are_told_apart(counters: Counters) -> None:
    flows = [
        counters.flow(peer="a", transport="rdma", direction="read"),
        counters.flow(peer="a", transport="tcp", direction="read"),
        counters.flow(peer="b", transport="shm", direction="served"),
    ]
    for nbytes, flow in enumerate(flows, 1):
        flow.add(nbytes, 1, 0.0)
    assert [(f.key.peer, f.key.transport, f.key.direction, f.nbytes) for f in counters.flows()] == [
        ("a", "rdma", "read", 1),
        ("a", "tcp", "read", 2),
        ("b", "shm", "served", 3),
    ]
    snapshot = counters.snapshot()
    assert (snapshot["bytes_read_rdma"], snapshot["slices_read_tcp"], snapshot["bytes_served_shm"]) == (1, 1, 3)


def test_rails_tell_how_bytes_were_spread_and_add_nothing(counters: Counters) -> None:
    counters_of = [
        counters.flow(peer="a", transport="rdma", direction="written"),
        counters.flow(peer="", transport="rdma", rail="mlx5_0/1", direction="written"),
        counters.flow(peer="", transport="rdma", rail="mlx5_1/1", direction="written"),
    ]
    for flow, nbytes in zip(counters_of, (10, 7, 3), strict=True):
        flow.add(nbytes, 1, 0.001)
    assert {f.key.rail: f.nbytes for f in counters.flows()} == {"": 10, "mlx5_0/1": 7, "mlx5_1/1": 3}
    assert counters.snapshot()["bytes_written_rdma"] == 10


def test_latencies_fall_into_the_bucket_whose_edge_bounds_them(counters: Counters) -> None:
    flow = flow_of(counters)
    for edge_s in LATENCY_EDGES_S:
        flow.add(1, 1, edge_s * 0.99)
    flow.add(1, 1, 1e6)
    (totals,) = counters.flows()
    assert totals.latencies == (1,) * (len(LATENCY_EDGES_S) + 1)
    assert totals.quantile_s(0.5) == LATENCY_EDGES_S[11]
    assert totals.quantile_s(1.0) == float("inf")


def test_spent_peers_are_added_up_as_others_and_nothing_is_lost(counters: Counters) -> None:
    kept = flow_of(counters, "kept")
    for number in range(3 * MAX_PEERS):
        flow_of(counters, f"peer-{number}").add(1, 1, 0.001)
    kept.add(7, 1, 0.001)
    gc.collect()
    totals = {totals.key.peer: totals.nbytes for totals in counters.flows()}
    assert len(totals) <= MAX_PEERS + 1
    assert totals["kept"] == 7
    assert totals[OTHER_PEERS] >= MAX_PEERS
    assert sum(totals.values()) == 3 * MAX_PEERS + 7


def test_a_peer_too_many_counts_as_another_while_all_are_open(counters: Counters) -> None:
    flows = [flow_of(counters, f"peer-{number}") for number in range(MAX_PEERS + 5)]
    for flow in flows:
        flow.add(1, 1, 0.001)
    totals = {totals.key.peer: totals.nbytes for totals in counters.flows()}
    assert len(totals) == MAX_PEERS + 1
    assert totals[OTHER_PEERS] == 5


def test_events_of_threads_are_all_counted_while_they_run_and_after(counters: Counters) -> None:
    counted, over = threading.Barrier(5), threading.Event()

    def count() -> None:
        for _ in range(5_000):
            counters.add("retries")
        counters.add("connects", 2)
        counted.wait(60)
        over.wait(60)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    counted.wait(60)
    assert counters.snapshot() == {"retries": 20_000, "connects": 8}
    over.set()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {"retries": 20_000, "connects": 8}


def test_counting_takes_no_lock(counters: Counters) -> None:
    flow = flow_of(counters)
    counters.add("retries")
    with counters._lock:
        adding = threading.Thread(target=lambda: flow.add(1, 1, 0.001))
        adding.start()
        adding.join(60)
        assert not adding.is_alive()
        counters.add("retries")
    assert counters.snapshot()["retries"] == 2
    assert counters.flows()[0].operations == 1


def test_both_sides_tell_who_moved_what_which_way(make_node: Any, transport: str, wait_until: Any) -> None:
    a, b = make_node("a"), make_node("b")
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    for _ in range(3):
        peer.write_notify(key, a.region, [[0, 0, 100], [500, 700, 11]], b"t", b"").result()
    peer.read(key, a.region, [[0, 0, 50]]).result()
    told = {(flow.key.peer, flow.key.direction): flow for flow in a.messenger.flows() if not flow.key.rail}
    written, read = told[b.endpoint.node_id, "written"], told[b.endpoint.node_id, "read"]
    assert (written.nbytes, written.slices, written.operations) == (333, 6, 3)
    assert (read.nbytes, read.slices, read.operations) == (50, 1, 1)
    assert 0 < written.seconds < 60
    assert {flow.key.transport for flow in told.values()} == {transport}
    here = {flow.key.direction: flow.key.peer for flow in b.messenger.flows()}
    assert here["landed"] == here["served"] == "a"
    wait_until(lambda: b.messenger.counters()[f"bytes_landed_{transport}"] == 333, "what landed is counted")
    reported = a.messenger.reported()
    assert reported[f"flow/{b.endpoint.node_id}/{transport}/written_bytes"] == 333
    assert reported["queued_urgent_open"] == reported["queued_background_open"] == 0


def test_what_has_not_begun_is_counted_by_priority() -> None:
    backlog = Backlog()
    for number, priority in enumerate((Priority.BACKGROUND, Priority.URGENT, Priority.BACKGROUND)):
        operation = Operation(number, Kind.NOTIFY, priority, 0, 1, 0.0, 60.0, None)
        backlog.push(list(QueueKind)[number], Part(operation, None, Notification(b"", b"")))
    assert backlog.depths() == [1, 0, 2]
    assert backlog.take(StreamRole(ordered=True, spread=True, reads=True), background=True) is not None
    assert backlog.depths() == [0, 0, 2]
