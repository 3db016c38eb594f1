"""Parity mode: for a sample of requests, reused KV is computed once more and compared with what the pool gave.

Digests tell that bytes are those that were stored; only computing them again tells that they were right when they were
stored. A chosen request reuses what lies before a block of its own choice and computes the rest; what the pool gave
from that block on is kept aside and compared, and never used.
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
    """What a pool gave of blocks [first, first + n) of a prompt."""

    first: int
    slots: tuple[int, ...]  # where they are computed
    valid: NDArray[np.int32]  # [n] tokens
    content: tuple[NDArray[np.uint8], ...]  # per group [n, slot_nbytes]


class ParityChecker:
    """Chooses requests, and compares."""

    def __init__(self, memory: EngineMemory, share: float) -> None:
        """`share`: of all requests, 0 to 1."""
        self._memory = memory
        self._share = share

    def cut(self, request_id: str, num_blocks: int) -> int | None:
        """The block, of `num_blocks` that could be reused, from which on this request computes; None: reuse them all.

        Every node that works on the request chooses alike.
        """
        chance = blake3(request_id.encode()).digest(length=16)
        if not num_blocks or int.from_bytes(chance[:8], "little") >= self._share * 2.0**64:
            return None
        return int.from_bytes(chance[8:], "little") % num_blocks

    def set_aside(self, first: int, slots: Sequence[int], valid: NDArray[np.int32]) -> ParitySample:
        """Copy what was loaded into the slots of blocks `first` and on, before it is computed there. Blocking."""
        content = (self._memory.slot_bytes(g, slots) for g in range(self._memory.num_groups))
        return ParitySample(first, tuple(slots), valid, tuple(content))

    def wrong_blocks(self, aside: ParitySample) -> list[int]:
        """The places in the prompt of blocks that are not what was computed in their slots since. Blocking."""
        self._memory.to_host(aside.slots)
        wrong = np.zeros(len(aside.slots), dtype=bool)
        for g in range(self._memory.num_groups):
            wrong |= self._memory.differ(g, aside.content[g], self._memory.slot_bytes(g, aside.slots), aside.valid)
        return [aside.first + int(i) for i in np.flatnonzero(wrong)]
