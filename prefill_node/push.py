"""Pushes a request's KV to its decode node, or to another member of its group, layer by layer, while it is computed.

The engine's thread only says which layer of which tokens is written; digests and writes happen on the pusher's own
thread. A block goes when it is whole, the partial last one with the prompt's last chunk.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgpack
import numpy as np
from numpy.typing import NDArray

from messenger import Peer, Priority, RemoteKey, TransferResult
from telemetry.tracing import Span
from worker.errors import RequestFailed
from worker.kv_receiver import KV_TAG
from worker.slot_memory import EngineMemory


class Pusher:
    """One request's way to one receiver."""

    def __init__(
        self,
        memory: EngineMemory,
        peer: Peer,
        executor: ThreadPoolExecutor,
        moved: Callable[[int, float], None],
        *,
        epoch: int,
        key: RemoteKey,
        slots: Sequence[int],
        remote: Sequence[NDArray[np.int64]],
        prompt_len: int,
        push_from: int,
        deadline_s: Callable[[], float],
        stall_s: float,
    ) -> None:
        """`moved(nbytes, seconds)` hears of every push. `remote`: per group, the remote byte offset of every prompt
        block. Blocks below `push_from` the receiver has, or pulls itself: they are pushed only when it asks for them.
        Given up after `stall_s` without progress: until then the slots cannot be used again."""
        self._memory = memory
        self._peer = peer
        self._executor = executor
        self._moved = moved
        self._epoch, self._key = epoch, key
        self._slots = np.asarray(slots, dtype=np.int64)
        self._remote = remote
        self._prompt_len = prompt_len
        self._push_from = push_from
        self._deadline_s = deadline_s
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._open: set[Future[None]] = set()
        self._error: BaseException | None = None
        self._stopped = False
        self._moved_nbytes, self._began_at, self._landed_at = 0, 0.0, 0.0  # instants of time.perf_counter()

    def layer_written(self, layer: int, start: int, end: int) -> None:
        """Prompt tokens [start, end) of `layer` are in the cache. Called on the engine's thread."""
        block_tokens = self._memory.block_tokens
        last = end // block_tokens if end < self._prompt_len else -(-end // block_tokens)
        blocks = range(max(self._push_from, start // block_tokens), last)
        if blocks:
            self._memory.to_host(self._slots[blocks.start : blocks.stop].tolist(), layer)
            self._enqueue(layer, list(blocks))

    def push_blocks(self, blocks: Sequence[int]) -> None:
        """Push all layers of blocks that are already in the cache."""
        if blocks:
            self._memory.to_host([int(self._slots[b]) for b in blocks])
            for layer in self._memory.place_of_layer:
                self._enqueue(layer, list(blocks))

    def push_layer(self, layer: int, blocks: Sequence[int]) -> None:
        """Push one layer of blocks where the messenger can read them. Any thread."""
        blocks = [block for block in blocks if block >= self._push_from]
        if blocks:
            self._enqueue(layer, blocks)

    def _enqueue(self, layer: int, blocks: list[int]) -> None:
        done: Future[None] = Future()
        with self._lock:
            if self._stopped or self._error is not None:
                return
            self._open.add(done)
        try:
            self._executor.submit(self._send, layer, blocks, done)
        except RuntimeError as error:  # shut down
            self._finish(done, error)

    def _send(self, layer: int, blocks: list[int], done: Future[None]) -> None:
        try:
            if self._stopped:
                self._finish(done, None)
                return
            began = time.perf_counter()
            block_tokens = self._memory.block_tokens
            slots = self._slots[blocks].tolist()
            valid = np.minimum(self._prompt_len - np.asarray(blocks) * block_tokens, block_tokens).astype(np.int32)
            digests = self._memory.one_layer_digests(layer, slots, valid)
            remote = [offsets[blocks] for offsets in self._remote]
            payload = msgpack.packb(
                {"e": self._epoch, "l": layer, "b": blocks, "v": valid.tolist(), "d": digests.astype("<u8").tobytes()}
            )
            landed = self._peer.write_notify(
                self._key,
                self._memory.region,
                self._memory.layer_slices(layer, slots, remote),
                KV_TAG,
                payload,
                deadline_s=max(0.1, self._deadline_s()),
                stall_s=self._stall_s,
                priority=Priority.URGENT,
            )
        except Exception as error:
            self._finish(done, error)
            return
        landed.add_done_callback(lambda future: self._landed(future, began, done))

    def _landed(self, future: Future[TransferResult], began: float, done: Future[None]) -> None:
        error = future.exception()
        if error is None:
            nbytes, landed_at = future.result().nbytes, time.perf_counter()
            self._moved(nbytes, landed_at - began)
            with self._lock:
                self._moved_nbytes += nbytes
                self._began_at, self._landed_at = min(self._began_at or began, began), max(self._landed_at, landed_at)
        self._finish(done, error)

    def _finish(self, done: Future[None], error: BaseException | None) -> None:
        with self._lock:
            self._open.discard(done)
            if error is not None and self._error is None:
                self._error = error
        done.set_result(None)

    async def flush(self) -> None:
        """Wait until everything pushed has landed. Raises RequestFailed naming the decode node if something did not."""
        await self.settle()
        if self._error is not None:
            raise RequestFailed("push", f"KV could not be pushed: {self._error}")

    def trace(self, span: Span, *, peer: str) -> None:
        """Tell a span of what was pushed."""
        if span.is_on and self._moved_nbytes:
            to_monotonic_s = time.monotonic() - time.perf_counter()
            start_s, end_s = self._began_at + to_monotonic_s, self._landed_at + to_monotonic_s
            span.past("messenger push", start_s, end_s, bytes=self._moved_nbytes, peer=peer)

    async def stop(self) -> None:
        """Push nothing more; returns when no write is under way, whatever became of it."""
        with self._lock:
            self._stopped = True
        await self.settle()

    async def settle(self) -> None:
        """Returns when nothing pushed so far is under way, whatever became of it."""
        while True:
            with self._lock:
                waiting = [asyncio.wrap_future(future) for future in self._open]
            if not waiting:
                return
            await asyncio.wait(waiting)
