"""Compiled shadow cache of the reuse model's policy, and the records from which the model learns.

The policy evicts, of the blocks without followers, the one of the lowest index (`reuse`), and refuses a block whose
index is lower still. It compares a sample of them and the best candidates of the last sample, which is nearly as good
as a full scan. No function checks its arguments.
"""

import math
from typing import Any

from numba import njit

from kvpool.policy.eviction import reuse
from kvpool.policy.eviction import shadow_layout as at
from kvpool.policy.eviction.classic_shadows import count_child, has_parent, leave

_DRAWS = 32


@njit
def copy_to_leaf(rows: Any, row: Any) -> None:
    place = rows[row, at.LEAF_PLACE]
    rows[place, at.LEAF_USED_NS], rows[place, at.LEAF_CLASS] = rows[row, at.USED_NS], rows[row, at.CLASS]
    rows[place, at.LEAF_VALUE] = rows[row, at.VALUE]


@njit
def add_leaf(rows: Any, head: Any, row: Any) -> None:
    rows[row, at.LEAF_PLACE] = head[at.NUM_LEAVES]
    rows[head[at.NUM_LEAVES], at.LEAF] = row
    head[at.NUM_LEAVES] += 1
    copy_to_leaf(rows, row)


@njit
def drop_leaf(rows: Any, head: Any, row: Any) -> None:
    head[at.NUM_LEAVES] -= 1
    place, last = rows[row, at.LEAF_PLACE], rows[head[at.NUM_LEAVES], at.LEAF]
    rows[place, at.LEAF] = last
    rows[last, at.LEAF_PLACE] = place
    copy_to_leaf(rows, last)
    rows[row, at.LEAF_PLACE] = -1


@njit
def index_of(model: Any, used_ns: Any, reuse_class: Any, value: Any, now_ns: Any) -> Any:
    """Return the expected uses per second of a block, weighted by its value."""
    age_s = (now_ns - used_ns) * 1e-9
    place = 0
    if age_s >= 0.25:
        place = min(int((math.log2(age_s) + 2) * 4 + 0.5) + 1, reuse.NUM_AGES - 1)
    index = model[at.INDEX + reuse_class * reuse.NUM_AGES + place]
    return index if value == 0 else index * 2.0 ** (value / 2)


@njit
def index_of_leaf(rows: Any, model: Any, place: Any, now_ns: Any) -> Any:
    used_ns, reuse_class = rows[place, at.LEAF_USED_NS], rows[place, at.LEAF_CLASS]
    return index_of(model, used_ns, reuse_class, rows[place, at.LEAF_VALUE], now_ns)


@njit
def draw(head: Any, below: Any) -> Any:
    """Return the next pseudo-random number from 0 to `below` - 1 (xorshift)."""
    x = head[at.RANDOM]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    head[at.RANDOM] = x
    return x % below


@njit
def is_older(rows: Any, row: Any, other: Any) -> Any:
    if rows[row, at.VISIT] != rows[other, at.VISIT]:
        return rows[row, at.VISIT] < rows[other, at.VISIT]
    return rows[row, at.DEPTH] > rows[other, at.DEPTH]


@njit
def worst_leaf(rows: Any, head: Any, model: Any, now_ns: Any) -> Any:
    """Return the leaf of the lowest index among all, or among a sample and the best candidates of the last sample.

    Keeping candidates makes a sample of 32 nearly as good as a full scan. Of equal indices, the oldest leaf is chosen.
    """
    num = head[at.NUM_LEAVES]
    worst, worst_index = -1, 0.0
    if num <= 2 * _DRAWS:
        for i in range(num):
            row, index = rows[i, at.LEAF], index_of_leaf(rows, model, i, now_ns)
            if worst < 0 or index < worst_index or (index == worst_index and is_older(rows, row, worst)):
                worst, worst_index = row, index
        return worst, worst_index
    kept = 0
    indices = model[at.POOL_INDICES :]
    old = head[at.POOL : at.POOL + at.POOL_SIZE].copy()
    for i in range(at.POOL_SIZE + _DRAWS):
        if i < at.POOL_SIZE:
            row = old[i]
            leaf = -1 if row < 0 else rows[row, at.LEAF_PLACE]
            if leaf < 0:
                continue
        else:
            leaf = draw(head, num)
            row = rows[leaf, at.LEAF]
        index = index_of_leaf(rows, model, leaf, now_ns)
        if kept == at.POOL_SIZE and index >= indices[kept - 1]:
            continue
        place = kept if kept < at.POOL_SIZE else at.POOL_SIZE - 1
        known = False
        for j in range(kept):
            known |= head[at.POOL + j] == row
        if known:
            continue
        while place > 0 and (
            indices[place - 1] > index
            or (indices[place - 1] == index and is_older(rows, row, head[at.POOL + place - 1]))
        ):
            indices[place], head[at.POOL + place] = indices[place - 1], head[at.POOL + place - 1]
            place -= 1
        indices[place], head[at.POOL + place] = index, row
        kept = min(kept + 1, at.POOL_SIZE)
    for i in range(kept, at.POOL_SIZE):
        head[at.POOL + i] = -1
    return head[at.POOL], indices[0]


@njit
def bits(number: Any, most: Any) -> Any:
    length = 0
    while number > 0:
        number >>= 1
        length += 1
    return min(length, most)


@njit
def write_facts(rows: Any, head: Any, row: Any, out: Any) -> Any:
    """Write the factors that apply to the row's last use into `out` (see `reuse`). Returns their number."""
    visit = at.VISITS + rows[row, at.VISIT] % at.VISIT_RING * at.VISIT_FIELDS
    hits, turn, blocks = rows[row, at.HITS], head[visit + at.V_TURN], head[visit + at.V_BLOCKS]
    if rows[row, at.PARTIAL]:
        out[0] = reuse.PARTIAL
        return 1
    later = 1 if turn > 0 else 0
    out[0] = reuse.HITS + bits(hits, 9) if hits else reuse.HITS + 10 + later
    out[1] = reuse.TURN + bits(turn, 7)
    out[2] = reuse.PROMPT + bits(blocks, 11)
    num = 3
    known = head[visit + at.V_KNOWN]
    if not hits:
        out[num] = reuse.PLACE + 10 * later + bits(rows[row, at.DEPTH] - known, 9)
        num += 1
    if later:
        out[num] = reuse.NEW + bits(blocks - known, 9)
        pause_s = head[visit + at.V_PAUSE] * 1e-9
        out[num + 1] = reuse.PAUSE + min(max(int(math.log2(pause_s + 0.01)) + 3, 0), 15)
        num += 2
    if hits > turn:
        out[num] = reuse.SHARED
        num += 1
    return num


@njit
def stratum_of(head: Any, row_hits: Any, visit: Any) -> Any:
    """Return the stratum of a use: the first of a block, one of a shared prefix, or a later turn by its pause."""
    if head[visit + at.V_TURN] == 0:
        return 1 if row_hits else 0
    pause_s = head[visit + at.V_PAUSE] // 1_000_000_000
    return 2 + (pause_s >= 8) + (pause_s >= 64) + (pause_s >= 512)


@njit
def classify(rows: Any, head: Any, model: Any, row: Any, facts: Any) -> None:
    """Set the row's class from the facts about its last use."""
    ratio = 0.0
    for i in range(write_facts(rows, head, row, facts)):
        ratio += model[at.FACTORS + facts[i]]
    level = min(max(round((ratio / reuse.LOG2 + 8) * reuse.STEPS), 0), reuse.NUM_CLASSES - 1)
    stratum = stratum_of(head, rows[row, at.HITS], at.VISITS + rows[row, at.VISIT] % at.VISIT_RING * at.VISIT_FIELDS)
    rows[row, at.CLASS] = stratum * reuse.NUM_CLASSES + int(level)
    if rows[row, at.LEAF_PLACE] >= 0:
        copy_to_leaf(rows, row)


@njit
def model_add(rows: Any, head: Any, row: Any) -> None:
    rows[row, at.IN] |= 1 << at.MODEL_POLICY
    head[at.NUM_STORED] += 1
    if rows[row, at.KIDS + at.MODEL_POLICY] == 0:
        add_leaf(rows, head, row)


@njit
def model_drop(rows: Any, head: Any, row: Any) -> None:
    drop_leaf(rows, head, row)
    leave(rows, head, row, at.MODEL_POLICY)
    head[at.NUM_STORED] -= 1
    parent = count_child(rows, row, at.MODEL_POLICY, -1)
    if parent >= 0:
        add_leaf(rows, head, parent)


@njit
def model_use(rows: Any, head: Any, model: Any, row: Any, now_ns: Any) -> Any:
    if (rows[row, at.IN] >> at.MODEL_POLICY) & 1:
        return 1
    if not has_parent(rows, row, at.MODEL_POLICY):
        return 0
    parent = rows[row, at.PARENT]
    if parent >= 0:
        if rows[parent, at.KIDS + at.MODEL_POLICY] == 0:
            drop_leaf(rows, head, parent)
        rows[parent, at.KIDS + at.MODEL_POLICY] += 1
    while head[at.NUM_STORED] >= head[at.CAPACITY]:
        worst, worst_index = worst_leaf(rows, head, model, now_ns)
        index = index_of(model, now_ns, rows[row, at.CLASS], rows[row, at.VALUE], now_ns)
        if worst < 0 or index < worst_index:
            parent = count_child(rows, row, at.MODEL_POLICY, -1)
            if parent >= 0:
                add_leaf(rows, head, parent)
            return 0
        model_drop(rows, head, worst)
    model_add(rows, head, row)
    return 0


@njit
def record_use(rows: Any, head: Any, row: Any, now_ns: Any) -> None:
    """Complete the open record of the row's last use; record a sample of the uses."""
    last = rows[row, at.RECORD]
    if last >= 0:
        place = at.RECORDS + last * reuse.RECORD_FIELDS
        head[place + reuse.R_GAP] = max(now_ns - head[place + reuse.R_BEGUN], 1_000_000)
        rows[row, at.RECORD] = -1
    head[at.NUM_SKIPPED] += 1
    # The ring must span the uses of several times the blocks in the pool.
    if head[at.NUM_SKIPPED] < max(reuse.MIN_STEP, 4 * head[at.NUM_STORED] // reuse.MAX_RECORDS):
        return
    head[at.NUM_SKIPPED] = 0
    number = head[at.NUM_RECORDS] % reuse.MAX_RECORDS
    place = at.RECORDS + number * reuse.RECORD_FIELDS
    if head[at.NUM_RECORDS] >= reuse.MAX_RECORDS and rows[head[place + reuse.R_ROW], at.RECORD] == number:
        rows[head[place + reuse.R_ROW], at.RECORD] = -1
    head[at.NUM_RECORDS] += 1
    rows[row, at.RECORD] = number
    head[place + reuse.R_ROW], head[place + reuse.R_BEGUN], head[place + reuse.R_GAP] = row, now_ns, -1
    head[place + reuse.R_VISIT] = head[at.CURRENT_VISIT]
    head[place + reuse.R_STRATUM] = 0
    for i in range(reuse.NUM_COLUMNS):
        head[place + reuse.R_FACTS + i] = reuse.NONE


@njit
def follow(rows: Any, head: Any, row: Any, visit: Any) -> None:
    """Update the visit with the last visit of the block that ends its known part.

    If most of the earlier prompt is used again, both belong to the same conversation; otherwise they only share a
    prefix.
    """
    known = rows[row, at.DEPTH] + 1
    head[visit + at.V_KNOWN] = known
    head[visit + at.V_TURN] = head[visit + at.V_PAUSE] = 0
    before = rows[row, at.VISIT]
    if head[at.CURRENT_VISIT] - before < at.VISIT_RING:
        place = at.VISITS + before % at.VISIT_RING * at.VISIT_FIELDS
        blocks = head[place + at.V_BLOCKS]
        if blocks - known <= max(1, blocks // 2):
            head[visit + at.V_TURN] = head[place + at.V_TURN] + 1
            head[visit + at.V_PAUSE] = head[visit + at.V_NOW] - head[place + at.V_NOW]
