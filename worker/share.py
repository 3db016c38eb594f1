"""What one member of a prefill group computes of a prompt, and which of the other members' chunks are here.

The engine's thread asks and waits, the verifying thread tells what has come, the event loop says that all is lost. A
layer of a chunk may be computed once that layer of all blocks before it is here and right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from worker.engine_memory import EngineMemory
from worker.errors import GroupLost
from worker.policy.shares import Span

__all__ = ["Share"]


class Share:
    """A Receiver of what the others push."""

    def __init__(
        self,
        memory: EngineMemory,
        slots: Sequence[int],
        *,
        num_blocks: int,
        held_blocks: int,
        stall_s: float,
        changed: Callable[[], None],
        forward: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """Blocks [0, num_blocks) of the prompt are needed here, blocks [0, held_blocks) are. `changed()`: the next
        chunk may be ready now. `forward(layer, blocks)` gets what came from others and is right. A step waits for a
        layer for `stall_s` after the last one came."""
        self.slots = list(slots)
        self.num_blocks = num_blocks
        self._memory = memory
        self._stall_s = stall_s
        self._changed = changed
        self._forward = forward
        self._num_layers = len(memory.place_of_layer)
        self._here = np.zeros((self._num_layers, num_blocks), dtype=bool)
        self._here[:, :held_blocks] = True
        self._leading = [held_blocks] * self._num_layers  # blocks that are here without a gap, by layer
        self._spans: list[Span] = []
        self._lost: GroupLost | None = None
        self._came = threading.Condition()
        self._last_s = time.monotonic()

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Members push whole blocks only."""
        return np.full(len(blocks), self._memory.block_tokens, dtype=np.int32)

    def begin(self, spans: Sequence[Span]) -> None:
        """Compute these chunks, in order."""
        with self._came:
            self._spans = list(spans)
            self._last_s = time.monotonic()

    # The engine's thread.

    @property
    def next_span(self) -> Span | None:
        """The chunk to be computed next; None: this member is done."""
        return self._spans[0] if self._spans else None

    @property
    def is_ready(self) -> bool:
        """Whether the engine should take it up: the next chunk's first layer can be computed, or all is lost.

        A step that has begun so waits only for steps that began before it, so that no two members wait for each other.
        """
        return self._lost is not None or self._has(0)

    def computed(self, layer: int) -> None:
        """A layer of the next chunk is written here: wait for what its next layer needs. Raises GroupLost."""
        start, end = self._spans[0]
        block_tokens = self._memory.block_tokens
        with self._came:
            self._mark(layer, np.arange(start // block_tokens, min(self.num_blocks, end // block_tokens)))
        if layer + 1 < self._num_layers:
            self.wait(layer + 1)

    def wait(self, layer: int) -> None:
        """Until this layer of all that comes before the next chunk is here. Raises GroupLost."""
        began_s = time.monotonic()
        with self._came:
            while self._lost is None and not self._has(layer):
                left_s = max(began_s, self._last_s) + self._stall_s - time.monotonic()
                if left_s <= 0:
                    self._lost = GroupLost(f"layer {layer} of an earlier chunk has not come for {self._stall_s:g} s")
                    break
                self._came.wait(left_s)
            if self._lost is not None:
                raise self._lost

    def over(self) -> None:
        """The next chunk is computed."""
        del self._spans[0]

    # Other threads.

    def announce(self) -> None:
        """Nobody waits for verifications as such."""

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        if not right.all():
            self.lose(f"{int((~right).sum())} blocks of layer {layer} came damaged")
            return
        self._memory.to_device([self.slots[b] for b in blocks], layer)
        with self._came:
            if self._lost is not None:
                return
            self._mark(layer, blocks)
            self._last_s = time.monotonic()
            self._came.notify_all()
        if self._forward is not None:
            self._forward(layer, blocks.tolist())
        if layer == 0:
            self._changed()

    def lose(self, why: str) -> None:
        """The others' chunks do not come any more: whoever waits for them is told."""
        with self._came:
            if self._lost is None:
                self._lost = GroupLost(why)
            self._came.notify_all()
        self._changed()

    @property
    def idle_s(self) -> float:
        """For how long nothing has come, where the next chunk is not ready; else 0."""
        with self._came:
            waits = self._lost is None and bool(self._spans) and not self._has(0)
            return time.monotonic() - self._last_s if waits else 0.0

    @property
    def leading_tokens(self) -> int:
        """Tokens at the prompt's beginning all of whose layers are here."""
        with self._came:
            return min(self._leading) * self._memory.block_tokens

    def _has(self, layer: int) -> bool:
        return bool(self._spans) and self._leading[layer] * self._memory.block_tokens >= self._spans[0][0]

    def _mark(self, layer: int, blocks: NDArray[np.int64]) -> None:
        here = self._here[layer]
        here[blocks] = True
        rest = here[self._leading[layer] :]
        self._leading[layer] += len(rest) if rest.all() else int(rest.argmin())
