"""What the counters promise: nothing is lost, whoever adds and whenever they end, and names stay few."""

import gc
import threading

import pytest

from messenger.counters import LATENCY_EDGES_S, MAX_PEERS, OTHER_PEERS, Counters, Flow


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
        counters.flow(peer="a", transport="rdma", rail="mlx5_0", direction="read"),
        counters.flow(peer="a", transport="rdma", rail="mlx5_1", direction="read"),
        counters.flow(peer="b", transport="shm", direction="served"),
    ]
    for nbytes, flow in enumerate(flows, 1):
        flow.add(nbytes, 1, 0.0)
    assert [(f.key.peer, f.key.rail, f.key.direction, f.nbytes) for f in counters.flows()] == [
        ("a", "mlx5_0", "read", 1),
        ("a", "mlx5_1", "read", 2),
        ("b", "", "served", 3),
    ]
    snapshot = counters.snapshot()
    assert (snapshot["bytes_read_rdma"], snapshot["slices_read_rdma"], snapshot["bytes_served_shm"]) == (3, 2, 3)


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
