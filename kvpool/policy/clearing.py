"""Which whole slabs to clear so that slots of another size find room. Pure arithmetic on a tier's slots and copies.

Evicting blocks of one size in the order of their worth frees slots all over its slabs and no slab: a few that are used
often would keep every slab from another model for ever. So slabs are cleared whole, with all copies in them and all
that follow those; of the slabs around the next victims, those whose copies were used longest ago in the mean.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.policy.records import DRAM, Block, Copy
from kvpool.policy.slabs import SlabAllocator

__all__ = ["Clearing", "plan_clearing"]

_MAX_COPIES = 4096  # more are never cleared for one block


@dataclass(frozen=True)
class Clearing:
    """Copies to be given up, in this order: none before those that follow it; and the slabs to be made then."""

    copies: list[Copy]
    mean_last_use: float
    slabs: list[tuple[int, int]]  # size of a slot, first unit


def plan_clearing(
    tier: int,
    slabs: SlabAllocator,
    holders: Mapping[int, Copy],
    freed: Mapping[int, int],
    sizes: Sequence[int],
    victims: Sequence[Copy],
) -> Clearing | None:
    """What must leave so that a slot of each of the sizes finds room; None when it cannot be.

    `holders` are copies by offset of their slots, `freed` slots that are as good as free. `victims` say where to look.
    """
    # What is free already is taken while the rest is planned, so that it is not planned for twice.
    free, missing = _take_free(slabs, sizes)
    try:
        return _plan(tier, slabs, holders, freed, missing, victims)
    finally:
        for offset in free:
            slabs.free(offset)


def _take_free(slabs: SlabAllocator, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Offsets of free slots, and the sizes of those that there are none for: one for each slab that is needed."""
    offsets: list[int] = []
    missing: list[int] = []
    to_come: Counter[int] = Counter()
    for size in sizes:
        offset = None if to_come[size] else slabs.try_allocate(size)
        if offset is not None:
            offsets.append(offset)
            continue
        if not to_come[size]:
            missing.append(size)
            to_come[size] = slabs.slots_per_slab(size)
        to_come[size] -= 1
    return offsets, missing


def _plan(
    tier: int,
    slabs: SlabAllocator,
    holders: Mapping[int, Copy],
    freed: Mapping[int, int],
    sizes: Sequence[int],
    victims: Sequence[Copy],
) -> Clearing | None:
    chosen: dict[Copy, None] = {}
    taken: set[int] = set()  # units of the slabs to come
    made: list[tuple[int, int]] = []
    for size in sizes:
        windows = {
            window.start: window
            for victim in victims
            for offset in victim.offsets
            for window in slabs.windows(size, offset)
            if taken.isdisjoint(window)
        }
        plans = []
        for window in windows.values():
            copies = _with_followers(tier, slabs.used_offsets(window), holders, freed)
            if copies is not None:
                plans.append((_mean_last_use(copies), window.start, copies))
        if not plans:
            return None
        _, start, best = min(plans, key=lambda plan: plan[:2])
        chosen |= best
        taken |= set(windows[start])
        made.append((size, start))
    return Clearing(list(chosen), _mean_last_use(chosen), made)


def _with_followers(
    tier: int, offsets: Iterable[int], holders: Mapping[int, Copy], freed: Mapping[int, int]
) -> dict[Copy, None] | None:
    """The copies in these slots and all that follow them in the tier, the last first; None when one cannot leave."""
    order: dict[Copy, None] = {}
    for offset in offsets:
        if offset in freed:
            continue
        start = holders.get(offset)
        if start is None:
            return None
        stack = [(start, False)]
        while stack:
            copy, is_left = stack.pop()
            if is_left:
                order[copy] = None
            elif copy not in order:
                followers = _followers(tier, copy)
                if followers is None or len(order) + len(stack) > _MAX_COPIES:
                    return None
                stack.append((copy, True))
                stack += [(each, False) for each in followers]
    return order


def _followers(tier: int, copy: Copy) -> list[Copy] | None:
    """The copies of the tier that follow; None when this copy could not leave even after them."""
    if not copy.ready or copy.holds or copy.gone:
        return None
    block = copy.block
    found = [each for child in block.place.children() if child.block and (each := _copy_in(child.block, tier))]
    if len(found) != block.place.following(tier):
        return None  # one is on its way
    is_last = copy.other is None
    stays = len(found) != block.place.num_following or any(each.other for each in found)
    return None if is_last and stays else found


def _copy_in(block: Block, tier: int) -> Copy | None:
    return block.dram if tier == DRAM else block.ssd


def _mean_last_use(copies: Iterable[Copy]) -> float:
    uses = [copy.last_use for copy in copies]
    return sum(uses) / len(uses) if uses else 0.0
