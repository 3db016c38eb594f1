"""Notifications of pushed KV: what is not one, or does not prove its right, has no effect; what is one always ends."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.reservation import Reservation
from kvpool import KvGroup, KvSpec
from messenger import Endpoint, RemoteKey
from moonpool_proto.v1.worker_pb2 import Submit
from prefill_node.group_member import MemberChunks
from prefill_node.push import PushDestination, PushedPrompt, Pusher
from worker.counters import WorkerCounters
from worker.errors import GroupLost
from worker.kv_notification import KV_TAG, BadNotification, KvNotification, PushedBlocks, pack_notification
from worker.kv_receiver import KVReceiver
from worker.policy import TakenSlots
from worker.request import Request

BLOCK, NUM_LAYERS = 8, 2
SLOTS = (4, 5, 6, 7, 8)
KEY = RemoteKey(1, 0xFEDC_BA98_7654_3210, 0, 8, False, True)


class Memory:
    """Memory of an engine whose every digest is 7."""

    block_tokens = BLOCK
    windows = None
    spec = KvSpec((KvGroup("full", 0, (0, 1), kv_heads=1, head_dim=4, dtype="float32"),), BLOCK)

    def __init__(self) -> None:
        self.place_of_layer = {0: (0, 0), 1: (0, 1)}

    def one_layer_digests(self, layer: int, slots: list[int], valid: Any) -> Any:
        return np.full(len(slots), 7, dtype=np.uint64)

    def pushed_digests(self, layer: int, slots: list[int], valid: Any, token: int) -> Any:
        assert token == KEY.token
        return self.one_layer_digests(layer, slots, valid)

    def is_windowed(self, layer: int) -> bool:
        return False

    def to_device(self, slots: list[int], layer: int) -> None:
        raise OSError("the device is gone")


class Messenger:
    """Messenger of which a test calls the handler."""

    def on_notify(self, handler: Callable[[str, bytes, bytes], None]) -> None:
        self.notify = handler


class Target:
    """Five blocks, of which the first is held and the last has three tokens."""

    held_blocks, num_blocks, seen_from = 1, 5, 3

    def __init__(self) -> None:
        self.slots = list(SLOTS)
        self.announced = 0
        self.reported: list[tuple[int, list[int], list[bool]]] = []

    def valid_tokens(self, blocks: Any) -> Any:
        assert blocks.dtype == np.int64
        return np.where(blocks == 4, 3, BLOCK).astype(np.int32)

    def announce(self) -> None:
        self.announced += 1

    def verified(self, layer: int, blocks: Any, right: Any) -> None:
        self.reported.append((layer, blocks.tolist(), right.tolist()))


class Receiver:
    """A KVReceiver with one open target."""

    def __init__(self) -> None:
        self.messenger, self.counters = Messenger(), WorkerCounters()
        self.kv = KVReceiver(Memory(), self.messenger, self.counters)  # type: ignore[arg-type]

    def send(self, payload: bytes, tag: bytes = KV_TAG) -> None:
        """Handle a notification, up to the end of its verification."""
        self.messenger.notify("peer", tag, payload)
        self.kv._verifier.submit(lambda: None).result(30)

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)


@pytest.fixture
def receiver() -> Any:
    one = Receiver()
    yield one
    one.kv.close()


def pushed(
    layer: int = 0, blocks: Any = (1, 4), valid: Any = (8, 3), digests: Any = (7, 7), further: int = 0
) -> PushedBlocks:
    """Return blocks of one layer, or with the same digests of `further` ones."""
    layers = range(layer, layer + 1 + further)
    return PushedBlocks(
        layers,
        np.array(blocks, dtype=np.int64),
        np.array(valid, dtype=np.int32),
        np.array([digests] * len(layers), dtype=np.uint64),
    )


def test_a_notification_is_read_as_it_was_packed() -> None:
    digests = [(1 << 64) - 1, 2]
    notification = KvNotification.unpack(pack_notification((1 << 64) - 1, KEY.token, pushed(digests=digests)))
    assert (notification.epoch, notification.proves(KEY.token)) == ((1 << 64) - 1, True)
    read = notification.pushed()
    assert [read.layers, *(array.tolist() for array in read[1:])] == [range(1), [1, 4], [8, 3], [digests]]


def test_a_notification_of_one_layer_has_the_bytes_that_earlier_nodes_expect() -> None:
    payload = pack_notification(5, KEY.token, pushed(layer=1))
    numbers = struct.pack("<QQII", 5, KEY.token, 1, 2) + struct.pack("<4I", 1, 4, 8, 3) + struct.pack("<2Q", 7, 7)
    assert payload == numbers


def test_a_notification_of_several_layers_is_read_as_it_was_packed() -> None:
    told = pushed(layer=3, further=2)
    told.digests[:] = [[1, 2], [3, 4], [5, 6]]
    read = KvNotification.unpack(pack_notification(5, KEY.token, told)).pushed()
    assert (read.layers, read.digests.tolist()) == (range(3, 6), [[1, 2], [3, 4], [5, 6]])


def test_each_layer_of_a_notification_is_announced_verified_and_reported(receiver: Receiver) -> None:
    target = Target()
    epoch = receiver.kv.open_epoch(KEY, target)
    told = pushed(layer=0, further=1)
    told.digests[1] = [7, 8]
    receiver.send(pack_notification(epoch, KEY.token, told))
    assert target.announced == 2
    assert [(layer, right) for layer, _, right in target.reported] == [(0, [True, True]), (1, [True, False])]


def test_a_notification_of_which_one_layer_does_not_exist_has_no_effect(receiver: Receiver) -> None:
    target = Target()
    epoch = receiver.kv.open_epoch(KEY, target)
    receiver.send(pack_notification(epoch, KEY.token, pushed(layer=0, further=NUM_LAYERS)))
    assert (target.announced, target.reported, receiver.count("refused_pushes")) == (0, [], 1)


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_of_the_key_counts(bit: int) -> None:
    payload = pack_notification(1, KEY.token ^ (1 << bit), pushed())
    assert not KvNotification.unpack(payload).proves(KEY.token)


def test_a_notification_with_the_key_completes_its_blocks(receiver: Receiver) -> None:
    target = Target()
    epoch = receiver.kv.open_epoch(KEY, target)
    receiver.send(pack_notification(epoch, KEY.token, pushed(digests=(7, 8))))
    assert (target.announced, target.reported) == (1, [(0, [1, 4], [True, False])])
    assert receiver.count("refused_pushes") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        pack_notification(0, KEY.token ^ 1, pushed()),
        pack_notification(0, KEY.token, pushed(layer=2)),
        pack_notification(0, KEY.token, pushed(layer=(1 << 16) - 1)),
        pack_notification(0, KEY.token, pushed(blocks=(0, 4), valid=(8, 3))),
        pack_notification(0, KEY.token, pushed(blocks=(1, 5))),
        pack_notification(0, KEY.token, pushed(blocks=(1, (1 << 32) - 1))),
        pack_notification(0, KEY.token, pushed(blocks=(1, 1), valid=(8, 8))),
        pack_notification(0, KEY.token, pushed(valid=(8, 8))),
        pack_notification(0, KEY.token, pushed(valid=(8, -3))),
        pack_notification(0, KEY.token, pushed(blocks=(), valid=(), digests=())),
        pack_notification(0, KEY.token, pushed())[:-1],
        pack_notification(0, KEY.token, pushed()) + b"\0",
        pack_notification(0, KEY.token, pushed())[:23],
        b"",
    ],
    ids=[
        "another key",
        "no such layer",
        "huge layer",
        "held block",
        "block beyond the prompt",
        "huge block",
        "a block twice",
        "more tokens than the prompt has",
        "negative tokens",
        "no block",
        "too short",
        "too long",
        "less than a header",
        "empty",
    ],
)
def test_what_is_wrong_is_counted_and_has_no_effect(
    receiver: Receiver, wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target()
    epoch = receiver.kv.open_epoch(KEY, target)
    for _ in range(3):
        receiver.send(struct.pack("<Q", epoch) + wrong[8:] if wrong else wrong)
    assert (target.announced, target.reported) == (0, [])
    assert receiver.count("refused_pushes") == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(KEY.token) not in caplog.text


@pytest.mark.parametrize("tag", [b"", b"KV", b"x" * (1 << 20)])
def test_an_unknown_tag_is_named_in_a_short_line(
    receiver: Receiver, tag: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.send(b"", tag)
    assert receiver.count("refused_pushes") == 1
    assert 0 < len(caplog.text) < 400


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=64),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from("elbvd"), inner, max_size=5),
)
headers = st.builds(
    lambda epoch, token, layer, count, body: struct.pack("<QQII", epoch, token, layer, count) + body,
    st.integers(0, 3),
    st.sampled_from([KEY.token, 0, KEY.token - 1]),
    st.integers(0, 3) | st.integers(0, (1 << 32) - 1),
    st.integers(0, 4) | st.integers(0, (1 << 32) - 1),
    st.binary(max_size=64),
)


@settings(max_examples=400, deadline=None)
@given(payload=values.map(msgpack.packb) | st.binary(max_size=200) | headers)
def test_whatever_arrives_is_a_notification_or_refused_by_name(payload: bytes) -> None:
    """Among it the former form, msgpack, with nested lists and numbers of any size."""
    try:
        notification = KvNotification.unpack(payload)
    except BadNotification:
        return
    notification.proves(KEY.token)
    read = notification.pushed()
    assert len(read.blocks) == len(read.valid)
    assert read.digests.shape == (len(read.layers), len(read.blocks))


@settings(max_examples=200, deadline=None)
@given(
    layer=st.integers(0, 3),
    rows=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0, 3, 8, -1]), st.integers(6, 8)), max_size=6),
)
def test_what_the_key_s_holder_sends_is_completed_or_refused_and_never_raises(
    layer: int, rows: list[tuple[int, int, int]]
) -> None:
    receiver, target = Receiver(), Target()
    try:
        epoch = receiver.kv.open_epoch(KEY, target)
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        receiver.send(pack_notification(epoch, KEY.token, pushed(layer, columns[0], columns[1], columns[2])))
        assert target.announced == len(target.reported) == 1 - receiver.count("refused_pushes")
        for _, blocks, _ in target.reported:
            assert set(blocks) <= {1, 2, 3, 4}
            assert len(set(blocks)) == len(blocks)
    finally:
        receiver.kv.close()


def test_epochs_are_random_and_never_zero(receiver: Receiver) -> None:
    epochs = [receiver.kv.open_epoch(KEY, Target()) for _ in range(256)]
    assert len(set(epochs)) == 256
    assert 0 not in epochs
    assert min(epochs) < 1 << 62 < 1 << 63 < max(epochs)  # not in order, and over the whole width
    steps = np.diff(np.array(epochs, dtype=object))
    assert len(set(steps)) == 255


def test_a_late_notification_is_only_counted(receiver: Receiver) -> None:
    target = Target()
    epoch = receiver.kv.open_epoch(KEY, target)
    receiver.kv.close_epoch(epoch)
    receiver.send(pack_notification(epoch, KEY.token, pushed()))
    assert (target.announced, receiver.count("late_pushes"), receiver.count("refused_pushes")) == (0, 1, 0)


async def reservation() -> Reservation:
    submit = Submit(
        request_id="r", prompt_ids=np.zeros(35, dtype="<i4").tobytes(), chain=bytes(64), chain_seed=bytes(16)
    )
    submit.sampling.max_tokens = 4
    submit.sampling.top_p = 1.0
    return Reservation(
        Request.from_proto(submit, vocab_size=8, max_model_len=64, block_tokens=BLOCK),
        TakenSlots(list(SLOTS), 1),
        num_layers=NUM_LAYERS,
        block_tokens=BLOCK,
        key=KEY,
        writer=Endpoint("w", 1, "h", "", 0, ""),
    )


@pytest.mark.parametrize("breaks", ["digests", "slots", "recording", "verifier", "nothing"])
async def test_a_commit_is_answered_whatever_fails_in_the_verification(
    receiver: Receiver, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await reservation()
    epoch = receiver.kv.open_epoch(KEY, target)

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    if breaks == "digests":
        monkeypatch.setattr(Memory, "one_layer_digests", fail)
    elif breaks == "slots":
        target.slots = []
    elif breaks == "recording":
        target._arrived = np.zeros((0, 0), dtype=bool)
    elif breaks == "verifier":
        receiver.kv.close()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await asyncio.to_thread(receiver.messenger.notify, "peer", KV_TAG, pack_notification(epoch, KEY.token, pushed()))
    async with asyncio.timeout(10):
        missing = await target.missing_blocks()
    if breaks != "recording":
        assert missing == [1, 2, 3, 4]
        assert target._arrived[0].tolist() == [True, *([breaks == "nothing", False, False, breaks == "nothing"])]


async def test_a_group_whose_member_cannot_use_a_block_is_lost_and_not_waited_for(receiver: Receiver) -> None:
    chunks = MemberChunks(
        Memory(),  # type: ignore[arg-type]
        SLOTS,
        num_blocks=5,
        held_blocks=1,
        seen_from=0,
        stall_s=60.0,
        changed=lambda: None,
    )
    chunks.begin([(16, 24)])
    epoch = receiver.kv.open_epoch(KEY, chunks)
    receiver.send(pack_notification(epoch, KEY.token, pushed(blocks=(1,), valid=(8,), digests=(7,))))
    with pytest.raises(GroupLost, match="the device is gone"):
        chunks.gate.wait(0)


async def test_a_push_ends_although_its_observer_fails() -> None:
    class Peer:
        def write_notify(self, *_: Any, **__: Any) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(type("Result", (), {"nbytes": 10}))
            return done

    class Slots(Memory):
        region = None

        def layer_slices(self, *_: Any) -> Any:
            return np.empty((0, 3), np.int64)

    class Threads:
        def submit(self, destination: object, function: Callable[..., None], *arguments: Any) -> None:
            thread = threading.Thread(target=function, args=arguments)
            thread.start()
            thread.join()

    def fail(nbytes: int, seconds: float) -> None:
        raise ZeroDivisionError

    destination = PushDestination(Peer(), 1, KEY, [np.zeros(5, dtype=np.int64)], 0)  # type: ignore[arg-type]
    pusher = Pusher(
        Slots(),  # type: ignore[arg-type]
        Threads(),  # type: ignore[arg-type]
        destination,
        prompt=PushedPrompt([0, 1], 16),
        deadline_s=lambda: 1.0,
        stall_s=1.0,
        on_moved=fail,
    )
    pusher.push_layer(0, [0, 1])
    async with asyncio.timeout(10):
        await pusher.flush()
