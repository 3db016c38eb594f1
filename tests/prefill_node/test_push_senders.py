"""Pushes towards several destinations: in order towards each, and none waits for another destination."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec
from messenger import Endpoint, Messenger, MessengerConfig, Peer
from prefill_node.push import PushDestination, Pusher, push_written
from prefill_node.senders import NUM_SENDERS, PushSenders
from settings.keys import assemble
from worker.kv_notification import KvNotification
from worker.paced.memory import PacedMemory

BLOCK, NUM_LAYERS, NUM_BLOCKS = 8, 6, 5
SPEC = KvSpec((KvGroup("full", 0, tuple(range(NUM_LAYERS)), kv_heads=2, head_dim=16, dtype="float32"),), BLOCK)


@pytest.fixture
def senders() -> Iterator[PushSenders]:
    made = PushSenders()
    yield made
    made.close()


def test_a_destination_that_is_stuck_does_not_delay_others(senders: PushSenders) -> None:
    go_on, sent = threading.Event(), threading.Event()
    for _ in range(NUM_SENDERS):  # more jobs than there are threads
        senders.submit("stuck", go_on.wait, 60)
    senders.submit("other", sent.set)
    try:
        assert sent.wait(30)
    finally:
        go_on.set()


def test_jobs_of_a_destination_run_in_order_and_never_concurrently(senders: PushSenders) -> None:
    rng, lock = random.Random(1), threading.Lock()
    running: set[int] = set()
    ran: dict[int, list[int]] = {key: [] for key in range(7)}
    at_once: list[int] = []

    def job(key: int, number: int, seconds: float) -> None:
        with lock:
            at_once.append(len(running))
            assert key not in running
            running.add(key)
        time.sleep(seconds)
        with lock:
            running.remove(key)
            ran[key].append(number)

    for number in range(300):
        senders.submit(number % 7, job, number % 7, number, rng.choice((0.0, 0.0, 0.001)))
    senders.close()
    assert ran == {key: list(range(key, 300, 7)) for key in range(7)}
    assert max(at_once) >= 1, "several destinations are served at a time"


def test_destinations_take_turns() -> None:
    senders, order = PushSenders(1), list[str]()
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait(60)

    senders.submit("a", first)
    assert begun.wait(30)
    for _ in range(3):
        senders.submit("a", order.append, "a")
    senders.submit("a", ended.set)
    for name in ("b", "c"):
        for _ in range(2):
            senders.submit(name, order.append, name)
    go_on.set()
    assert ended.wait(30)
    senders.close()
    assert order == ["b", "c", "a", "b", "c", "a", "a"]


def test_a_job_that_fails_does_not_end_the_others_of_its_destination(senders: PushSenders) -> None:
    sent = threading.Event()
    senders.submit("a", int, "no number")
    senders.submit("a", sent.set)
    assert sent.wait(30)


def test_after_the_end_jobs_are_refused_and_earlier_ones_have_run() -> None:
    senders, ran = PushSenders(1), list[int]()
    for number in range(50):
        senders.submit(number % 3, ran.append, number)
    senders.close()
    assert sorted(ran) == list(range(50))
    with pytest.raises(RuntimeError):
        senders.submit("new", ran.append, 0)


class Destination:
    """A messenger with memory that receives pushes, and the layers whose notifications arrived, in order."""

    def __init__(self, name: str, folder: Path) -> None:
        self.messenger = Messenger(
            assemble(MessengerConfig, transport="tcp", shm_dir=folder), node_id=name, incarnation=1
        )
        self.layers: list[int] = []
        self.messenger.on_notify(lambda _, tag, payload: self.layers.append(KvNotification.unpack(payload).layer))
        self.endpoint: Endpoint = self.messenger.start()
        self.memory = PacedMemory(SPEC, NUM_BLOCKS, self.messenger)
        self.slots = list(range(NUM_BLOCKS))

    def pushed_to(self, peer: Any) -> PushDestination:
        offsets = [self.memory.offsets(0, self.slots)]
        return PushDestination(peer, 1, self.memory.grant_write(self.slots), offsets, 0)

    def close(self) -> None:
        self.memory.close()
        self.messenger.close()


class StuckPeer:
    """A peer that takes the first layer, and on the second one blocks its caller until `go_on`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._calls = 0
        self.is_stuck, self.go_on = threading.Event(), threading.Event()

    def write_notify(self, *arguments: Any, **options: Any) -> Future[Any]:
        self._calls += 1
        if self._calls > 1:
            self.is_stuck.set()
            assert self.go_on.wait(60)
        return self._peer.write_notify(*arguments, **options)


@pytest.fixture
def new_destination(tmp_path: Path) -> Iterator[Callable[[str], Destination]]:
    made: list[Destination] = []

    def new(name: str) -> Destination:
        (tmp_path / name).mkdir(mode=0o700)
        made.append(Destination(name, tmp_path / name))
        return made[-1]

    yield new
    for each in made:
        each.close()


async def test_a_push_completes_while_another_peer_is_stopped_in_the_middle_of_one(
    new_destination: Callable[[str], Destination], senders: PushSenders
) -> None:
    source, slow, other = (new_destination(name) for name in ("source", "slow", "other"))
    stuck = StuckPeer(source.messenger.connect(slow.endpoint))
    source.memory._array[:] = np.random.default_rng(0).integers(0, 256, source.memory._array.shape, np.uint8)

    def pusher(destination: PushDestination) -> Pusher:
        return Pusher(
            source.memory,
            senders,
            destination,
            slots=source.slots,
            prompt_len=NUM_BLOCKS * BLOCK - 3,
            deadline_s=lambda: 30.0,
            stall_s=30.0,
            on_moved=lambda nbytes, seconds: None,
        )

    to_slow = pusher(slow.pushed_to(stuck))
    to_other = pusher(other.pushed_to(source.messenger.connect(other.endpoint)))
    try:
        for layer in range(NUM_LAYERS):
            push_written(source.memory, layer, [*to_slow.due(0, 2 * BLOCK), *to_slow.due(2 * BLOCK, 37)])
        assert await asyncio.to_thread(stuck.is_stuck.wait, 30)
        for layer in range(NUM_LAYERS):
            push_written(source.memory, layer, to_other.due(0, 37))
        async with asyncio.timeout(30):
            await to_other.flush()
        assert other.layers == list(range(NUM_LAYERS))
        assert len(slow.layers) <= 1
    finally:
        stuck.go_on.set()
    async with asyncio.timeout(30):
        await to_slow.flush()
    assert slow.layers == [layer for layer in range(NUM_LAYERS) for _ in range(2)]
    assert (slow.memory._array == source.memory._array).all()
    assert (other.memory._array == source.memory._array).all()
