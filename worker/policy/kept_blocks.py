"""Blocks of a prompt in which a rolling window has slid: which ones the next token sees, and where they lie. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.rolling import RollingWindow


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Blocks of a prompt of `num_blocks` that the token after it sees.

    Those from `window_from` on, in slots that blocks use in turn, and the sinks, which stand for block 0.
    """

    num_blocks: int
    window_from: int
    has_sinks: bool

    @classmethod
    def of(cls, rolling: RollingWindow, num_tokens: int) -> KeptBlocks:
        """Return the blocks of a prompt of `num_tokens`, more than the window has."""
        block_tokens = rolling.block_tokens
        window_from = rolling.start(num_tokens) // block_tokens
        return cls(-(-num_tokens // block_tokens), window_from, rolling.sinks > 0)

    def slots(self, held: Sequence[int]) -> list[int]:
        """Return the slot of each block, of those that a request holds on a node; undefined if it is not kept."""
        return [held[-1], *(held[block % (len(held) - 1)] for block in range(1, self.num_blocks))]
