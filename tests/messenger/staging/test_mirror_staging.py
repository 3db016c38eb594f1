"""Staging through a mirror, on a device that executes everything late and in adversarial order."""

from __future__ import annotations

import logging
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.staging import READY, DirectStaging, HostStaging, MirrorStaging, Ranges, StagingError
from tests.messenger.staging.device import Device

NUM_SLOTS, NUM_LAYERS, LAYER = 6, 3, 8
SLOT = NUM_LAYERS * LAYER
NBYTES = NUM_SLOTS * SLOT


class Rig:
    """Slots on a device and in its mirror. The engine's calls are made on a thread that must not wait."""

    def __init__(self, seed: int = 0, *, forgets_waits: bool = False) -> None:
        self.device = Device(NBYTES, seed, forgets_waits=forgets_waits)
        self.mirror = np.zeros(NBYTES, np.uint8)
        self.staging = MirrorStaging(self.device, self.mirror)

    @staticmethod
    def ranges(slots: list[int], layer: int | None = None) -> list[Ranges]:
        base = np.array(slots, np.int64) * SLOT
        return [Ranges.same(base, SLOT)] if layer is None else [Ranges.same(base + layer * LAYER, LAYER)]

    def write(self, memory: np.ndarray, slots: list[int], layer: int, value: int) -> None:
        for slot in slots:
            memory[slot * SLOT + layer * LAYER :][:LAYER] = value

    def read(self, memory: np.ndarray, slot: int, layer: int) -> list[int]:
        return memory[slot * SLOT + layer * LAYER :][:LAYER].tolist()


def round_trips(rig: Rig, rng: random.Random) -> list[str]:
    """Send slots out and take slots in, a few times, as a worker does; return what arrived wrong.

    Prefill: load some slots, compute the others layer by layer reading the loaded ones, push each layer as it is
    written. Between requests slots are reused as soon as `all_ended` permits.
    """
    device, staging, wrong = rig.device, rig.staging, list[str]()
    seen: list[tuple[str, list[int], int]] = []
    for turn in range(1, 5):
        slots = rng.sample(range(NUM_SLOTS), NUM_SLOTS)
        loaded, computed = slots[:3], slots[3:]
        tickets, sent = [], []
        for layer in range(NUM_LAYERS):  # bytes arrive in the mirror, layer by layer
            rig.write(rig.mirror, loaded, layer, 10 * turn + layer)
            tickets.append(staging.to_device(rig.ranges(loaded, layer)))
            device.poke(rng.randrange(4))
        device.engine_thread = threading.get_ident()
        for layer in range(NUM_LAYERS):
            tickets[layer].order_compute()
            for slot in loaded:
                device.compute.launch(
                    lambda slot=slot, layer=layer: seen.append(("loaded", rig.read(device.memory, slot, layer), layer))
                )
            device.compute.launch(
                lambda layer=layer, turn=turn, computed=computed: rig.write(
                    device.memory, computed, layer, 100 + 10 * turn + layer
                )
            )
            sent.append(staging.to_host(rig.ranges(computed, layer)))
            device.poke(rng.randrange(4))
        device.engine_thread = 0
        for layer in rng.sample(range(NUM_LAYERS), NUM_LAYERS):  # senders
            sent[layer].wait()
            wrong += [
                f"slot {slot}, layer {layer} was sent as {found}"
                for slot in computed
                if (found := rig.read(rig.mirror, slot, layer)) != [100 + 10 * turn + layer] * LAYER
            ]
        staging.all_ended().wait()
        wrong += [f"loaded layer {n} was read as {found}" for _, found, n in seen if found != [10 * turn + n] * LAYER]
        if len(seen) != 3 * NUM_LAYERS:
            wrong.append("slots were given back before their computation had ended")
        seen.clear()
    return wrong


@given(st.integers(0, 2**32))
def test_bytes_arrive_whatever_the_order_in_which_streams_are_executed(seed: int) -> None:
    rig = Rig(seed)
    assert round_trips(rig, random.Random(seed)) == []
    rig.staging.close()
    assert not rig.device.pinned


def test_the_stand_in_shows_missing_waits() -> None:
    assert all(round_trips(Rig(seed, forgets_waits=True), random.Random(seed)) for seed in range(20))


def test_no_call_of_the_engine_waits_or_polls() -> None:
    rig = Rig()
    rig.device.engine_thread = threading.get_ident()
    out = rig.staging.to_host(rig.ranges([0, 1], 0))
    into = rig.staging.to_device(rig.ranges([2]))
    into.order_compute()
    ended = rig.staging.all_ended()
    assert not {"synchronize", "query"} & set(rig.device.calls)
    assert not any(ticket.is_done for ticket in (out, into, ended))
    with pytest.raises(StagingError, match="the engine's thread waits"):
        out.wait()
    rig.device.engine_thread = 0
    ended.wait()
    assert out.is_done
    assert into.is_done
    assert ended.is_done


def test_a_copy_to_the_host_waits_for_a_copy_to_the_device_of_the_same_slots() -> None:
    for seed in range(20):
        rig = Rig(seed)
        rig.write(rig.mirror, [1], 0, 7)
        rig.staging.to_device(rig.ranges([1], 0))
        rig.staging.to_host(rig.ranges([1], 0)).wait()
        assert rig.read(rig.mirror, 1, 0) == [7] * LAYER


def test_many_slots_are_copied_in_one_call_with_few_copies() -> None:
    rig = Rig()
    rig.staging.to_host(rig.ranges([0, 1, 2, 3, 4, 5]))
    rig.staging.to_host(rig.ranges([0, 1, 2, 3, 4, 5], 1))
    rig.staging.to_device(rig.ranges([5, 1, 3]))
    rig.staging.to_device(rig.ranges([0, 1, 3, 4]))
    assert [[copy.rows for copy in copies] for copies in rig.device.copied] == [[1], [6], [3], [1, 1]]


def test_nothing_to_copy_is_ready_and_no_call() -> None:
    rig = Rig()
    assert rig.staging.to_device(rig.ranges([])) is READY
    assert rig.staging.to_host([]) is READY
    assert rig.device.copied == []


@pytest.mark.parametrize("when", ["refuses_copies", "loses_copies"])
def test_an_error_of_a_copy_is_raised_by_its_ticket_and_not_by_the_call(when: str) -> None:
    rig = Rig()
    setattr(rig.device, when, True)
    rig.device.engine_thread = threading.get_ident()
    out, into = rig.staging.to_host(rig.ranges([0])), rig.staging.to_device(rig.ranges([1]))
    rig.device.engine_thread = 0
    for ticket in (out, into):
        with pytest.raises(StagingError, match=r"refused the copy|illegal address"):
            ticket.wait()
        assert ticket.is_done
    if when == "refuses_copies":
        with pytest.raises(StagingError):
            into.order_compute()
        rig.device.refuses_copies = False
        rig.staging.to_host(rig.ranges([0])).wait()
        rig.staging.all_ended().wait()
    else:
        with pytest.raises(StagingError, match="illegal address"):
            rig.staging.all_ended().wait()


def test_a_refused_copy_is_reported_after_the_copies_before_it_have_ended() -> None:
    rig = Rig()
    rig.device.memory[:] = 5
    rig.device.refuses_after = 1
    ticket = rig.staging.to_host(rig.ranges([0, 2, 5]))
    assert not ticket.is_done
    with pytest.raises(StagingError, match="refused the copy"):
        ticket.wait()
    assert not list(rig.device.pending())
    assert [rig.read(rig.mirror, slot, 0)[0] for slot in (0, 2, 5)] == [5, 5, 0]


def test_a_failed_device_does_not_keep_staging_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.device.loses_copies = True
    rig.staging.to_host(rig.ranges([0]))
    rig.staging.close()
    assert "copies failed before the end of staging" in caplog.text
    assert not rig.device.pinned


def test_a_mirror_that_cannot_be_locked_is_used_and_named(caplog: pytest.LogCaptureFixture) -> None:
    device, mirror = Device(NBYTES), np.zeros(NBYTES, np.uint8)
    device.can_pin = False
    with caplog.at_level(logging.WARNING):
        staging = MirrorStaging(device, mirror)
    assert "not page-locked, so copies block the engine: no memory may be locked" in caplog.text
    device.memory[:] = 3
    staging.to_host(Rig.ranges([2])).wait()
    assert mirror[2 * SLOT] == 3
    staging.close()


def test_registered_device_memory_is_sent_once_it_is_computed() -> None:
    device = Device(NBYTES)
    staging, seen = DirectStaging(device), list[int]()
    device.compute.launch(lambda: seen.append(1))
    ticket = staging.to_host(Rig.ranges([0], 0))
    assert (ticket.is_done, seen) == (False, [])
    ticket.wait()
    assert seen == [1]
    assert staging.to_device(Rig.ranges([0])) is READY
    assert device.copied == []


def test_an_engine_in_host_memory_has_nothing_to_wait_for() -> None:
    staging = HostStaging()
    assert not staging.is_needed
    assert staging.to_host([]) is staging.to_device([]) is staging.all_ended() is READY
    READY.wait()
    READY.order_compute()
    assert READY.is_done
