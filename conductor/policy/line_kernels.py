"""The compiled loops over those that wait for a prefill: which ticket a newcomer uses, and the work that goes before it
at each node. The order is that of `worker.policy.turns`. They only compute, and check no arguments.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from conductor.policy.compiling import decision_kernel
from conductor.policy.fairness import advanced_ns
from conductor.policy.kernels import tally_row
from conductor.policy.requests import NONE, PREFILL_NODE, PREFILL_NS, STARTED
from conductor.policy.turn_columns import ACCOUNT, AGES, ARRIVED, DUE, LEVEL, PRIORITY, TICKET

__all__ = ["EARLIER", "IS_CANDIDATE", "LATER", "LineKernels", "line_kernels", "line_up"]

WORK, EARLIER, LATER, IS_CANDIDATE = range(4)  # rows of `room`
_LEAST, _MOST = -(1 << 62), 1 << 62


def _before(turns: Any, row: Any, priority: Any, due: Any, arrived: Any) -> Any:
    """Whether the row goes before a newcomer whose ticket it has."""
    if turns[PRIORITY, row] != priority:
        return turns[PRIORITY, row] < priority
    if turns[DUE, row] != due:
        return turns[DUE, row] < due
    return turns[ARRIVED, row] <= arrived


_goes_before: Any = numba.njit(_before)
_tally_row: Any = numba.njit(tally_row)
_advanced_ns: Any = numba.njit(advanced_ns)


def line_up(
    table: Any,
    turns: Any,
    rows: Any,
    slots: Any,
    me: Any,
    clock_ns: Any,
    started_ns: Any,
    finish_ns: Any,
    sums: Any,
    room: Any,
    queue_s: Any,
) -> Any:
    """(virtual time, the newcomer's ticket), and into `queue_s` seconds of prefills that go before it, per candidate.

    `me`: now, level, account, priority, due, arrived, ages. `clock_ns`, `started_ns`: its class's `VirtualClock`.
    `finish_ns`: of its account. Into `sums` [slots, 3] what `tally` finds, since this looks at every row, too. Into
    `room` [4, slots]: of the account's own that go before it, the largest ticket, and of those that go after it, the
    smallest.
    """
    now, level, account, priority, due, arrived, ages = me
    room[EARLIER, :] = _LEAST
    room[LATER, :] = _MOST
    room[IS_CANDIDATE, :] = 0
    for c in range(len(slots)):
        room[IS_CANDIDATE, slots[c]] = 1
    has_aged = now >= ages
    least, waiting, in_order = -1, 0, not has_aged
    line, left_ns = np.empty(rows, np.int64), np.empty(rows, np.int64)
    sums[:] = 0
    for row in range(rows):
        left, slot = _tally_row(table, row, now, sums), table[PREFILL_NODE, row]
        if slot == NONE or not room[IS_CANDIDATE, slot]:
            continue
        same_level, is_own, goes_before = turns[LEVEL, row] == level, turns[ACCOUNT, row] == account, False
        if same_level and is_own:
            goes_before = _goes_before(turns, row, priority, due, arrived)
        if left > 0:
            line[waiting], left_ns[waiting] = row, left
            waiting += 1
            in_order &= goes_before and now < turns[AGES, row]
        if table[PREFILL_NS, row] <= 0 or not same_level:
            continue
        ticket = turns[TICKET, row]
        if table[STARTED, row] == NONE and ticket >= 0 and (least < 0 or ticket < least):
            least = ticket
        if not is_own:
            continue
        if goes_before:
            room[EARLIER, slot] = max(room[EARLIER, slot], ticket)
        else:
            room[LATER, slot] = min(room[LATER, slot], ticket)
    clock_ns = _advanced_ns(clock_ns, started_ns, least)
    brought = max(clock_ns, finish_ns)
    if in_order:  # as nearly always: all that is in line is the account's own, and goes first
        for c in range(len(slots)):
            queue_s[c] = sums[slots[c], 0] / 1e9
        return clock_ns, brought
    room[WORK, :] = 0
    for i in range(waiting):
        row = line[i]
        slot = table[PREFILL_NODE, row]
        row_has_aged = now >= turns[AGES, row]
        if row_has_aged or has_aged:
            goes_before = row_has_aged and (not has_aged or turns[ARRIVED, row] <= arrived)
        elif turns[LEVEL, row] != level:
            goes_before = turns[LEVEL, row] < level
        else:
            ticket = turns[TICKET, row]
            mine = min(max(brought, room[EARLIER, slot]), room[LATER, slot])
            if turns[ACCOUNT, row] != account and ticket != mine:
                goes_before = ticket < mine
            else:
                goes_before = _goes_before(turns, row, priority, due, arrived)
        if goes_before:
            room[WORK, slot] += left_ns[i]
    for c in range(len(slots)):
        queue_s[c] = room[WORK, slots[c]] / 1e9
    return clock_ns, brought


def share(table: Any, turns: Any, rows: Any, row: Any) -> None:
    """Of the account's requests of this class in line at the row's prefill node, the first uses the smallest ticket,
    the next the next, as on the node (`worker.policy.turns.Line`)."""
    slot, account, level = table[PREFILL_NODE, row], turns[ACCOUNT, row], turns[LEVEL, row]
    group = np.empty(rows, np.int64)
    count = 0
    for other in range(rows):
        if (
            table[PREFILL_NODE, other] == slot
            and turns[ACCOUNT, other] == account
            and turns[LEVEL, other] == level
            and table[PREFILL_NS, other] > 0
        ):
            group[count] = other
            count += 1
    # Shell's sort: as quick as any for a few, and not quadratic for the thousands of a crowd.
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            mine, at = group[i], i
            while at >= gap:
                before = group[at - gap]
                if turns[PRIORITY, before] != turns[PRIORITY, mine]:
                    is_later = turns[PRIORITY, before] > turns[PRIORITY, mine]
                elif turns[DUE, before] != turns[DUE, mine]:
                    is_later = turns[DUE, before] > turns[DUE, mine]
                elif turns[ARRIVED, before] != turns[ARRIVED, mine]:
                    is_later = turns[ARRIVED, before] > turns[ARRIVED, mine]
                else:
                    is_later = before > mine
                if not is_later:
                    break
                group[at] = before
                at -= gap
            group[at] = mine
        gap //= 3
    tickets = np.empty(count, np.int64)
    for i in range(count):
        tickets[i] = turns[TICKET, group[i]]
    tickets.sort()
    for i in range(count):
        turns[TICKET, group[i]] = tickets[i]


class LineKernels(NamedTuple):
    """See the function of the same name. `line_up` is compiled with what goes before and after it (`reach_kernels`)."""

    share: Any


@functools.cache
def line_kernels() -> LineKernels:
    """Compiled or loaded at the first call."""
    n = types.int64
    wide = types.Array(n, 2, "C")
    return LineKernels(decision_kernel(share, types.void(wide, wide, n, n)))
