"""A trace as the cache simulator wants it: every prompt a chain of small whole numbers. Pure."""

from dataclasses import dataclass
from functools import cached_property

from traces import Trace

__all__ = ["Chain", "ChainedTrace", "chained"]

_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Chain:
    """One request's prompt. `blocks`: equal number, equal prefix; `last_tokens`: of a partial last block, 0 = full."""

    now_ns: int
    blocks: tuple[int, ...]
    last_tokens: int


@dataclass(frozen=True)
class ChainedTrace:
    """The prompts in order of arrival. `num_blocks`: different ones, what an infinite cache holds in the end."""

    source: str
    chains: tuple[Chain, ...]
    num_blocks: int

    @cached_property
    def num_references(self) -> int:
        """Blocks of all prompts."""
        return sum(len(chain.blocks) for chain in self.chains)


def chained(trace: Trace) -> ChainedTrace:
    """Number the blocks of `trace` by their whole prefix: an id after another predecessor is another block."""
    numbers: dict[tuple[int, int], int] = {}
    chains = []
    for row in trace:
        blocks = []
        parent = -1
        for block_id in row.hash_ids:
            parent = numbers.setdefault((parent, block_id), len(numbers))
            blocks.append(parent)
        last_tokens = row.input_length % trace.block_tokens
        chains.append(Chain(row.timestamp_ms * _MS, tuple(blocks), last_tokens))
    return ChainedTrace(trace.source, tuple(chains), len(numbers))
