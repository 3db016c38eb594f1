"""The compiled loops of placement: over live requests, over what pool nodes hold, over candidates. They only compute.

Formulas are those of `cost_formulas`, in the same order of operations, so that a prediction is the same number wherever
it is made. Nothing here checks its arguments.

The compiled loops over those that wait for a prefill: which ticket a newcomer uses, and the work that goes before it
at each node. The order is that of `worker.policy.scheduling_order`. They only compute, and check no arguments.

The compiled first half of a plan, in one go: what is placed, what pool nodes hold, who goes first, Algorithm 1.

Its parts stand in `kernels` and `line_kernels`; together they save what three more calls would take. Only computes.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from conductor.policy.costs import PREFILL
from conductor.policy.fairness import advanced_ns
from conductor.policy.requests import (
    ACCOUNT,
    AGES,
    ARRIVED,
    COMMITTED,
    DECODE_NODE,
    DUE,
    LEVEL,
    NONE,
    PREFILL_NODE,
    PREFILL_NS,
    PRIORITY,
    SENDER,
    STARTED,
    TICKET,
)
from jit.compiling import compiled_with_gil
from worker.policy import cost_formulas

__all__ = [
    "EARLIER",
    "IS_CANDIDATE",
    "LATER",
    "Kernels",
    "LineKernels",
    "ReachKernels",
    "kernels",
    "line_kernels",
    "line_up",
    "prefixes",
    "reach_kernels",
    "score_prefill",
    "tally_row",
]

_read_s: Any = numba.njit(cost_formulas.read_s)
_fetch_s: Any = numba.njit(cost_formulas.fetch_s)
_margin: Any = numba.njit(cost_formulas.margin)
_prefill_s: Any = numba.njit(cost_formulas.prefill_s)


def tally_row(table: Any, row: Any, now_ns: Any, sums: Any) -> Any:
    """`tally`'s part in one row; returns the ns that its prefill still takes, 0 where it has ended."""
    left = 0
    slot = table[PREFILL_NODE, row]
    if slot != NONE:
        started = table[STARTED, row]
        left = table[PREFILL_NS, row]
        if started != NONE:
            left -= now_ns - started
        left = max(left, 0)
        sums[slot, 0] += left
    slot = table[DECODE_NODE, row]
    if slot != NONE:
        sums[slot, 1] += table[COMMITTED, row]
    slot = table[SENDER, row]
    if slot != NONE:
        sums[slot, 2] += 1
    return left


_tally_row: Any = numba.njit(tally_row)


def tally(table: Any, rows: Any, now_ns: Any, sums: Any) -> None:
    """Per slot into `sums` [slots, 3]: predicted ns until its prefills have ended, committed tokens, prefixes sent."""
    sums[:] = 0
    for row in range(rows):
        _tally_row(table, row, now_ns, sums)


def prefixes(
    blocks: Any, ssd_blocks: Any, slots: Any, limit: Any, sends: Any, sums: Any, pool_slots: Any, own: Any
) -> Any:
    """Write into `own` [2, candidates] the blocks on each candidate's own pool node, and those of them on SSD only."""
    held = np.zeros((2, len(sums)), np.int64)
    best, best_blocks, best_ssd, best_sends = -1, 0, 0, 0
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0 or blocks[i] == 0:
            continue
        have, on_ssd = min(blocks[i], limit), ssd_blocks[i]
        if blocks[i] > limit:
            on_ssd = min(on_ssd, limit)
        held[0, slot], held[1, slot] = have, on_ssd
        sending = sums[slot, 2] + sends[slot]
        if have and (
            have > best_blocks
            or (have == best_blocks and (on_ssd < best_ssd or (on_ssd == best_ssd and sending < best_sends)))
        ):
            best, best_blocks, best_ssd, best_sends = i, have, on_ssd, sending
    for c in range(len(pool_slots)):
        slot = pool_slots[c]
        own[0, c] = held[0, slot] if slot >= 0 else 0
        own[1, c] = held[1, slot] if slot >= 0 else 0
    return best, best_blocks, best_ssd, best_sends


def score_prefill(
    own: Any,
    queue_s: Any,
    best: Any,
    best_ssd: Any,
    num_sends: Any,
    prompt_tokens: Any,
    block_tokens: Any,
    block_nbytes: Any,
    threshold: Any,
    slots: Any,
    slowdown: Any,
    prefill: Any,
    prefill_most: Any,
    load: Any,
    fetch: Any,
    ssd_read: Any,
    seconds: Any,
    reuse: Any,
    fetches: Any,
) -> Any:
    """Algorithm 1's loop: `seconds` [2, candidates] of transfer and prefill, `reuse`, `fetches`.

    `slowdown` [2, slots], `prefill_most`: see `slowdowns` and `ModelCosts`.
    Returns who is soonest, and how soon.
    """
    chosen, least_s = 0, np.inf
    have, have_ssd, uses, fetched = -1, -1, -1, False
    transfer_s, usual_s, margin = 0.0, 0.0, 1.0
    for c in range(len(queue_s)):
        if own[0, c] != have or own[1, c] != have_ssd:  # most hold as much as the one before: nothing
            have, have_ssd = own[0, c], own[1, c]
            fetched = best > threshold * have
            missing = best - have if fetched else 0
            uses = best if fetched else have
            on_ssd = have_ssd + min(missing, best_ssd)
            missing_nbytes = float(missing) * block_nbytes
            transfer_s = (
                _read_s(load[0], load[1], float(have) * block_nbytes, 0)
                + _read_s(ssd_read[0], ssd_read[1], float(on_ssd) * block_nbytes, 0)
                + _fetch_s(
                    _read_s(fetch[0], fetch[1], missing_nbytes, num_sends),
                    _read_s(load[0], load[1], missing_nbytes, 0),
                )
            )
            reused = float(uses * block_tokens)
            usual_s = _prefill_s(prefill[0], prefill[1], prefill[2], prompt_tokens, reused)
            margin = _margin(prompt_tokens - reused, prefill_most[0], float(prompt_tokens), prefill_most[1])
        reuse[c] = uses
        fetches[c] = fetched
        prefill_s = usual_s * slowdown[PREFILL, slots[c]] * margin
        seconds[0, c], seconds[1, c] = transfer_s, prefill_s
        ttft_s = transfer_s + queue_s[c] + prefill_s
        if ttft_s < least_s:
            chosen, least_s = c, ttft_s
    return chosen, least_s


def best(seconds: Any, queue_s: Any, found: Any) -> None:
    """Into `found` the numbers of the candidates that reach the first token soonest, soonest first, of equals the
    first: as many as it has room for."""
    count = 0
    for c in range(len(queue_s)):
        ttft_s = seconds[0, c] + queue_s[c] + seconds[1, c]
        at = count
        while at > 0:
            other = found[at - 1]
            if seconds[0, other] + queue_s[other] + seconds[1, other] <= ttft_s:
                break
            if at < len(found):
                found[at] = other
            at -= 1
        if at < len(found):
            found[at] = c
            count = min(count + 1, len(found))


class Kernels(NamedTuple):
    """See the functions of the same names."""

    tally: Any
    prefixes: Any
    score_prefill: Any
    best: Any


@functools.cache
def kernels() -> Kernels:
    """All of them, compiled or loaded at the first call."""
    signatures: Any = types
    n, f, flags = types.int64, types.float64, types.Array(types.bool_, 1, "C")
    ints, wide = types.Array(n, 1, "C"), types.Array(n, 2, "C")
    floats, seconds = types.Array(f, 1, "C"), types.Array(f, 2, "C")
    two, three = signatures.UniTuple(f, 2), signatures.UniTuple(f, 3)
    scored = signatures.Tuple((n, f))
    return Kernels(
        compiled_with_gil(tally, types.void(wide, n, n, wide)),
        compiled_with_gil(prefixes, signatures.UniTuple(n, 4)(ints, ints, ints, n, ints, wide, ints, wide)),
        compiled_with_gil(
            score_prefill,
            scored(wide, floats, n, n, n, n, n, n, f, ints, seconds, three, two, two, two, two, seconds, ints, flags),
        ),
        compiled_with_gil(best, types.void(seconds, floats, ints)),
    )


WORK, EARLIER, LATER, IS_CANDIDATE = range(4)  # rows of `room`
_LEAST, _MOST = -(1 << 62), 1 << 62


def _before(turns: Any, row: Any, priority: Any, due: Any, arrived: Any) -> Any:
    """Return True if the row precedes a newcomer with the same ticket."""
    if turns[PRIORITY, row] != priority:
        return turns[PRIORITY, row] < priority
    if turns[DUE, row] != due:
        return turns[DUE, row] < due
    return turns[ARRIVED, row] <= arrived


_goes_before: Any = numba.njit(_before)
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
    """Reassign tickets among the account's queued requests of this class at the row's prefill node.

    The first uses the smallest ticket, the next one the next, as on the node
    (`worker.policy.scheduling_order.WaitQueue`).
    """
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
    return LineKernels(compiled_with_gil(share, types.void(wide, wide, n, n)))


_prefixes: Any = numba.njit(prefixes)
_line_up: Any = numba.njit(line_up)
_score_prefill: Any = numba.njit(score_prefill)


def reach(
    table: Any,
    turns: Any,
    rows: Any,
    me: Any,
    clock_ns: Any,
    started_ns: Any,
    finish_ns: Any,
    blocks: Any,
    ssd_blocks: Any,
    match_slots: Any,
    limit: Any,
    sends: Any,
    slots: Any,
    pool_slots: Any,
    prompt_tokens: Any,
    block_tokens: Any,
    block_nbytes: Any,
    threshold: Any,
    slowdown: Any,
    prefill: Any,
    prefill_most: Any,
    load: Any,
    fetch: Any,
    ssd_read: Any,
    sums: Any,
    room: Any,
    own: Any,
    queue_s: Any,
    seconds: Any,
    reuse: Any,
    fetches: Any,
) -> Any:
    """`line_up`, `prefixes` and `score_prefill`, one after the other, with their arguments and results."""
    clock_ns, ticket_ns = _line_up(table, turns, rows, slots, me, clock_ns, started_ns, finish_ns, sums, room, queue_s)
    best, have, on_ssd, num_sends = _prefixes(blocks, ssd_blocks, match_slots, limit, sends, sums, pool_slots, own)
    chosen, ttft_s = _score_prefill(
        own,
        queue_s,
        have,
        on_ssd,
        num_sends,
        prompt_tokens,
        block_tokens,
        block_nbytes,
        threshold,
        slots,
        slowdown,
        prefill,
        prefill_most,
        load,
        fetch,
        ssd_read,
        seconds,
        reuse,
        fetches,
    )
    return clock_ns, ticket_ns, best, have, on_ssd, num_sends, chosen, ttft_s


class ReachKernels(NamedTuple):
    """See the function of the same name."""

    reach: Any


@functools.cache
def reach_kernels() -> ReachKernels:
    """Compiled or loaded at the first call."""
    signatures: Any = types
    n, f, flags = types.int64, types.float64, types.Array(types.bool_, 1, "C")
    ints, wide = types.Array(n, 1, "C"), types.Array(n, 2, "C")
    floats, reals = types.Array(f, 1, "C"), types.Array(f, 2, "C")
    two, three, seven = signatures.UniTuple(f, 2), signatures.UniTuple(f, 3), signatures.UniTuple(n, 7)
    lines = wide, wide, n, seven, n, n, n
    matches = ints, ints, ints, n, ints, ints, ints
    costs = n, n, n, f, reals, three, two, two, two, two
    room = wide, wide, wide, floats, reals, ints, flags
    found = signatures.Tuple((n, n, n, n, n, n, n, f))
    return ReachKernels(compiled_with_gil(reach, found(*lines, *matches, *costs, *room)))
