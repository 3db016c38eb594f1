"""Pushes of a request's KV to its decode node, or to another member of its group, layer by layer as it is computed.

The engine thread only reports which layer of which tokens is written, and begins to copy it to host memory if it is on
a GPU; a sender thread waits for the copy, computes digests and writes. A block is pushed when it is complete, the
partial last one with the prompt's last chunk.

Threads: `due` and `WrittenLayers` on the engine thread, `_send` on a sender thread (for one destination one at a time,
in order), `_landed` on the messenger's thread, `flush`, `stop` and `settle` on the event loop. `_lock` guards `_open`,
`_error`, `_stopped` and the byte counts. A future stays in `_open` from `push_layers` until its copy and its writes
have ended, and the slots must not be released before `_open` is empty.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messenger import Peer, Priority, RemoteKey, TransferResult
from messenger.staging import READY, Ticket
from prefill_node.senders import PushSenders
from telemetry.tracing import Span
from worker.errors import RequestFailed
from worker.kv_notification import KV_TAG, PushedBlocks, pack_notification
from worker.slot_memory import EngineMemory

_TOGETHER_NBYTES = 256 << 10
_TOGETHER_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class PushDestination:
    """Slots of a remote node to which one prompt's KV is pushed."""

    peer: Peer
    epoch: int
    key: RemoteKey  # grants write access to the slots
    offsets: Sequence[NDArray[np.int64]]  # per group, the remote byte offset of every prompt block
    push_from: int  # the receiver has or pulls the blocks below; they are pushed only on request


@dataclass(frozen=True, slots=True, eq=False)
class DuePush:
    """Blocks of a prompt that one pusher pushes next, in every layer."""

    pusher: Pusher
    blocks: range


class WrittenLayers:
    """The layers that the step in progress has written; passes them to its pushers. Engine thread only.

    Waking senders for every layer of a short prompt costs the engine more than the pushes take: they compete for the
    interpreter. Layers are held back to be passed on together, up to `_TOGETHER_NBYTES`, as long as the first of them
    is not held back for more than `_TOGETHER_S`, judged by the time between the last two layers.
    """

    def __init__(self, memory: EngineMemory) -> None:
        self._memory = memory
        self._first, self._last = min(memory.place_of_layer), max(memory.place_of_layer)
        self._due: list[DuePush] = []
        self._slots: list[int] = []
        self._num_blocks = 0
        self._layers: list[int] = []
        self._nbytes = 0
        self._first_s = self._last_s = 0.0  # when the first layer held back, and the last layer, was written
        self._layer_s = math.inf  # from one layer to the next

    def written(self, layer: int, due: Callable[[], list[DuePush]], *, at_once: bool) -> None:
        """Push one layer of the blocks that the step has just written; never blocks.

        `due()` returns the step's pushes, which share one copy from the device. With `at_once`, others wait for each
        layer.
        """
        now_s = time.monotonic()
        if layer == self._first:
            self._begin(due())
        else:
            self._layer_s = now_s - self._last_s
        self._last_s = now_s
        if not self._due:
            return
        self._layers.append(layer)
        self._nbytes += self._num_blocks * self._memory.layer_nbytes(layer)
        if len(self._layers) == 1:
            self._first_s = now_s
        is_long = now_s + self._layer_s - self._first_s > _TOGETHER_S
        if at_once or is_long or self._nbytes >= _TOGETHER_NBYTES or layer == self._last:
            self._pass_on()

    def _begin(self, due: list[DuePush]) -> None:
        self._due = due
        self._layers, self._nbytes = [], 0  # a step that failed leaves layers behind
        self._num_blocks = sum(len(each.blocks) for each in due)
        self._slots = []
        if self._memory.staging.is_needed:
            self._slots = list(dict.fromkeys(slot for each in due for slot in each.pusher.slots_of(each.blocks)))

    def _pass_on(self) -> None:
        layers, self._layers, self._nbytes = self._layers, [], 0
        copied = self._memory.to_host(self._slots, layers)
        for each in self._due:
            each.pusher.push_layers(layers, each.blocks, copied)


class _Countdown:
    """Number of writes that have not ended; calls `ended` with the first error, or None, after the last one."""

    def __init__(self, count: int, ended: Callable[[BaseException | None], None]) -> None:
        self._count = count
        self._ended = ended
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def one_ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._count -= 1
            self._error = self._error or error
            is_last = not self._count
        if is_last:
            self._ended(self._error)


class Pusher:
    """Pusher of one request's KV to one destination."""

    def __init__(
        self,
        memory: EngineMemory,
        senders: PushSenders,
        destination: PushDestination,
        *,
        slots: Sequence[int],
        prompt_len: int,
        deadline_s: Callable[[], float],
        stall_s: float,
        on_moved: Callable[[int, float], None],
    ) -> None:
        """Create a pusher for a prompt of `prompt_len` tokens whose blocks are in `slots`.

        A push is given up after `stall_s` without progress, since its slots cannot be reused before it ends, and
        after `deadline_s()`. `on_moved(nbytes, seconds)` is called for every completed push.
        """
        self._memory = memory
        self._senders = senders
        self._destination = destination
        self._slots = np.asarray(slots, dtype=np.int64)
        self._prompt_len = prompt_len
        self._push_from = destination.push_from
        self._deadline_s = deadline_s
        self._stall_s = stall_s
        self._on_moved = on_moved
        self._lock = threading.Lock()
        self._open: set[Future[None]] = set()
        self._error: BaseException | None = None
        self._stopped = False
        self._moved_nbytes, self._began_at, self._landed_at = 0, 0.0, 0.0  # instants of time.perf_counter()

    def due(self, start: int, end: int) -> list[DuePush]:
        """Return the push of the blocks that prompt tokens [start, end) complete; empty if there are none."""
        block_tokens = self._memory.block_tokens
        last = end // block_tokens if end < self._prompt_len else -(-end // block_tokens)
        blocks = range(max(self._push_from, start // block_tokens), last)
        return [DuePush(self, blocks)] if blocks else []

    def push_blocks(self, blocks: Sequence[int]) -> None:
        """Push all layers of blocks that are in the cache. Not on the engine's thread."""
        if blocks:
            self.push_layers(list(self._memory.place_of_layer), blocks, self._memory.to_host(self.slots_of(blocks)))

    def push_layer(self, layer: int, blocks: Sequence[int]) -> None:
        """Push one layer of blocks that the messenger can read. Any thread."""
        blocks = [block for block in blocks if block >= self._push_from]
        if blocks:
            self.push_layers([layer], blocks, READY)

    def push_layers(self, layers: Sequence[int], blocks: Sequence[int], copied: Ticket) -> None:
        """Push layers of blocks, one after another, once they have been copied. Any thread."""
        done: Future[None] = Future()
        with self._lock:
            if self._stopped or self._error is not None:
                return
            self._open.add(done)
        try:
            self._senders.submit(self._destination.peer, self._send, layers, list(blocks), copied, done)
        except RuntimeError as error:  # shut down
            self._finish(done, error)

    def slots_of(self, blocks: Sequence[int]) -> list[int]:
        """Return the blocks' slots in this node's memory."""
        slots: list[int] = self._slots[list(blocks)].tolist()
        return slots

    def _send(self, layers: Sequence[int], blocks: list[int], copied: Ticket, done: Future[None]) -> None:
        """Begin the writes of the layers; `done` ends with the last of them."""
        pending = _Countdown(len(layers), lambda error: self._finish(done, error))
        try:
            copied.wait()
        except Exception as error:
            self._finish(done, error)
            return
        for layer in layers:
            if self._stopped:
                pending.one_ended(None)
                continue
            try:
                self._send_layer(layer, blocks, pending)
            except Exception as error:
                pending.one_ended(error)

    def _send_layer(self, layer: int, blocks: list[int], pending: _Countdown) -> None:
        began = time.perf_counter()
        block_tokens = self._memory.block_tokens
        slots = self.slots_of(blocks)
        valid = np.minimum(self._prompt_len - np.asarray(blocks) * block_tokens, block_tokens).astype(np.int32)
        digests = self._memory.one_layer_digests(layer, slots, valid)
        remote = [offsets[blocks] for offsets in self._destination.offsets]
        payload = pack_notification(
            self._destination.epoch,
            self._destination.key.token,
            PushedBlocks(layer, np.asarray(blocks), valid, digests),
        )
        landed = self._destination.peer.write_notify(
            self._destination.key,
            self._memory.region,
            self._memory.layer_slices(layer, slots, remote),
            KV_TAG,
            payload,
            deadline_s=max(0.1, self._deadline_s()),
            stall_s=self._stall_s,
            priority=Priority.URGENT,
        )
        landed.add_done_callback(lambda future: self._landed(future, began, pending))

    def _landed(self, future: Future[TransferResult], began: float, pending: _Countdown) -> None:
        error = future.exception()
        try:
            if error is None:
                nbytes, landed_at = future.result().nbytes, time.perf_counter()
                with self._lock:
                    self._moved_nbytes += nbytes
                    self._began_at = min(self._began_at or began, began)
                    self._landed_at = max(self._landed_at, landed_at)
                self._on_moved(nbytes, landed_at - began)
        finally:  # `settle` waits for it
            pending.one_ended(error)

    def _finish(self, done: Future[None], error: BaseException | None) -> None:
        with self._lock:
            self._open.discard(done)
            if error is not None and self._error is None:
                self._error = error
        done.set_result(None)

    async def flush(self) -> None:
        """Wait until everything pushed has arrived. Raises RequestFailed if a push failed."""
        await self.settle()
        if self._error is not None:
            raise RequestFailed("push", f"KV could not be pushed: {self._error}")

    def trace(self, span: Span, *, peer: str) -> None:
        """Record the pushes in a span."""
        if span.is_on and self._moved_nbytes:
            to_monotonic_s = time.monotonic() - time.perf_counter()
            start_s, end_s = self._began_at + to_monotonic_s, self._landed_at + to_monotonic_s
            span.past("messenger push", start_s, end_s, bytes=self._moved_nbytes, peer=peer)

    async def stop(self) -> None:
        """Stop pushing; return when no write is in progress, whether successful or not."""
        with self._lock:
            self._stopped = True
        await self.settle()

    async def settle(self) -> None:
        """Wait until no push so far is in progress, whether successful or not."""
        while True:
            with self._lock:
                waiting = [asyncio.wrap_future(future) for future in self._open]
            if not waiting:
                return
            await asyncio.wait(waiting)
