"""Compiled shadow caches under LRU and ARC, without data. No function checks its arguments.

Each cache stores a block only after its parent and evicts it only after its followers, as the tier does. In each list,
the blocks of one request are ordered from its first (most recent) to its last, so that the least recent block of a list
is nearly always one without followers.
"""

from typing import Any

from numba import njit

from kvpool.policy.eviction import shadow_layout as at

_WALK = 64


@njit
def unlink(rows: Any, head: Any, which: Any, links: Any, row: Any) -> None:
    first = at.LISTS + 3 * which
    newer, older = rows[row, links], rows[row, links + 1]
    if newer < 0:
        head[first] = older
    else:
        rows[newer, links + 1] = older
    if older < 0:
        head[first + 1] = newer
    else:
        rows[older, links] = newer
    head[first + 2] -= 1


@njit
def link(rows: Any, head: Any, which: Any, links: Any, row: Any, newer: Any) -> None:
    """Insert the row right behind `newer`; -1: as the most recent."""
    first = at.LISTS + 3 * which
    older = head[first] if newer < 0 else rows[newer, links + 1]
    rows[row, links], rows[row, links + 1] = newer, older
    if newer < 0:
        head[first] = row
    else:
        rows[newer, links + 1] = row
    if older < 0:
        head[first + 1] = row
    else:
        rows[older, links] = row
    head[first + 2] += 1


@njit
def length(head: Any, which: Any) -> Any:
    return head[at.LISTS + 3 * which + 2]


@njit
def oldest_leaf(rows: Any, head: Any, which: Any, links: Any, expert: Any) -> Any:
    """Return the least recent row of the list without followers; -1 if there is none among the last ones."""
    row = head[at.LISTS + 3 * which + 1]
    for _ in range(_WALK):
        if row < 0 or rows[row, at.KIDS + expert] == 0:
            return row
        row = rows[row, links]
    return -1


@njit
def same_visit(rows: Any, head: Any, row: Any) -> Any:
    """Return the row's parent if the current visit has used it, else -1."""
    parent = rows[row, at.PARENT]
    return parent if parent >= 0 and rows[parent, at.VISIT] == head[at.CURRENT_VISIT] else -1


@njit
def has_parent(rows: Any, row: Any, expert: Any) -> Any:
    parent = rows[row, at.PARENT]
    return parent < 0 or (rows[parent, at.IN] >> expert) & 1 == 1


@njit
def count_child(rows: Any, row: Any, expert: Any, change: Any) -> Any:
    """Change the parent's number of followers. Returns the parent if it has none now, else -1."""
    parent = rows[row, at.PARENT]
    if parent >= 0:
        rows[parent, at.KIDS + expert] += change
        if rows[parent, at.KIDS + expert] == 0:
            return parent
    return -1


@njit
def leave(rows: Any, head: Any, row: Any, expert: Any) -> None:
    """Take the row out of the expert's cache; report it if the tier, which follows this expert, has it."""
    rows[row, at.IN] &= ~(1 << expert)
    if expert == head[at.FOLLOWED] and rows[row, at.LIVE]:
        if head[at.NUM_LEFT] < at.MAX_LEFT:
            head[at.LEFT + head[at.NUM_LEFT]] = row
        head[at.NUM_LEFT] += 1


@njit
def lru_evict(rows: Any, head: Any) -> Any:
    row = oldest_leaf(rows, head, at.RECENT, at.LRU_LINKS, at.LRU)
    if row >= 0:
        unlink(rows, head, at.RECENT, at.LRU_LINKS, row)
        leave(rows, head, row, at.LRU)
        count_child(rows, row, at.LRU, -1)
    return row


@njit
def lru_use(rows: Any, head: Any, row: Any) -> Any:
    if rows[row, at.IN] & (1 << at.LRU):
        unlink(rows, head, at.RECENT, at.LRU_LINKS, row)
        link(rows, head, at.RECENT, at.LRU_LINKS, row, same_visit(rows, head, row))
        return 1
    if not has_parent(rows, row, at.LRU):
        return 0
    count_child(rows, row, at.LRU, 1)
    while length(head, at.RECENT) >= head[at.CAPACITY]:
        if lru_evict(rows, head) < 0:
            count_child(rows, row, at.LRU, -1)
            return 0
    rows[row, at.IN] |= 1 << at.LRU
    link(rows, head, at.RECENT, at.LRU_LINKS, row, same_visit(rows, head, row))
    return 0


@njit
def arc_unlink(rows: Any, head: Any, row: Any) -> None:
    if rows[row, at.PARKED]:
        rows[row, at.PARKED] = 0
        head[at.LISTS + 3 * rows[row, at.ARC_LIST] + 2] -= 1
    else:
        unlink(rows, head, rows[row, at.ARC_LIST], at.ARC_LINKS, row)


@njit
def arc_drop_child(rows: Any, head: Any, row: Any) -> None:
    """Count one follower less of the row's parent, which becomes the least recent of its list if it was parked."""
    parent = count_child(rows, row, at.ARC, -1)
    if parent >= 0 and rows[parent, at.PARKED]:
        which = rows[parent, at.ARC_LIST]
        arc_unlink(rows, head, parent)
        link(rows, head, which, at.ARC_LINKS, parent, head[at.LISTS + 3 * which + 1])


@njit
def arc_oldest_leaf(rows: Any, head: Any, which: Any) -> Any:
    """Return the least recent row of the list without followers, or -1.

    Rows with followers that are less recent, which the other list may hold, are parked: counted, but not linked.
    """
    while True:
        row = head[at.LISTS + 3 * which + 1]
        if row < 0 or rows[row, at.KIDS + at.ARC] == 0:
            return row
        unlink(rows, head, which, at.ARC_LINKS, row)
        rows[row, at.PARKED] = 1
        head[at.LISTS + 3 * which + 2] += 1


@njit
def arc_evict(rows: Any, head: Any, returns_to_again: Any) -> Any:
    surplus = length(head, at.ONCE) - head[at.ARC_TARGET]
    which = at.ONCE if surplus > 0 or (surplus == 0 and returns_to_again) else at.AGAIN
    row = arc_oldest_leaf(rows, head, which)
    if row < 0:
        which = at.ONCE + at.AGAIN - which
        row = arc_oldest_leaf(rows, head, which)
    if row >= 0:
        arc_unlink(rows, head, row)
        leave(rows, head, row, at.ARC)
        arc_drop_child(rows, head, row)
        rows[row, at.ARC_LIST] = which + 2
        link(rows, head, which + 2, at.ARC_LINKS, row, -1)
    return row


@njit
def arc_forget_oldest(rows: Any, head: Any, which: Any) -> None:
    row = head[at.LISTS + 3 * which + 1]
    unlink(rows, head, which, at.ARC_LINKS, row)
    rows[row, at.ARC_LIST] = 0


@njit
def arc_use(rows: Any, head: Any, row: Any) -> Any:
    """Use the row as in ARC (`arc`), with its ghosts. ARC_LIST is 0 for rows that are in no list."""
    which = rows[row, at.ARC_LIST]
    if which == at.ONCE or which == at.AGAIN:
        arc_unlink(rows, head, row)
        hit = 1
    else:
        hit = 0
        if not has_parent(rows, row, at.ARC):
            return 0
        capacity = head[at.CAPACITY]
        once, again = length(head, at.ONCE_GHOSTS), length(head, at.AGAIN_GHOSTS)
        if which == at.ONCE_GHOSTS:
            head[at.ARC_TARGET] = min(capacity, head[at.ARC_TARGET] + max(1, again // once))
        elif which == at.AGAIN_GHOSTS:
            head[at.ARC_TARGET] = max(0, head[at.ARC_TARGET] - max(1, once // again))
        count_child(rows, row, at.ARC, 1)
        while length(head, at.ONCE) + length(head, at.AGAIN) >= capacity:
            if arc_evict(rows, head, which == at.AGAIN_GHOSTS) < 0:
                arc_drop_child(rows, head, row)
                return 0
        if which:
            unlink(rows, head, which, at.ARC_LINKS, row)
        rows[row, at.IN] |= 1 << at.ARC
    target = at.AGAIN if which else at.ONCE
    parent = same_visit(rows, head, row)
    if parent >= 0 and (rows[parent, at.ARC_LIST] != target or rows[parent, at.PARKED]):
        parent = -1
    rows[row, at.ARC_LIST] = target
    link(rows, head, target, at.ARC_LINKS, row, parent)
    while length(head, at.ONCE_GHOSTS) and length(head, at.ONCE) + length(head, at.ONCE_GHOSTS) > head[at.CAPACITY]:
        arc_forget_oldest(rows, head, at.ONCE_GHOSTS)
    known = length(head, at.ONCE) + length(head, at.ONCE_GHOSTS) + length(head, at.AGAIN)
    while length(head, at.AGAIN_GHOSTS) and known + length(head, at.AGAIN_GHOSTS) > 2 * head[at.CAPACITY]:
        arc_forget_oldest(rows, head, at.AGAIN_GHOSTS)
    return hit
