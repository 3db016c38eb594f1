"""Prefix reuse of an infinite cache on a trace, and length statistics of its requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from traces.row import Trace


@dataclass(frozen=True, slots=True)
class ReuseStatistics:
    """Prefix reuse of an infinite cache; every request's blocks are inserted at its arrival, in order.

    `block_hit_rate`: hits over references, in blocks, including partial last blocks.
    `full_block_hit_rate`: the same over full blocks only.
    `token_hit_rate`: tokens of reused full blocks over all prompt tokens. The last token of each prompt is always
    computed, since the first output token depends on it. This is the limit of a paged prefix cache.
    """

    requests: int
    block_references: int
    unique_blocks: int
    block_hit_rate: float
    full_block_hit_rate: float
    prompt_tokens: int
    output_tokens: int
    token_hit_rate: float


class InfiniteCache:
    """Prefix cache without eviction, whose hit rate is an upper bound."""

    def __init__(self) -> None:
        # Predecessor by id: in a trace whose ids are not chained, equal ids must not count as equal prefixes.
        self._parent: dict[int, int] = {}

    def match_and_insert(self, block_ids: Sequence[int]) -> int:
        """Return the number of leading blocks present, then insert all."""
        hits, matching, parent = 0, True, -1
        for block_id in block_ids:
            matching = matching and self._parent.get(block_id) == parent
            hits += matching
            self._parent[block_id] = parent
            parent = block_id
        return hits

    def __len__(self) -> int:
        return len(self._parent)


def reusable_tokens(hit_blocks: int, prompt_tokens: int, block_tokens: int) -> int:
    """Return the prompt tokens saved by `hit_blocks` cached leading blocks: full blocks only, and never the prompt's
    last token."""
    return block_tokens * min(hit_blocks, max(prompt_tokens - 1, 0) // block_tokens)


def token_hit_rate(prompts: Iterable[tuple[Sequence[int], int]], block_tokens: int) -> float:
    """Return ReuseStatistics.token_hit_rate of (block ids, prompt tokens) pairs in order of arrival."""
    cache, reused, total = InfiniteCache(), 0, 0
    for block_ids, prompt_tokens in prompts:
        full = block_ids[: prompt_tokens // block_tokens]
        reused += reusable_tokens(cache.match_and_insert(full), prompt_tokens, block_tokens)
        total += prompt_tokens
    return reused / total if total else 0.0


def reuse_statistics(trace: Trace) -> ReuseStatistics:
    """Return the trace's statistics, at its own block size."""
    cache = InfiniteCache()
    references = hits = full_references = full_hits = 0
    for row in trace:
        hit = cache.match_and_insert(row.hash_ids)
        full = row.full_blocks(trace.block_tokens)
        references += len(row.hash_ids)
        hits += hit
        full_references += full
        full_hits += min(hit, full)
    return ReuseStatistics(
        requests=len(trace),
        block_references=references,
        unique_blocks=len(cache),
        block_hit_rate=hits / references if references else 0.0,
        full_block_hit_rate=full_hits / full_references if full_references else 0.0,
        prompt_tokens=sum(row.input_length for row in trace),
        output_tokens=sum(row.output_length for row in trace),
        token_hit_rate=token_hit_rate(((row.hash_ids, row.input_length) for row in trace), trace.block_tokens),
    )
