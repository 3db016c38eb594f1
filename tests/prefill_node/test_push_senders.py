"""Pushes towards several destinations: in order towards each, and none waits for another destination."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec
from messenger import Endpoint, Messenger, MessengerConfig, Peer
from messenger.staging import READY
from prefill_node.push import DuePush, PushDestination, PushedPrompt, Pusher, WrittenLayers
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
        self.told: list[tuple[range, list[int]]] = []  # layers and blocks of each notification
        self.messenger.on_notify(self._take)
        self.endpoint: Endpoint = self.messenger.start()
        self.memory = PacedMemory(SPEC, NUM_BLOCKS, self.messenger)
        self.slots = list(range(NUM_BLOCKS))

    def _take(self, _: str, tag: bytes, payload: bytes) -> None:
        notification = KvNotification.unpack(payload)
        self.told.append((notification.layers, notification.pushed().blocks.tolist()))

    @property
    def layers(self) -> list[int]:
        """The layers that have arrived, in order."""
        return [layer for layers, _ in self.told for layer in layers]

    def pushed_to(self, peer: Any, push_from: int = 0, *, takes_layer_ranges: bool = False) -> PushDestination:
        offsets = [self.memory.offsets(0, self.slots)]
        key = self.memory.grant_write(self.slots)
        return PushDestination(peer, 1, key, offsets, push_from, takes_layer_ranges=takes_layer_ranges)

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


def pusher_of(source: Destination, senders: PushSenders, destination: PushDestination | None) -> Pusher:
    """Return a pusher of random KV in the source's memory."""
    source.memory._array[:] = np.random.default_rng(0).integers(0, 256, source.memory._array.shape, np.uint8)
    return Pusher(
        source.memory,
        senders,
        destination,
        prompt=PushedPrompt(source.slots, NUM_BLOCKS * BLOCK - 3),
        deadline_s=lambda: 30.0,
        stall_s=30.0,
        on_moved=lambda nbytes, seconds: None,
    )


@pytest.mark.parametrize("takes_layer_ranges", [False, True])
async def test_what_is_written_before_the_destination_is_known_is_pushed_to_it(
    new_destination: Callable[[str], Destination], senders: PushSenders, takes_layer_ranges: bool
) -> None:
    source, target = new_destination("source"), new_destination("target")
    pusher = pusher_of(source, senders, None)
    pusher.push_layers([0, 1, 2], range(NUM_BLOCKS), READY)
    peer = source.messenger.connect(target.endpoint)
    pusher.open(target.pushed_to(peer, 2, takes_layer_ranges=takes_layer_ranges))
    pusher.push_layers([3, 4, 5], range(NUM_BLOCKS), READY)
    async with asyncio.timeout(30):
        await pusher.flush()
    assert target.layers == list(range(NUM_LAYERS))
    assert len(target.told) == (2 if takes_layer_ranges else NUM_LAYERS)
    assert all(blocks == [2, 3, 4] for _, blocks in target.told), "the destination has the blocks below"
    size = SPEC.slot_nbytes(0)
    assert (target.memory._array[2 * size :] == source.memory._array[2 * size :]).all()
    assert not target.memory._array[: 2 * size].any()


async def test_requested_blocks_are_pushed_although_the_destination_should_have_them(
    new_destination: Callable[[str], Destination], senders: PushSenders
) -> None:
    source, target = new_destination("source"), new_destination("target")
    destination = target.pushed_to(source.messenger.connect(target.endpoint), 2, takes_layer_ranges=True)
    pusher = pusher_of(source, senders, destination)
    pusher.push_blocks([1, 3])
    async with asyncio.timeout(30):
        await pusher.flush()
    assert target.told == [(range(NUM_LAYERS), [1, 3])]


async def test_a_large_push_is_divided_into_ranges_of_layers(
    new_destination: Callable[[str], Destination], senders: PushSenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_destination("source"), new_destination("target")
    monkeypatch.setattr("prefill_node.push._TOGETHER_NBYTES", 2 * NUM_BLOCKS * SPEC.layer_nbytes(0))
    destination = target.pushed_to(source.messenger.connect(target.endpoint), takes_layer_ranges=True)
    pusher = pusher_of(source, senders, destination)
    pusher.push_layers([0, 1, 2, 4, 5], range(NUM_BLOCKS), READY)
    async with asyncio.timeout(30):
        await pusher.flush()
    assert [layers for layers, _ in target.told] == [range(2), range(2, 3), range(4, 6)]


@pytest.mark.parametrize("end", [Pusher.stop, Pusher.settle])
async def test_pushes_without_a_destination_are_dropped_when_they_must_end(
    new_destination: Callable[[str], Destination], senders: PushSenders, end: Callable[[Pusher], Any]
) -> None:
    source, target = new_destination("source"), new_destination("target")
    pusher = pusher_of(source, senders, None)
    for _ in range(2):
        pusher.push_layers([0, 1], range(NUM_BLOCKS), READY)
    async with asyncio.timeout(30):
        await end(pusher)
    pusher.open(target.pushed_to(source.messenger.connect(target.endpoint), takes_layer_ranges=True))
    async with asyncio.timeout(30):
        await pusher.flush()
    assert target.told == []


async def test_a_push_completes_while_another_peer_is_stopped_in_the_middle_of_one(
    new_destination: Callable[[str], Destination], senders: PushSenders
) -> None:
    source, slow, other = (new_destination(name) for name in ("source", "slow", "other"))
    stuck = StuckPeer(source.messenger.connect(slow.endpoint))
    to_slow = pusher_of(source, senders, slow.pushed_to(stuck))
    to_other = pusher_of(source, senders, other.pushed_to(source.messenger.connect(other.endpoint)))
    try:
        written = WrittenLayers(source.memory)
        for layer in range(NUM_LAYERS):
            two_chunks = [*to_slow.due(0, 2 * BLOCK), *to_slow.due(2 * BLOCK, 37)]
            written.written(layer, partial(list, two_chunks), at_once=True)
        assert await asyncio.to_thread(stuck.is_stuck.wait, 30)
        for layer in range(NUM_LAYERS):
            written.written(layer, lambda: to_other.due(0, 37), at_once=False)
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


class Passed:
    """A pusher that records the layers that it is given together."""

    def __init__(self) -> None:
        self.layers: list[list[int]] = []

    def push_layers(self, layers: list[int], blocks: range, copied: object) -> None:
        assert blocks == range(3)
        self.layers.append(layers)


@pytest.fixture
def written(new_destination: Callable[[str], Destination], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    memory = new_destination("written").memory
    layers, now_s = WrittenLayers(memory), 0.0

    def step(*, layer_s: float = 0.0, together: int = 1 << 20, at_once: bool = False, stop: int = NUM_LAYERS) -> Any:
        """Write a step's layers, one every `layer_s`; return those that were pushed together."""
        passed = Passed()
        nonlocal now_s
        monkeypatch.setattr("prefill_node.push._TOGETHER_NBYTES", together)
        monkeypatch.setattr("prefill_node.push.time.monotonic", lambda: now_s)
        for layer in range(stop):
            now_s += layer_s
            layers.written(layer, lambda: [DuePush(passed, range(3))], at_once=at_once)  # type: ignore[arg-type]
        return passed.layers

    step()  # it learns how long a layer takes
    return step


@pytest.mark.parametrize("layer_s", [0.0, 0.0024])
def test_small_layers_of_a_short_step_are_pushed_together(written: Callable[..., Any], layer_s: float) -> None:
    written(layer_s=layer_s)
    assert written(layer_s=layer_s) == [[0, 1, 2, 3, 4, 5]]


def test_layers_are_pushed_together_up_to_a_size(written: Callable[..., Any]) -> None:
    layer_nbytes = 3 * SPEC.layer_nbytes(0)
    assert written(together=2 * layer_nbytes) == [[0, 1], [2, 3], [4, 5]]
    assert written(together=layer_nbytes) == [[0], [1], [2], [3], [4], [5]]
    assert written(together=4 * layer_nbytes) == [[0, 1, 2, 3], [4, 5]]


def test_layers_that_take_long_are_not_held_back(written: Callable[..., Any]) -> None:
    written(layer_s=0.003)
    assert written(layer_s=0.003) == [[0, 1], [2, 3], [4, 5]]
    written(layer_s=0.006)
    assert written(layer_s=0.006) == [[layer] for layer in range(NUM_LAYERS)]


def test_the_first_layer_of_all_is_not_held_back(
    new_destination: Callable[[str], Destination], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, passed = WrittenLayers(new_destination("first").memory), Passed()
    layers.written(0, lambda: [DuePush(passed, range(3))], at_once=False)  # type: ignore[arg-type]
    assert passed.layers == [[0]]


def test_layers_that_others_wait_for_are_pushed_at_once(written: Callable[..., Any]) -> None:
    assert written(at_once=True) == [[layer] for layer in range(NUM_LAYERS)]


def test_layers_of_a_step_that_failed_are_not_pushed_with_the_next(written: Callable[..., Any]) -> None:
    assert written(stop=4) == []
    assert written() == [[0, 1, 2, 3, 4, 5]]
