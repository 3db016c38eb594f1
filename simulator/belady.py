"""The limit: a pool that knows the future. Not a policy of the live pool, since nothing living can.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966, with bypass: a block is stored
only if it is used again before all that it could replace.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from simulator.chains import ChainedTrace

__all__ = ["BeladyRun", "run_belady"]


@dataclass(frozen=True, slots=True)
class BeladyRun:
    """`hits`: leading blocks found, per request."""

    hits: list[int]
    evictions: int
    not_stored: int


def run_belady(trace: ChainedTrace, capacity: int) -> BeladyRun:
    """Run the whole trace through a pool of `capacity` blocks.

    The block with the furthest next use leaves, and of one prompt's blocks the deepest.
    A block's next use is never after that of the blocks that follow it, so no prefix loses its beginning first.
    """
    next_requests = _next_requests(trace)
    never = len(trace.chains)
    next_use: dict[int, int] = {}  # of the blocks present
    furthest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block); entries go stale and are skipped
    hits: list[int] = []
    evictions = not_stored = 0
    for number, chain in enumerate(trace.chains):
        found = 0
        while found < len(chain.blocks) and chain.blocks[found] in next_use:
            found += 1
        hits.append(found)
        for depth, (block, upcoming) in enumerate(zip(chain.blocks, next_requests[number], strict=True)):
            is_new = block not in next_use
            if is_new and upcoming == never:
                not_stored += len(chain.blocks) - depth
                break
            if is_new and len(next_use) >= capacity:
                while furthest and next_use.get(furthest[0][2]) != -furthest[0][0]:
                    heapq.heappop(furthest)
                if not furthest or (-upcoming, -depth) <= furthest[0][:2]:
                    not_stored += len(chain.blocks) - depth
                    break
                del next_use[heapq.heappop(furthest)[2]]
                evictions += 1
            next_use[block] = upcoming
            heapq.heappush(furthest, (-upcoming, -depth, block))
    return BeladyRun(hits, evictions, not_stored)


def _next_requests(trace: ChainedTrace) -> list[list[int]]:
    """Per request and block of it, the number of the next request that has the block; their count if none has."""
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for number, chain in enumerate(trace.chains):
        for block in chain.blocks:
            uses[block].append(number)
    never = len(trace.chains)
    upcoming = []
    for number, chain in enumerate(trace.chains):
        row = []
        for block in chain.blocks:
            place = bisect_right(uses[block], number)
            row.append(uses[block][place] if place < len(uses[block]) else never)
        upcoming.append(row)
    return upcoming
