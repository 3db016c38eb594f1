"""Parity mode: recomputes reused KV for a sample of requests and compares it with the content of the pool.

Digests show that bytes are unchanged since they were stored, not that they were right then. A sampled request reuses
the blocks before a random block and computes the rest; the pool's content from that block on is copied, compared, and
never used. With windowed groups, it computes everything, since their blocks end where the reuse ends; blocks are
compared in the lasting groups, and without any, none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from worker.slot_memory import EngineMemory


@dataclass(frozen=True, slots=True, eq=False)
class ParitySample:
    """The pool's content of blocks [first, first + n) of a prompt."""

    first: int
    slots: tuple[int, ...]  # slots in which the blocks are recomputed
    valid: NDArray[np.int32]  # [n] tokens
    content: tuple[NDArray[np.uint8], ...]  # per lasting group [n, slot_nbytes]


class ParityChecker:
    """Sampler of requests and comparer of their blocks."""

    def __init__(self, memory: EngineMemory, share: float) -> None:
        """`share`: fraction of all requests to sample, 0 to 1."""
        self._memory = memory
        self._share = share

    def cut(self, request_id: str, num_blocks: int) -> int | None:
        """Return the first of `num_blocks` reusable blocks that this request computes; None if it reuses all.

        The choice depends only on the request id, so all nodes that work on the request make the same one.
        """
        spec, chance = self._memory.spec, blake3(request_id.encode()).digest(length=16)
        if not num_blocks or int.from_bytes(chance[:8], "little") >= self._share * 2.0**64 or not spec.lasting:
            return None
        return 0 if spec.windowed else int.from_bytes(chance[8:], "little") % num_blocks

    def set_aside(self, first: int, slots: Sequence[int], valid: NDArray[np.int32]) -> ParitySample:
        """Copy the loaded content of the slots of blocks from `first` on before it is overwritten. Blocks."""
        content = (self._memory.slot_bytes(g, slots) for g in self._memory.spec.lasting)
        return ParitySample(first, tuple(slots), valid, tuple(content))

    def wrong_blocks(self, aside: ParitySample) -> list[int]:
        """Return the indices in the prompt of blocks that differ from the recomputed content of their slots. Blocks the
        thread.
        """
        self._memory.to_host_now(aside.slots)
        wrong = np.zeros(len(aside.slots), dtype=bool)
        for g, content in zip(self._memory.spec.lasting, aside.content, strict=True):
            wrong |= self._memory.differ(g, content, self._memory.slot_bytes(g, aside.slots), aside.valid)
        return [aside.first + int(i) for i in np.flatnonzero(wrong)]
