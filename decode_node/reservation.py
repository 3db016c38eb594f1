"""One reservation on the decode node: slots under an epoch, and which blocks have arrived.

A block has arrived when every layer of it was verified against its producer's digest.

Threads: lives on the event loop, except `announce` and `over` (any thread, under `_pending_lock`) and `verified`
(verifier thread). `_pending` counts announced transfers that are not verified yet; `_settled` is set while it is 0.
`missing_blocks` answers only then, so that a block in verification is not requested again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messenger import Endpoint, RemoteKey
from worker.policy import TakenSlots
from worker.policy.kept_blocks import KeptBlocks
from worker.request import Request


@dataclass(frozen=True, slots=True)
class ArrivingBlocks:
    """Blocks of a prompt that arrive: in windowed layers those from `seen_from` on, and if set, only `kept` ones."""

    seen_from: int = 0
    windowed_layers: Sequence[int] = ()
    kept: KeptBlocks | None = None


ALL_BLOCKS = ArrivingBlocks()


class Reservation:
    """Slots reserved for `request`; shared blocks are present from the start."""

    def __init__(
        self,
        request: Request,
        taken: TakenSlots,
        *,
        num_layers: int,
        block_tokens: int,
        key: RemoteKey,
        writer: Endpoint,
        arriving: ArrivingBlocks = ALL_BLOCKS,
    ) -> None:
        self.request = request
        self.epoch = 0  # once it is open
        self.held_slots = taken.slots
        self.slots = taken.slots if arriving.kept is None else arriving.kept.slots(taken.slots)  # by block
        self.held_blocks = taken.num_shared
        self.window = taken.window
        self.key = key
        self.writer = writer
        self.num_blocks = -(-len(request.prompt) // block_tokens)
        self._block_tokens = block_tokens
        self._arrived = np.zeros((num_layers, self.num_blocks), dtype=bool)
        self._arrived[:, : taken.num_shared] = True
        if arriving.kept is not None:
            self._arrived[:, arriving.kept.has_sinks : arriving.kept.window_from] = True
        self._arrived[list(arriving.windowed_layers), : arriving.seen_from] = True
        self.seen_from = arriving.seen_from
        self.corrupt_blocks: set[int] = set()  # pulled damaged from a pool node
        self._pending = 0
        self._loop = asyncio.get_running_loop()
        self._pending_lock = threading.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self.first_token: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self.token_s = 0.0  # seconds to compute one prompt token on the prefill node
        self.tail_s = 0.0  # seconds from the first token until all KV was pushed
        self.committed_at = 0.0  # time.monotonic() of the commit
        self.is_preempted = False
        self.fenced = False  # the writer's key is revoked: nothing more can be written
        self.gone: str | None = None  # reason for rejecting commits

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the valid tokens of each prompt block: all, except in a partial last block."""
        return np.minimum(len(self.request.prompt) - blocks * self._block_tokens, self._block_tokens).astype(np.int32)

    def announce(self) -> None:
        """Count data that has arrived and is to be verified; `landed` follows. Any thread."""
        with self._pending_lock:
            self._pending += 1
            self._settled.clear()

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        """Report which blocks of an announced push match their digests. Any thread."""
        self._loop.call_soon_threadsafe(self.landed, [layer], blocks, right)

    def landed(self, layers: list[int], blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        """Record the verification of announced data; `right` is [blocks] or [layers, blocks]."""
        try:
            self._arrived[np.asarray(layers)[:, None], blocks] = right
        finally:  # `missing_blocks` waits for it
            self.over()

    def over(self) -> None:
        """End one announced transfer, successful or not. Any thread."""
        with self._pending_lock:
            self._pending -= 1
            if self._pending == 0:
                self._settled.set()

    async def missing_blocks(self) -> list[int]:
        """Wait until all announced data is verified; return the blocks that are missing or wrong."""
        while self._pending:  # the event may have been cleared again since it was set
            await self._settled.wait()
        return [int(b) for b in np.flatnonzero(~self._arrived.all(axis=0))]
