"""Receiver of the KV pushed by other workers: verifies it on arrival and passes the result to its epoch's target.

Shared by all targets: reservations of a decode node and members of a prefill group.

Threads: `_on_notify` runs on the messenger's thread, `_verify` on the verifier thread, all other methods on the event
loop. `_by_epoch` is a plain dict: single reads and writes of a key are atomic under the GIL.
"""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgpack
import numpy as np
from numpy.typing import NDArray

from messenger import Messenger
from worker.counters import WorkerCounters
from worker.slot_memory import EngineMemory

log = logging.getLogger(__name__)

KV_TAG = b"kv"


class PushTarget(Protocol):
    """Slots into which the blocks of one prompt are pushed."""

    slots: list[int]
    num_blocks: int  # blocks below this index are pushed

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of pushed tokens of each block, int32 [n]."""

    def announce(self) -> None:
        """Count data that has arrived and is to be verified; `verified` follows. Called on the messenger's thread."""

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        """Report which of the blocks [n] of a layer match their digests. Called on the verifier thread."""


class KVReceiver:
    """Router of pushed KV to the target of its epoch; verifies the KV on its own thread."""

    def __init__(
        self, memory: EngineMemory, messenger: Messenger, counters: WorkerCounters, *, incarnation: int
    ) -> None:
        self._memory = memory
        self._counters = counters
        self._first = (incarnation & 0x7FFFFFFF) << 32
        self._count = itertools.count(1)
        self._by_epoch: dict[int, PushTarget] = {}
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify")
        messenger.on_notify(self._on_notify)

    def __len__(self) -> int:
        return len(self._by_epoch)

    def new_epoch(self) -> int:
        """Return an epoch that this node has not used before, in this process or an earlier one."""
        return self._first | next(self._count)

    def open_epoch(self, epoch: int, receiver: PushTarget) -> None:
        """Accept pushes under `epoch` for `receiver`."""
        self._by_epoch[epoch] = receiver

    def close_epoch(self, epoch: int) -> None:
        """Stop accepting pushes under `epoch`; later ones are only counted. Idempotent."""
        self._by_epoch.pop(epoch, None)

    def close(self) -> None:
        self._verifier.shutdown()

    def _on_notify(self, peer: str, tag: bytes, payload: bytes) -> None:
        """Handle a notification, which arrives after its bytes. Runs on the messenger's thread."""
        if tag != KV_TAG:
            log.warning("unknown notify %r from %s", tag, peer)
            return
        try:
            message = msgpack.unpackb(payload)
            epoch, layer = int(message["e"]), int(message["l"])
            blocks = np.asarray(message["b"], dtype=np.int64)
            valid = np.asarray(message["v"], dtype=np.int32)
            digests = np.frombuffer(message["d"], dtype="<u8")
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            log.error("malformed notify from %s: %s", peer, error)
            return
        receiver = self._by_epoch.get(epoch)
        if receiver is None:
            self._counters.add("late_pushes", 1)
            return
        known = layer in self._memory.place_of_layer
        inside = len(blocks) == 0 or (int(blocks.min()) >= 0 and int(blocks.max()) < receiver.num_blocks)
        same = len(blocks) == len(digests) and np.array_equal(valid, receiver.valid_tokens(blocks))
        if not (known and inside and same):
            log.error("notify from %s does not fit its reservation of %d blocks", peer, receiver.num_blocks)
            return
        receiver.announce()
        self._verifier.submit(self._verify, receiver, layer, blocks, valid, digests)

    def _verify(
        self,
        receiver: PushTarget,
        layer: int,
        blocks: NDArray[np.int64],
        valid: NDArray[np.int32],
        digests: NDArray[np.uint64],
    ) -> None:
        right = np.zeros(len(blocks), dtype=bool)
        try:
            slots = [receiver.slots[b] for b in blocks]
            right = self._memory.one_layer_digests(layer, slots, valid) == digests
            if not right.all():
                self._counters.add("digest_mismatches", int((~right).sum()))
                log.error("layer %d of %d pushed blocks failed verification", layer, int((~right).sum()))
        except Exception:
            log.exception("pushed blocks could not be verified; they count as damaged")
        receiver.verified(layer, blocks, right)
