"""Partition, one-way loss, resets by a firewall and an unplugged wire between two hosts, while 50 transfers run."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from messenger import PeerUnreachable, TransferDeadlineExceeded, TransferError

pytestmark = pytest.mark.transports("tcp")

TRANSFERS = 50
PIECE = 64 << 10
AT_ONCE = ("-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")


def start(wire: Any, first: int = 0, **options: Any) -> list[Any]:
    """Fifty transfers with their notifies, each of a place of its own."""
    region, key = wire.a.region, wire.b.key
    return [
        wire.peer.write_notify(key, region, [[n * PIECE, n * PIECE, PIECE]], b"%d" % (first + n), b"", **options)
        for n in range(TRANSFERS)
    ]


def check_named(wire: Any, error: TransferError) -> None:
    assert (error.peer, error.transport) == ("b", "tcp")
    assert error.address == f"{wire.hosts.addresses[1]}:{wire.b.endpoint.tcp_port}"
    assert error.acknowledged_nbytes in (0, PIECE)
    assert all(word in str(error) for word in ("'b'", error.address, "acknowledged"))


def check_heals(wire: Any) -> None:
    """Everything once more, over the same peer: it lands, and nothing else was told since."""
    wire.a.fill(2)
    told = wire.b.ask("notes")
    nbytes = wire.a.region.nbytes
    rows = [[0, 0, nbytes]]
    assert wire.peer.write_notify(wire.b.key, wire.a.region, rows, b"healed", b"").result().nbytes == nbytes
    assert wire.b.ask("digest") == hashlib.blake2b(wire.a.array).hexdigest()
    assert wire.b.ask("notes") == [*told, "healed"]
    wire.a.array[:] = 0
    assert wire.peer.read(wire.b.key, wire.a.region, rows).result().nbytes == nbytes
    assert wire.b.ask("digest") == hashlib.blake2b(wire.a.array).hexdigest()
    assert wire.a.messenger.validate() == []


@pytest.mark.parametrize("chains", [("INPUT", "OUTPUT"), ("INPUT",), ("OUTPUT",)], ids=["both ways", "to", "from"])
def test_a_partition_ends_in_named_deadlines_and_traffic_flows_once_it_heals(
    wire: Any, chains: tuple[str, ...]
) -> None:
    wire.peer.write(wire.b.key, wire.a.region, [[0, 0, 10]]).result()
    for chain in chains:
        wire.hosts.firewall(1, "-A", chain, "-j", "DROP")
    hasty = start(wire, deadline_s=1.0)
    patient = wire.peer.write(wire.b.key, wire.a.region, [[0, 0, wire.a.region.nbytes]], deadline_s=60.0)
    for future in hasty:
        with pytest.raises(TransferDeadlineExceeded) as caught:
            future.result(30)
        check_named(wire, caught.value)
    wire.hosts.heal()
    assert patient.result().nbytes == wire.a.region.nbytes
    check_heals(wire)
    assert wire.a.lost == []


def test_resets_while_transfers_run_lose_and_double_none(wire: Any) -> None:
    every_20th = ("-m", "statistic", "--mode", "nth", "--every", "20", "--packet", "19")
    wire.hosts.firewall(1, "-A", "INPUT", "-p", "tcp", "!", "--syn", *every_20th, *AT_ONCE[2:])
    for first in range(0, 4 * TRANSFERS, TRANSFERS):
        for future in start(wire, first):
            assert future.result().nbytes == PIECE
    assert wire.b.ask("notes") == [str(number) for number in range(4 * TRANSFERS)]
    assert wire.a.messenger.counters()["connects"] > 4
    assert wire.a.messenger.counters()["retries"] > 0
    wire.hosts.heal()
    check_heals(wire)


def test_a_host_that_resets_everything_is_unreachable_at_once_and_used_again_once_it_does_not(
    wire: Any, wait_until: Callable[..., None]
) -> None:
    wire.peer.write(wire.b.key, wire.a.region, [[0, 0, 10]]).result()
    wire.hosts.firewall(1, "-A", "INPUT", *AT_ONCE)
    for future in start(wire):
        with pytest.raises(PeerUnreachable, match="nothing listens there") as caught:
            future.result(30)
        check_named(wire, caught.value)
    wait_until(lambda: wire.a.lost == [("b", 1)], "the loss is reported")
    wire.hosts.heal()
    check_heals(wire)


def test_an_unplugged_host_ends_in_deadlines_and_is_used_again_once_it_is_back(wire: Any) -> None:
    wire.peer.write(wire.b.key, wire.a.region, [[0, 0, 10]]).result()
    wire.hosts.unplug(1)
    for future in start(wire, deadline_s=1.0):
        with pytest.raises(TransferError) as caught:
            future.result(30)
        check_named(wire, caught.value)
    wire.hosts.heal()
    check_heals(wire)
