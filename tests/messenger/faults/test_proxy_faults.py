"""Delay, partition, half-open lines, resets, changed bytes: nothing hangs, is lost or is doubled over tcp."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from messenger import PeerLost, TransferDeadlineExceeded, traffic
from tools.soak.proxy import DOWN, UP, FaultProxy, Way

pytestmark = pytest.mark.transports("tcp")

PIECE = 64 << 10
NBYTES = 1 << 20


def whole(line: Any, tag: bytes = b"whole", **options: Any) -> Any:
    """A write of everything, and the notify after it."""
    nbytes = line.a.region.nbytes
    return line.peer.write_notify(line.key, line.a.region, [[0, 0, nbytes]], tag, b"", **options)


def test_a_slow_line_changes_neither_content_nor_order(line: Any) -> None:
    line.proxy.delay(0.001)
    line.proxy.throttle(32 << 20)
    futures = [
        line.peer.write_notify(line.key, line.a.region, [[at, at, PIECE]], b"%d" % at, b"")
        for at in range(0, line.a.region.nbytes, PIECE)
    ]
    for future in futures:
        assert future.result().nbytes == PIECE
    assert np.array_equal(line.b.array, line.a.array)
    assert [int(tag) for _, tag, _ in line.b.notes] == list(range(0, line.a.region.nbytes, PIECE))
    assert line.peer.read(line.key, line.a.region, [[PIECE, 0, PIECE]]).result().nbytes == PIECE
    assert np.array_equal(line.a.array[PIECE : 2 * PIECE], line.b.array[:PIECE])


@pytest.mark.parametrize("ways", [(UP, DOWN), (UP,), (DOWN,)], ids=["both ways", "up", "down"])
def test_a_partition_ends_in_deadlines_that_name_what_happened_and_heals(line: Any, ways: tuple[Way, ...]) -> None:
    line.peer.write(line.key, line.a.region, [[0, 0, 10]]).result()
    line.proxy.hold(*ways)
    operations = {
        "write": whole(line, b"late", deadline_s=0.5),
        "read": line.peer.read(line.key, line.a.region, [[0, 0, PIECE]], deadline_s=0.5),
        "notify": line.peer.notify(b"late too", b"", deadline_s=0.6),
    }
    for verb, future in operations.items():
        with pytest.raises(TransferDeadlineExceeded, match=f"^{verb} of .* not done within 0.[56] s") as caught:
            future.result(30)
        assert (caught.value.peer, caught.value.transport) == ("b", "tcp")
        assert caught.value.address == "{}:{}".format(*line.proxy.address)
        assert caught.value.acknowledged_nbytes <= line.a.region.nbytes
    assert line.a.messenger.validate() == []
    line.proxy.heal()
    line.a.fill(2)
    assert whole(line, b"in time").result().nbytes == line.a.region.nbytes
    assert np.array_equal(line.b.array, line.a.array)
    # Where bytes could pass, what they brought may have been told before the deadline, and never after.
    tags = [tag for _, tag, _ in line.b.notes]
    assert tags[-1] == b"in time"
    assert UP not in ways or tags == [b"in time"]
    assert line.a.lost == []


def test_patient_transfers_wait_for_the_healing_and_hasty_ones_do_not(
    line: Any, wait_until: Callable[..., None]
) -> None:
    futures = {
        at: line.peer.write_notify(
            line.key, line.a.region, [[at, at, PIECE]], b"%d" % at, b"", deadline_s=1.0 if at // PIECE % 2 else 60.0
        )
        for at in range(0, 50 * PIECE, PIECE)
    }
    futures[0].result()
    line.proxy.hold()
    wait_until(lambda: all(futures[at].done() for at in futures if at // PIECE % 2), "the hasty ones have ended", 30)
    line.proxy.heal()
    outcomes = {at: future.exception(60) for at, future in futures.items()}
    failed = {at for at, error in outcomes.items() if error is not None}
    assert all(isinstance(outcomes[at], TransferDeadlineExceeded) for at in failed)
    assert all(at // PIECE % 2 for at in failed)
    told = [int(tag) for _, tag, _ in line.b.notes]
    assert told == sorted(set(told))
    assert set(told) >= set(futures) - failed
    for at in told:
        assert np.array_equal(line.b.array[at : at + PIECE], line.a.array[at : at + PIECE])


def test_nothing_that_was_under_way_lands_after_the_revoke_that_followed_its_deadline(line: Any) -> None:
    line.proxy.throttle(4 << 20, UP)
    with pytest.raises(TransferDeadlineExceeded):
        whole(line, b"late", deadline_s=0.3).result(30)
    line.b.messenger.revoke(line.key)
    line.b.array[:] = 9
    line.proxy.heal()
    line.peer.notify(b"after", b"").result(30)
    assert set(np.unique(line.b.array).tolist()) == {9}
    assert [tag for _, tag, _ in line.b.notes] == [b"after"]


def test_a_half_open_connection_costs_one_deadline_and_is_replaced(line: Any) -> None:
    assert whole(line, b"first").result().nbytes == line.a.region.nbytes
    assert line.proxy.abandon() == 1
    patient = line.peer.notify(b"patient", b"", deadline_s=60.0)
    with pytest.raises(TransferDeadlineExceeded):
        line.peer.write(line.key, line.a.region, [[0, 0, 10]], deadline_s=0.5).result(30)
    patient.result(30)
    line.a.fill(3)
    assert whole(line, b"second").result(30).nbytes == line.a.region.nbytes
    assert np.array_equal(line.b.array, line.a.array)
    assert [tag for _, tag, _ in line.b.notes] == [b"first", b"patient", b"second"]


def test_connections_that_became_half_open_together_cost_one_deadline(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "SILENT_S", 0.2)
    whole(line, b"first").result()
    line.peer.read(line.key, line.a.region, [[0, 0, 10]]).result()
    assert line.proxy.abandon() == 2
    with pytest.raises(TransferDeadlineExceeded):
        line.peer.read(line.key, line.a.region, [[0, 0, 10]], deadline_s=0.5).result(30)
    assert whole(line, b"second", deadline_s=600).result(60).nbytes == line.a.region.nbytes
    assert [tag for _, tag, _ in line.b.notes] == [b"first", b"second"]


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_reset_in_the_middle_of_any_frame_loses_nothing_and_doubles_nothing(line: Any, way: Way) -> None:
    offsets = [0, 1, 11, 12, 13, 40, 70, 100, 200, 1000, 65_535, 100_000, 300_000, 1_000_000]
    rows = [[at, at, 3000] for at in range(0, line.a.region.nbytes - 4096, 4096)]
    for round_number, nbytes in enumerate(offsets):
        line.a.fill(round_number)
        line.proxy.reset_after(nbytes, way)
        futures = [
            line.peer.write_notify(line.key, line.a.region, rows[part::4], b"%d" % (4 * round_number + part), b"")
            for part in range(4)
        ]
        back = line.peer.read(line.key, line.a.region, [[line.a.region.nbytes - 1000, 0, 1000]])
        for future in (*futures, back):
            future.result()
        landed = line.b.array[: len(rows) * 4096].reshape(-1, 4096)
        assert np.array_equal(landed[:, :3000], line.a.array[: len(rows) * 4096].reshape(-1, 4096)[:, :3000])
        assert not landed[:, 3000:].any()
    assert [int(tag) for _, tag, _ in line.b.notes] == list(range(4 * len(offsets)))
    assert line.a.messenger.counters()["connects"] > 4


def test_resets_all_the_time_end_with_every_byte_in_place(line: Any) -> None:
    line.proxy.throttle(8 << 20)
    rows = [[at, at, PIECE] for at in range(0, line.a.region.nbytes, PIECE)]
    futures = [
        line.peer.write_notify(line.key, line.a.region, [row], b"%d" % number, b"") for number, row in enumerate(rows)
    ]
    resets = 0
    for number, future in enumerate(futures):
        if number % 8 == 0:
            resets += line.proxy.reset()
        future.result()
    assert resets > 4
    assert np.array_equal(line.b.array, line.a.array)
    assert [int(tag) for _, tag, _ in line.b.notes] == list(range(len(rows)))


def test_connections_that_are_turned_away_are_tried_again_until_the_deadline(line: Any) -> None:
    line.proxy.refuse()
    with pytest.raises((TransferDeadlineExceeded, PeerLost), match="connect"):
        line.peer.write(line.key, line.a.region, [[0, 0, 10]], deadline_s=0.5).result(30)
    patient = whole(line)
    line.proxy.heal()
    assert patient.result().nbytes == line.a.region.nbytes
    assert np.array_equal(line.b.array, line.a.array)


def test_a_changed_byte_of_the_payload_lands_and_is_found_by_the_digest_above(line: Any) -> None:
    """The messenger moves what the line gives it. KV carries digests from its producer to every reader for this."""
    digest = hashlib.blake2b(line.a.array.tobytes()).digest()
    line.peer.write(line.key, line.a.region, [[0, 0, 10]]).result()
    line.proxy.flip_after(line.a.region.nbytes // 2, UP)
    verdicts: list[bool] = []
    line.b.messenger.on_notify(lambda _n, _t, given: verdicts.append(hashlib.blake2b(line.b.array).digest() == given))
    for _ in range(2):
        rows = [[0, 0, line.a.region.nbytes]]
        line.peer.write_notify(line.key, line.a.region, rows, b"kv", digest).result()
    assert line.proxy.flipped == 1
    assert verdicts == [False, True]


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_changed_byte_of_a_frames_prefix_ends_its_connection_and_the_frame_is_repeated(line: Any, way: Way) -> None:
    assert whole(line, b"first").result().nbytes == line.a.region.nbytes
    line.proxy.flip_after(0, way)
    line.a.fill(4)
    assert whole(line, b"second").result().nbytes == line.a.region.nbytes
    assert line.proxy.flipped == 1
    found = line.b if way == UP else line.a
    assert found.messenger.counters()["malformed_frames"] == 1
    assert np.array_equal(line.b.array, line.a.array)
    assert [tag for _, tag, _ in line.b.notes] == [b"first", b"second"]


def test_a_changed_byte_is_never_delivered_where_links_are_encrypted(make_node: Any, tls_settings: Any) -> None:
    """The record does not verify: its connection ends, and what was not acknowledged is sent again."""
    settings = tls_settings()
    a, b = make_node("a", NBYTES, **settings), make_node("b", NBYTES, **settings)
    a.fill(1)
    with FaultProxy((b.endpoint.tcp_host, b.endpoint.tcp_port)) as proxy:
        host, port = proxy.address
        peer = a.messenger.connect(dataclasses.replace(b.endpoint, tcp_host=host, tcp_port=port))
        key = b.grant()
        for round_number, nbytes in enumerate((5000, NBYTES // 3, NBYTES // 2)):
            proxy.flip_after(nbytes, UP)
            peer.write_notify(key, a.region, [[0, 0, NBYTES]], b"%d" % round_number, b"").result()
            assert np.array_equal(b.array, a.array)
        assert proxy.flipped == 3
        assert [tag for _, tag, _ in b.notes] == [b"0", b"1", b"2"]
        assert a.messenger.counters()["connects"] > 3
        a.messenger.close()
