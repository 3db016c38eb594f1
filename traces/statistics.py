"""Prefix reuse of an infinite cache on a trace, and length statistics of its requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from traces.row import Trace, TraceRow


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


class ReuseCount:
    """Statistics of requests that arrive one by one. Memory grows with the number of different blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._cache, self._full_cache = InfiniteCache(), InfiniteCache()
        self._requests = self._references = self._hits = self._full_references = self._full_hits = 0
        self._prompt_tokens = self._output_tokens = self._reused_tokens = 0

    def add(self, row: TraceRow) -> None:
        """Count the next request."""
        hit = self._cache.match_and_insert(row.hash_ids)
        full = row.full_blocks(self._block_tokens)
        found = self._full_cache.match_and_insert(row.hash_ids[:full])
        self._requests += 1
        self._references += len(row.hash_ids)
        self._hits += hit
        self._full_references += full
        self._full_hits += min(hit, full)
        self._prompt_tokens += row.input_length
        self._output_tokens += row.output_length
        self._reused_tokens += reusable_tokens(found, row.input_length, self._block_tokens)

    def statistics(self) -> ReuseStatistics:
        """Return the statistics of all requests so far."""
        return ReuseStatistics(
            requests=self._requests,
            block_references=self._references,
            unique_blocks=len(self._cache),
            block_hit_rate=self._hits / self._references if self._references else 0.0,
            full_block_hit_rate=self._full_hits / self._full_references if self._full_references else 0.0,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            token_hit_rate=self._reused_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
        )


def reuse_statistics(trace: Trace) -> ReuseStatistics:
    """Return the trace's statistics, at its own block size."""
    count = ReuseCount(trace.block_tokens)
    for row in trace:
        count.add(row)
    return count.statistics()
