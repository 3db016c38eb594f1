"""The limit: a pool that knows the future. Not a policy of the live pool, since nothing living can.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966, with bypass: a block is stored
only if it is used again before all that it could replace.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict

from simulator.chains import ChainedTrace

__all__ = ["belady_hits"]


def belady_hits(trace: ChainedTrace, capacity: int) -> list[int]:
    """Leading blocks found per request. The block with the furthest next use leaves, of one prompt's the deepest.

    A block's next use is never after that of the blocks that follow it, so no prefix loses its beginning first.
    """
    next_requests = _next_requests(trace)
    never = len(trace.chains)
    next_use: dict[int, int] = {}  # of the blocks present
    furthest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block); entries go stale and are skipped
    hits = []
    for number, chain in enumerate(trace.chains):
        found = 0
        while found < len(chain.blocks) and chain.blocks[found] in next_use:
            found += 1
        hits.append(found)
        for depth, (block, upcoming) in enumerate(zip(chain.blocks, next_requests[number], strict=True)):
            if block not in next_use and upcoming == never:
                break
            if block not in next_use and len(next_use) >= capacity:
                while furthest and next_use.get(furthest[0][2]) != -furthest[0][0]:
                    heapq.heappop(furthest)
                if not furthest or (-upcoming, -depth) <= furthest[0][:2]:
                    break
                del next_use[heapq.heappop(furthest)[2]]
            next_use[block] = upcoming
            heapq.heappush(furthest, (-upcoming, -depth, block))
    return hits


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
