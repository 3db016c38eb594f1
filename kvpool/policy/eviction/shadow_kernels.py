"""Compiled loop that plays the uses of blocks through the shadow caches of all experts.

An expert is a policy with a cache of its own: LRU, ARC, and the reuse model's policy. All have the tier's capacity in
blocks and see the same uses. The loop also keeps the known rows in the order of their last use, and forgets the oldest.
No function checks its arguments.
"""

import functools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from jit.compiling import compiled_with_gil
from kvpool.policy.eviction import classic_shadows, model_shadow, reuse
from kvpool.policy.eviction import shadow_layout as at
from kvpool.policy.eviction.classic_shadows import (
    arc_drop_child,
    arc_evict,
    arc_unlink,
    arc_use,
    count_child,
    leave,
    length,
    link,
    lru_evict,
    lru_use,
    same_visit,
    unlink,
)
from kvpool.policy.eviction.model_shadow import (
    classify,
    follow,
    model_drop,
    model_use,
    record_use,
    worst_leaf,
    write_facts,
)

__all__ = ["shadow_kernel"]

_GHOST_CAPACITIES = 4


@njit
def use(rows: Any, head: Any, model: Any, row: Any, counts: Any, facts: Any) -> None:
    """Play one use of the row through all experts. Unless it `counts`, it is part of a use that was played before."""
    current = head[at.CURRENT_VISIT]
    before = rows[row, at.VISIT]
    visit = at.VISITS + current % at.VISIT_RING * at.VISIT_FIELDS
    head[visit + at.V_REACHED] = rows[row, at.DEPTH] + 1
    if before == current:
        return
    now_ns = head[visit + at.V_NOW]
    if before >= 0:
        unlink(rows, head, at.HISTORY, at.HISTORY_LINKS, row)
        if counts:
            rows[row, at.HITS] += 1
            follow(rows, head, row, visit)
    else:
        head[at.NUM_ROWS] += 1
    link(rows, head, at.HISTORY, at.HISTORY_LINKS, row, same_visit(rows, head, row))
    rows[row, at.VISIT] = current
    if counts:
        record_use(rows, head, row, now_ns)
    rows[row, at.USED_NS] = now_ns
    classify(rows, head, model, row, facts)
    if head[at.NUM_TOUCHED] < at.MAX_TOUCHED:
        head[at.TOUCHED + head[at.NUM_TOUCHED]] = row
        head[at.NUM_TOUCHED] += 1
    weight = 1.0 if rows[row, at.VALUE] == 0 else 2.0 ** (rows[row, at.VALUE] / 2)
    hits = lru_use(rows, head, row), arc_use(rows, head, row), model_use(rows, head, model, row, now_ns)
    if counts:
        for expert in range(at.NUM_EXPERTS):
            model[at.SCORES + expert] += hits[expert] * weight
    head[at.NUM_USES] += 1


@njit
def end_visit(rows: Any, head: Any, model: Any, facts: Any) -> None:
    """Classify the blocks of the visit by its final facts, and complete its records."""
    for i in range(head[at.NUM_TOUCHED]):
        row = head[at.TOUCHED + i]
        classify(rows, head, model, row, facts)
        number = rows[row, at.RECORD]
        if number >= 0:
            place = at.RECORDS + number * reuse.RECORD_FIELDS
            if head[place + reuse.R_VISIT] == head[at.CURRENT_VISIT]:
                num = write_facts(rows, head, row, facts)
                for j in range(num):
                    head[place + reuse.R_FACTS + j] = facts[j]
                head[place + reuse.R_STRATUM] = rows[row, at.CLASS] // reuse.NUM_CLASSES
    head[at.NUM_TOUCHED] = 0


@njit
def remove(rows: Any, head: Any, row: Any) -> None:
    """Take the row out of every cache in which it has no followers."""
    if rows[row, at.IN] & (1 << at.LRU) and rows[row, at.KIDS + at.LRU] == 0:
        unlink(rows, head, at.RECENT, at.LRU_LINKS, row)
        leave(rows, head, row, at.LRU)
        count_child(rows, row, at.LRU, -1)
    if rows[row, at.IN] & (1 << at.ARC) and rows[row, at.KIDS + at.ARC] == 0:
        arc_unlink(rows, head, row)
        rows[row, at.ARC_LIST] = 0
        leave(rows, head, row, at.ARC)
        arc_drop_child(rows, head, row)
    if rows[row, at.IN] & (1 << at.MODEL_POLICY) and rows[row, at.KIDS + at.MODEL_POLICY] == 0:
        model_drop(rows, head, row)


@njit
def shrink(rows: Any, head: Any, model: Any) -> None:
    """Evict from every cache that exceeds the capacity, which may have been reduced."""
    capacity = head[at.CAPACITY]
    while length(head, at.RECENT) > capacity and lru_evict(rows, head) >= 0:
        pass
    while length(head, at.ONCE) + length(head, at.AGAIN) > capacity and arc_evict(rows, head, False) >= 0:
        pass
    visit = at.VISITS + head[at.CURRENT_VISIT] % at.VISIT_RING * at.VISIT_FIELDS
    while head[at.NUM_STORED] > capacity:
        worst, _ = worst_leaf(rows, head, model, head[visit + at.V_NOW])
        model_drop(rows, head, worst)


@njit
def forget_oldest(rows: Any, head: Any, most: Any) -> None:
    """Forget the rows that were not used for longest until there are `most`, except those that are needed."""
    for _ in range(2 * head[at.NUM_EVENTS] + 16):
        row = head[at.LISTS + 3 * at.HISTORY + 1]
        if head[at.NUM_ROWS] <= most or row < 0 or head[at.NUM_FREED] >= at.MAX_FREED:
            return
        unlink(rows, head, at.HISTORY, at.HISTORY_LINKS, row)
        needed = rows[row, at.LIVE] or rows[row, at.IN] or rows[row, at.RECORD] >= 0
        if needed:
            link(rows, head, at.HISTORY, at.HISTORY_LINKS, row, -1)
            continue
        if rows[row, at.ARC_LIST]:
            unlink(rows, head, rows[row, at.ARC_LIST], at.ARC_LINKS, row)
            rows[row, at.ARC_LIST] = 0
        rows[row, at.VISIT] = -1
        rows[row, at.HITS] = rows[row, at.VALUE] = 0
        head[at.FREED + head[at.NUM_FREED]] = row
        head[at.NUM_FREED] += 1
        head[at.NUM_ROWS] -= 1


@njit
def play(rows: Any, head: Any, model: Any) -> None:
    """Process the events. The caller has set NUM_LEFT and NUM_FREED to 0."""
    facts = np.empty(reuse.NUM_COLUMNS, np.int64)
    i, stop = at.EVENTS, at.EVENTS + head[at.NUM_EVENTS]
    while i < stop:
        row, kind = head[i] >> 3, head[i] & 7
        i += 1
        if kind == at.NEXT or kind == at.LAST_PARTIAL:
            if not rows[row, at.IN]:  # else an expert counts it as a follower of its parent
                rows[row, at.PARENT], rows[row, at.DEPTH] = head[at.RUN_PARENT], head[at.RUN_DEPTH]
                rows[row, at.PARTIAL] = kind == at.LAST_PARTIAL
            head[at.RUN_PARENT] = row
            head[at.RUN_DEPTH] += 1
            use(rows, head, model, row, True, facts)
        elif kind == at.RUN:
            head[at.RUN_PARENT], head[at.RUN_DEPTH] = head[i], head[i + 1]
            i += 2
        elif kind == at.USE:
            use(rows, head, model, row, True, facts)
        elif kind == at.TOUCH:
            use(rows, head, model, row, False, facts)
        elif kind == at.REMOVE:
            remove(rows, head, row)
        else:
            end_visit(rows, head, model, facts)
            if kind == at.BEGIN:
                head[at.CURRENT_VISIT] = head[at.NUM_VISITS]
                head[at.NUM_VISITS] += 1
            else:
                head[at.CURRENT_VISIT] = head[i]
            visit = at.VISITS + head[at.CURRENT_VISIT] % at.VISIT_RING * at.VISIT_FIELDS
            if kind == at.BEGIN:
                head[visit + at.V_NOW], head[visit + at.V_BLOCKS], head[visit + at.V_KNOWN] = (
                    head[i],
                    head[i + 1],
                    head[i + 2],
                )
                head[visit + at.V_REACHED] = head[visit + at.V_TURN] = head[visit + at.V_PAUSE] = 0
                i += 3
            else:
                head[visit + at.V_BLOCKS] = max(head[visit + at.V_BLOCKS], head[i + 1])
                i += 2
    shrink(rows, head, model)
    forget_oldest(rows, head, _GHOST_CAPACITIES * head[at.CAPACITY] + reuse.MAX_RECORDS)
    head[at.NUM_EVENTS] = 0


@functools.cache
def shadow_kernel() -> Any:
    """Return `play` over (rows, head, model), compiled or loaded from the cache at the first call."""
    # The compiler's cache notices changes of this file only, and of the values that a closure holds.
    sources = (reuse, at, classic_shadows, model_shadow)
    version = zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in sources))

    def play_all(rows: Any, head: Any, model: Any) -> None:
        if version >= 0:
            play(rows, head, model)

    rows, head = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")
    model = types.Array(types.float64, 1, "C")
    return compiled_with_gil(play_all, types.void(rows, head, model))
