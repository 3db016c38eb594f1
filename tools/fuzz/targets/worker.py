"""Target: notifications of pushed KV at a worker's receiver, which must report exactly what it announced."""

import random
import struct
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from messenger import Messenger, RemoteKey
from tools.fuzz import mutation
from tools.fuzz.target import FuzzTarget, Misjudged
from worker.counters import WorkerCounters
from worker.kv_notification import KV_TAG, PushedBlocks, pack_notification
from worker.kv_receiver import KVReceiver
from worker.slot_memory import EngineMemory

_EPOCH, _TOKEN, _NUM_BLOCKS, _HELD = b"<<epoch>", 0x1122334455667788, 8, 2
_SEEN_FROM = 5  # in layer 1, which has a window


class _Target:
    """Slots of a prompt whose last block has 3 tokens of 4; what was announced is counted."""

    def __init__(self) -> None:
        self.slots, self.held_blocks, self.num_blocks = list(range(_NUM_BLOCKS)), _HELD, _NUM_BLOCKS
        self.seen_from = _SEEN_FROM
        self.announced = 0
        self.reported: list[tuple[int, NDArray[np.int64], NDArray[np.bool_]]] = []
        self.changed = threading.Event()

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        return np.where(blocks == _NUM_BLOCKS - 1, 3, 4).astype(np.int32)

    def announce(self) -> None:
        self.announced += 1

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        self.reported.append((layer, blocks, right))
        if len(self.reported) == self.announced:
            self.changed.set()


class KvNotifications(FuzzTarget):
    """Payloads of notifications; the epoch's placeholder is replaced, since epochs are random."""

    name = "kv-notification"
    covers: tuple[str, ...] = ("worker/kv_notification.py", "worker/kv_receiver.py")
    tokens: tuple[bytes, ...] = (_EPOCH, struct.pack("<Q", _TOKEN), struct.pack("<q", -1), struct.pack("<I", 7))

    def open(self) -> None:
        """Make the receiver."""
        handlers: list[Callable[[str, bytes, bytes], None]] = []
        memory = SimpleNamespace(
            place_of_layer={0: (0, 0), 1: (1, 0)},
            is_windowed=lambda layer: layer == 1,
            pushed_digests=lambda layer, slots, *_: np.array([layer * 100 + slot for slot in slots], np.uint64),
        )
        messenger = SimpleNamespace(on_notify=handlers.append)
        self._counters = WorkerCounters(lambda path, nbytes, seconds: None)
        self._receiver = KVReceiver(cast("EngineMemory", memory), cast("Messenger", messenger), self._counters)
        self._notify = handlers[0]
        self._key = RemoteKey(1, _TOKEN, 0, 4096, False, True)

    def seeds(self) -> Sequence[bytes]:
        blocks, valid = np.array([3, 7], np.int64), np.array([4, 3], np.int32)
        one = PushedBlocks(range(1, 2), blocks[1:], valid[1:], np.array([[107]], np.uint64))
        both = PushedBlocks(range(2), blocks, valid, np.array([[3, 7], [103, 107]], np.uint64))
        epoch = int.from_bytes(_EPOCH, "little")
        return [pack_notification(epoch, _TOKEN, each) for each in (one, both)]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the payload's bytes."""
        return mutation.mutate_bytes(rng, case, other, self.tokens)

    def run(self, case: bytes) -> None:
        """Deliver the notification, and require a report of blocks that may be pushed for each announcement."""
        target = _Target()
        epoch = self._receiver.open_epoch(self._key, cast("Any", target))
        try:
            self._notify("peer", KV_TAG, case.replace(_EPOCH, epoch.to_bytes(8, "little")))
            if target.announced and not target.changed.wait(5):
                raise Misjudged("an announced push was never reported")
        finally:
            self._receiver.close_epoch(epoch)
        for layer, blocks, right in target.reported:
            may_be_pushed = set(blocks.tolist()) <= set(range((_HELD, _SEEN_FROM)[layer], _NUM_BLOCKS))
            if layer not in (0, 1) or len(right) != len(blocks) or not may_be_pushed:
                raise Misjudged("blocks were reported that may not be pushed")
        if len(target.reported) != target.announced:
            raise Misjudged("announcements and reports differ in number")

    def close(self) -> None:
        """End the receiver's thread."""
        self._receiver.close()
