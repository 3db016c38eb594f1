"""The compiled loops over those that wait for a prefill: which ticket a newcomer would use at each node, and the work
that goes before it there. The order is that of `worker.policy.turns`. They only compute, and check no arguments.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from conductor.policy.compiling import decision_kernel
from conductor.policy.requests import NONE, PREFILL_NODE, PREFILL_NS, STARTED
from conductor.policy.turn_columns import ACCOUNT, AGES, ARRIVED, DUE, LEVEL, PRIORITY, TICKET

__all__ = ["EARLIER", "IS_CANDIDATE", "LATER", "LineKernels", "line_kernels"]

WORK, EARLIER, LATER, IS_CANDIDATE = range(4)  # rows of `room`
_LEAST, _MOST = -(1 << 62), 1 << 62


def tickets(table: Any, turns: Any, rows: Any, slots: Any, me: Any, room: Any) -> Any:
    """The smallest ticket of the newcomer's class that waits at a candidate and has not begun; -1: none does.

    `me`: now, level, account, priority, due, arrived, ages. Into `room` [4, slots]: of the account's own that go before
    it, the largest ticket, and of those that go after it, the smallest.
    """
    _, level, account, priority, due, arrived, _ = me
    room[EARLIER, :] = _LEAST
    room[LATER, :] = _MOST
    room[IS_CANDIDATE, :] = 0
    for c in range(len(slots)):
        room[IS_CANDIDATE, slots[c]] = 1
    least = -1
    for row in range(rows):
        slot = table[PREFILL_NODE, row]
        if slot == NONE or table[PREFILL_NS, row] <= 0 or turns[LEVEL, row] != level or not room[IS_CANDIDATE, slot]:
            continue
        ticket = turns[TICKET, row]
        if table[STARTED, row] == NONE and ticket >= 0 and (least < 0 or ticket < least):
            least = ticket
        if turns[ACCOUNT, row] == account:
            if turns[PRIORITY, row] != priority:
                goes_before = turns[PRIORITY, row] < priority
            elif turns[DUE, row] != due:
                goes_before = turns[DUE, row] < due
            else:
                goes_before = turns[ARRIVED, row] <= arrived
            if goes_before:
                room[EARLIER, slot] = max(room[EARLIER, slot], ticket)
            else:
                room[LATER, slot] = min(room[LATER, slot], ticket)
    return least


def queues(table: Any, turns: Any, rows: Any, slots: Any, me: Any, brought: Any, room: Any, queue_s: Any) -> None:
    """Seconds of prefills that go before the newcomer at each candidate; it brings the ticket `brought`.

    `room`: as `tickets` left it.
    """
    now, level, account, priority, due, arrived, ages = me
    room[WORK, :] = 0
    has_aged = now >= ages
    for row in range(rows):
        slot = table[PREFILL_NODE, row]
        if slot == NONE or not room[IS_CANDIDATE, slot]:
            continue
        left = table[PREFILL_NS, row]
        if table[STARTED, row] != NONE:
            left -= now - table[STARTED, row]
        if left <= 0:
            continue
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
            elif turns[PRIORITY, row] != priority:
                goes_before = turns[PRIORITY, row] < priority
            elif turns[DUE, row] != due:
                goes_before = turns[DUE, row] < due
            else:
                goes_before = turns[ARRIVED, row] <= arrived
        if goes_before:
            room[WORK, slot] += left
    for c in range(len(slots)):
        queue_s[c] = room[WORK, slots[c]] / 1e9


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
    """See the functions of the same names."""

    tickets: Any
    queues: Any
    share: Any


@functools.cache
def line_kernels() -> LineKernels:
    """All of them, compiled or loaded at the first call."""
    signatures: Any = types
    n = types.int64
    ints, wide = types.Array(n, 1, "C"), types.Array(n, 2, "C")
    floats, seven = types.Array(types.float64, 1, "C"), signatures.UniTuple(n, 7)
    return LineKernels(
        decision_kernel(tickets, n(wide, wide, n, ints, seven, wide)),
        decision_kernel(queues, types.void(wide, wide, n, ints, seven, n, wide, floats)),
        decision_kernel(share, types.void(wide, wide, n, n)),
    )
