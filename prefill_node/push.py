"""Pushes of a request's KV to its decode node, or to another member of its group, layer by layer as it is computed.

The engine thread only reports which layer of which tokens is written, and begins to copy it to host memory if it is on
a GPU; a sender thread waits for the copy, writes, and computes digests while many bytes are on their way. A block is
pushed when it is complete, the partial last one with the prompt's last chunk. What is written before the destination is
known is pushed afterwards.

Threads: `due` and `WrittenLayers` on the engine thread, `_send` on a sender thread (for one destination one at a time,
in order), `_landed` on the messenger's thread, `open`, `flush`, `stop` and `settle` on the event loop. `_lock` guards
`_destination`, `_waiting`, `_open`, `_error`, `_stopped` and the byte counts. A future stays in `_open` from
`push_layers` until its copy and its writes have ended, and the slots must not be released before `_open` is empty.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messenger import Peer, Priority, RemoteKey, TransferResult
from messenger.staging import READY, Ticket, TicketsOfAll
from moonpool_proto.v1.worker_pb2 import BlockSlots
from prefill_node.senders import PushSenders
from telemetry.tracing import Span
from worker.errors import RequestFailed
from worker.kv_notification import KV_TAG, PushedBlocks, pack_notification
from worker.policy.kept_blocks import KeptBlocks
from worker.slot_memory import EngineMemory

_TOGETHER_NBYTES = 512 << 10
_TOGETHER_S = 0.005
_SHORT_STEP_S = 0.015


@dataclass(frozen=True, slots=True, eq=False)
class PushDestination:
    """Slots of a remote node to which one prompt's KV is pushed."""

    peer: Peer
    epoch: int
    key: RemoteKey  # grants write access to the slots
    offsets: Sequence[NDArray[np.int64]]  # per group, the remote byte offset of every prompt block
    push_from: int  # the receiver has or pulls the blocks below; they are pushed only on request
    held_blocks: int = 0  # in windowed groups, it has the blocks below and needs those that its first token sees
    takes_layer_ranges: bool = False  # one notification may announce several layers


def remote_offsets(groups: Iterable[BlockSlots]) -> list[NDArray[np.int64]]:
    """Return per group the byte offsets of the prompt's blocks on a remote node; -1 for those without a slot there."""
    return [
        np.concatenate([np.full(group.first_block, -1, np.int64), np.array(group.offsets, dtype=np.int64)])
        for group in groups
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PushedPrompt:
    """Prompt of `num_tokens` tokens whose blocks are in `slots`; in windowed groups, those before `seen_from` are not
    pushed."""

    slots: Sequence[int]
    num_tokens: int
    seen_from: int = 0
    kept: KeptBlocks | None = None  # if a rolling window slides in the prompt: the blocks that are pushed


@dataclass(frozen=True, slots=True, eq=False)
class DuePush:
    """Blocks of a prompt that one pusher pushes next, in every layer."""

    pusher: Pusher
    blocks: Sequence[int]


class WrittenLayers:
    """The layers that the step in progress has written; passes them to its pushers. Engine thread only.

    Waking senders for every layer of a short prompt costs the engine more than the pushes take: they compete for the
    interpreter. Layers are held back to be passed on together, up to `_TOGETHER_NBYTES`, as long as the first of them
    is not held back for more than `_TOGETHER_S`, or the whole step takes less than `_SHORT_STEP_S`, judged by the time
    between the last two layers.
    """

    def __init__(self, memory: EngineMemory) -> None:
        self._memory = memory
        self._first, self._last = min(memory.place_of_layer), max(memory.place_of_layer)
        self._num_layers = len(memory.place_of_layer)
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
        is_long = (
            now_s + self._layer_s - self._first_s > _TOGETHER_S and self._layer_s * self._num_layers > _SHORT_STEP_S
        )
        if at_once or is_long or self._nbytes >= _TOGETHER_NBYTES or layer == self._last:
            self._pass_on()
        if layer == self._last:
            self._due = []

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


@dataclass(slots=True, eq=False)
class _Push:
    """Layers of blocks to push, one after another, once they have been copied; `done` ends with the last write."""

    layers: Sequence[int]
    blocks: list[int]
    copied: Ticket
    done: Future[None]
    on_request: bool = False


class Pusher:
    """Pusher of one request's KV to one destination."""

    def __init__(
        self,
        memory: EngineMemory,
        senders: PushSenders,
        destination: PushDestination | None,
        *,
        prompt: PushedPrompt,
        deadline_s: Callable[[], float],
        stall_s: float,
        on_moved: Callable[[int, float], None],
    ) -> None:
        """Create a pusher.


        Without a destination, pushes wait until `open`. A push is given up after `stall_s` without progress, since its
        slots cannot be reused before it ends, and after `deadline_s()`. `on_moved(nbytes, seconds)` is called for every
        completed push.
        """
        self._memory = memory
        self._senders = senders
        self._slots = np.asarray(prompt.slots, dtype=np.int64)
        self._prompt_len = prompt.num_tokens
        self._destination: PushDestination | None = destination
        self._seen_from = prompt.seen_from
        self._kept = prompt.kept
        self._deadline_s = deadline_s
        self._stall_s = stall_s
        self._on_moved = on_moved
        self._lock = threading.Lock()
        self._waiting: list[_Push] = []  # for the destination
        self._open: set[Future[None]] = set()
        self._error: BaseException | None = None
        self._stopped = False
        self._moved_nbytes, self._began_at, self._landed_at = 0, 0.0, 0.0  # instants of time.perf_counter()

    def open(self, destination: PushDestination) -> None:
        """Begin to push to the destination, first what has been written so far. Once at most."""
        with self._lock:
            assert self._destination is None
            self._destination = destination
            pushes, self._waiting = self._waiting, []
        for push in pushes:
            self._submit(push)

    @property
    def first_block(self) -> int:
        """First block that is pushed, in some layer, without a request."""
        destination = self._destination
        if destination is None:
            return 0
        if self._memory.windows is None:
            return destination.push_from
        seen = max(self._seen_from, destination.held_blocks)
        return min(destination.push_from, seen) if self._memory.spec.lasting else seen

    @property
    def window_from(self) -> int:
        """First block that a rolling window has not left behind at the end of the prompt."""
        return 0 if self._kept is None else self._kept.window_from

    def _needed(self, layer: int, blocks: Sequence[int], *, on_request: bool) -> list[int]:
        """Return those of the blocks that the destination needs in this layer; it is known."""
        destination = self._destination
        assert destination is not None
        if self._memory.is_windowed(layer):
            first = max(self._seen_from, destination.held_blocks)
        else:
            first = 0 if on_request else destination.push_from
        return [block for block in blocks if block >= first]

    def due(self, start: int, end: int) -> list[DuePush]:
        """Return the push of the blocks that prompt tokens [start, end) complete; empty if there are none."""
        block_tokens = self._memory.block_tokens
        last = end // block_tokens if end < self._prompt_len else -(-end // block_tokens)
        blocks = list(range(max(self.first_block, self.window_from, start // block_tokens), last))
        if self._kept is not None and self._kept.has_sinks and end == self._prompt_len:
            blocks.insert(0, 0)
        return [DuePush(self, blocks)] if blocks else []

    def push_blocks(self, blocks: Sequence[int], *, on_request: bool = True) -> None:
        """Push all layers of blocks that are in the cache, on request or not. Not on the engine's thread."""
        if blocks:
            memory = self._memory
            copied = [memory.groups_to_host(self.slots_of(blocks), memory.spec.lasting)]
            if memory.windows is not None:
                held = self.slots_of([block for block in blocks if block >= self._seen_from])
                copied.append(memory.groups_to_host(held, memory.spec.windowed))
            self._push(sorted(memory.place_of_layer), list(blocks), TicketsOfAll(copied), on_request=on_request)

    def push_layer(self, layer: int, blocks: Sequence[int]) -> None:
        """Push one layer of blocks that the messenger can read. Any thread."""
        self.push_layers([layer], blocks, READY)

    def push_layers(self, layers: Sequence[int], blocks: Sequence[int], copied: Ticket) -> None:
        """Push layers of blocks, one after another, once they have been copied. Any thread."""
        blocks = [block for block in blocks if block >= self.first_block]
        if blocks:
            self._push(layers, blocks, copied)

    def _push(self, layers: Sequence[int], blocks: list[int], copied: Ticket, *, on_request: bool = False) -> None:
        push = _Push(layers, blocks, copied, Future(), on_request)
        with self._lock:
            if self._stopped or self._error is not None:
                return
            self._open.add(push.done)
            if self._destination is None:
                self._waiting.append(push)
                return
        self._submit(push)

    def _submit(self, push: _Push) -> None:
        """Send the push; without a destination, drop it once its copy has ended."""
        destination = self._destination
        try:
            self._senders.submit(push if destination is None else destination.peer, self._send, push)
        except RuntimeError as error:  # shut down
            self._finish(push.done, error)

    def slots_of(self, blocks: Sequence[int]) -> list[int]:
        """Return the blocks' slots in this node's memory."""
        slots: list[int] = self._slots[list(blocks)].tolist()
        return slots

    def _send(self, push: _Push) -> None:
        try:
            push.copied.wait()
        except Exception as error:
            self._finish(push.done, error)
            return
        destination = self._destination
        if destination is None or not push.blocks:
            self._finish(push.done, None)
            return
        ranges = self._ranges(push) if destination.takes_layer_ranges else [range(n, n + 1) for n in push.layers]
        pending = _Countdown(len(ranges), lambda error: self._finish(push.done, error))
        for layers in ranges:
            blocks = self._needed(layers.start, push.blocks, on_request=push.on_request)
            if self._stopped or not blocks:
                pending.one_ended(None)
                continue
            try:
                self._send_layers(destination, layers, blocks, pending)
            except Exception as error:
                pending.one_ended(error)

    def _ranges(self, push: _Push) -> list[range]:
        """Return the push's layers as ranges, each of which is sent at once: of layers with and without windows."""
        ranges: list[range] = []
        nbytes = 0
        is_windowed = self._memory.is_windowed
        for layer in push.layers:
            is_alike = bool(ranges) and is_windowed(ranges[-1].start) == is_windowed(layer)
            if is_alike and ranges[-1].stop == layer and nbytes < _TOGETHER_NBYTES:
                ranges[-1] = range(ranges[-1].start, layer + 1)
            else:
                ranges.append(range(layer, layer + 1))
                nbytes = 0
            nbytes += len(push.blocks) * self._memory.layer_nbytes(layer)
        return ranges

    def _send_layers(self, destination: PushDestination, layers: range, blocks: list[int], pending: _Countdown) -> None:
        began = time.perf_counter()
        memory, block_tokens = self._memory, self._memory.block_tokens
        slots = self.slots_of(blocks)
        valid = np.minimum(self._prompt_len - np.asarray(blocks) * block_tokens, block_tokens).astype(np.int32)
        remote = [offsets[blocks] for offsets in destination.offsets]

        def notification() -> bytes:
            digests = np.stack([memory.one_layer_digests(layer, slots, valid) for layer in layers])
            pushed = PushedBlocks(layers, np.asarray(blocks), valid, digests)
            return pack_notification(destination.epoch, destination.key.token, pushed)

        landed = destination.peer.write_notify(
            destination.key,
            memory.region,
            np.concatenate([memory.layer_slices(layer, slots, remote) for layer in layers]),
            KV_TAG,
            notification,  # computed while the bytes are on their way
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
        """Wait until no push so far is in progress, whether successful or not.

        Pushes that still wait for the destination are dropped, and the destination will miss their blocks.
        """
        while True:
            with self._lock:
                dropped, self._waiting = self._waiting, []
                running = [asyncio.wrap_future(future) for future in self._open]
            for push in dropped:
                self._submit(push)
            if not running:
                return
            await asyncio.wait(running)
