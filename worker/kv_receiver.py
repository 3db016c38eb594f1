"""Receiver of the KV pushed by other workers: verifies it on arrival and passes the result to its epoch's target.

Shared by all targets: reservations of a decode node and members of a prefill group. A notification affects a target
only if it carries the token of the key that grants writing the target's slots: whoever cannot write them cannot
complete them either.

Threads: `_on_notify` runs on the messenger's thread, `_verify` on the verifier thread, all other methods on the event
loop. `_by_epoch` is a plain dict: single reads and writes of a key are atomic under the GIL.
"""

from __future__ import annotations

import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from messenger import Messenger, RemoteKey
from telemetry.limited_log import LimitedLog
from worker.counters import WorkerCounters
from worker.kv_notification import KV_TAG, BadNotification, KvNotification, PushedBlocks
from worker.slot_memory import EngineMemory

log = logging.getLogger(__name__)

_MAX_SHOWN_TAG = 32


class PushTarget(Protocol):
    """Slots into which the blocks of one prompt are pushed."""

    slots: list[int]
    held_blocks: int
    num_blocks: int  # blocks [held_blocks, num_blocks) may be pushed
    seen_from: int  # in windowed groups, blocks before this one have no slots

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of pushed tokens of each block, int32 [n]."""

    def announce(self) -> None:
        """Count a layer that has arrived and is to be verified; `verified` follows, whatever fails in between. On
        the messenger's thread."""

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        """Report which of the blocks [n] of a layer match their digests. Called on the verifier thread, or, if it has
        ended, on the messenger's."""


class KVReceiver:
    """Router of pushed KV to the target of its epoch; verifies the KV on its own thread."""

    def __init__(self, memory: EngineMemory, messenger: Messenger, counters: WorkerCounters) -> None:
        self._memory = memory
        self._counters = counters
        self._by_epoch: dict[int, tuple[int, PushTarget]] = {}
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._limited = LimitedLog(log)
        messenger.on_notify(self._on_notify)

    def __len__(self) -> int:
        return len(self._by_epoch)

    def open_epoch(self, key: RemoteKey, target: PushTarget) -> int:
        """Accept pushes for `target` by those who hold `key`, which grants writing its slots. Returns the epoch, 64
        random bits other than 0."""
        epoch = 0
        while not epoch or epoch in self._by_epoch:
            epoch = secrets.randbits(64)
        self._by_epoch[epoch] = key.token, target
        return epoch

    def close_epoch(self, epoch: int) -> None:
        """Stop accepting pushes under `epoch`; later ones are only counted. Idempotent."""
        self._by_epoch.pop(epoch, None)

    def close(self) -> None:
        self._verifier.shutdown()

    def _on_notify(self, peer: str, tag: bytes, payload: bytes) -> None:
        """Handle a notification, which arrives after its bytes. Runs on the messenger's thread."""
        try:
            if tag != KV_TAG:
                raise BadNotification(f"the tag {tag[:_MAX_SHOWN_TAG]!r} is unknown")
            self._take(KvNotification.unpack(payload))
        except BadNotification as error:
            self._counters.add("refused_pushes", 1)
            self._limited.warning(peer, "ignored a notification from %s: %s", peer, error)

    def _take(self, notification: KvNotification) -> None:
        """Pass on a notification that proves its right; raises BadNotification for others, before any effect."""
        found = self._by_epoch.get(notification.epoch)
        if found is None:
            self._counters.add("late_pushes", 1)
            return
        token, target = found
        if not notification.proves(token):
            raise BadNotification("it does not carry the key of its reservation")
        pushed = notification.pushed()
        self._check(pushed, target)
        for _ in pushed.layers:
            target.announce()
        try:
            self._verifier.submit(self._verify, target, pushed, token)
        except RuntimeError:  # the node closes
            for layer in pushed.layers:
                self._report(target, layer, pushed.blocks, np.zeros(len(pushed.blocks), dtype=bool))

    def _check(self, pushed: PushedBlocks, target: PushTarget) -> None:
        blocks = pushed.blocks
        for layer in pushed.layers:
            if layer not in self._memory.place_of_layer:
                raise BadNotification(f"the model has no layer {layer}")
        is_windowed = any(self._memory.is_windowed(layer) for layer in pushed.layers)
        first = max(target.held_blocks, target.seen_from) if is_windowed else target.held_blocks
        if not len(blocks) or blocks.min() < first or blocks.max() >= target.num_blocks:
            raise BadNotification(
                f"its {len(blocks)} blocks are not all in [{first}, {target.num_blocks}), as reserved"
            )
        if len(set(blocks.tolist())) < len(blocks):
            raise BadNotification("it names a block twice")
        if not np.array_equal(pushed.valid, target.valid_tokens(blocks)):
            raise BadNotification("its blocks have other numbers of tokens than the reservation's")

    def _verify(self, target: PushTarget, pushed: PushedBlocks, token: int) -> None:
        layers, blocks, valid, digests = pushed
        for layer, expected in zip(layers, digests, strict=True):
            right = np.zeros(len(blocks), dtype=bool)
            try:
                slots = [target.slots[b] for b in blocks]
                right = self._memory.pushed_digests(layer, slots, valid, token) == expected
                if not right.all():
                    self._counters.add("digest_mismatches", int((~right).sum()))
                    log.error("layer %d of %d pushed blocks failed verification", layer, int((~right).sum()))
            except Exception:
                log.exception("pushed blocks could not be verified; they count as damaged")
            finally:
                self._report(target, layer, blocks, right)

    def _report(self, target: PushTarget, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        try:
            target.verified(layer, blocks, right)
        except Exception:
            log.exception("the verification of pushed blocks could not be reported")
