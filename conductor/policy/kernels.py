"""Compiled loops of prefill placement (Mooncake's Algorithm 1): over live requests, pool nodes' matches and candidates.

Formulas are those of `cost_formulas`, in the same order of operations, so that a prediction is the same number wherever
it is made. The order of the queue is that of `worker.policy.scheduling_order`. No loop checks its arguments; all but
`reassign_tickets` write only into the arrays named as their results.
"""

import functools
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types

from conductor.policy.costs import PREFILL, PREFILL_COSTS, TRANSFER_COSTS
from conductor.policy.fairness import advanced_ns
from conductor.policy.nodes import PREFILL_CANDIDATE
from conductor.policy.requests import NONE, REQUEST
from jit.compiling import compiled_with_gil
from worker.policy import cost_formulas

__all__ = [
    "ARRIVAL",
    "LATEST_NS",
    "MATCH",
    "NODE_LOAD",
    "PrefillKernels",
    "prefill_kernels",
]

NODE_LOAD: Final = np.dtype(
    [
        # Written by `tally`:
        ("queued_ns", np.int64),  # predicted until all prefills placed there have ended
        ("committed", np.int64),  # tokens of pages claimed
        ("num_sends", np.int64),  # prefixes that it sends to placed requests
        # Given:
        ("copy_sends", np.int64),  # copies of prefixes that it sends
        # Written by `queue_position`, for one request:
        ("is_candidate", np.int64),
        ("earlier_ns", np.int64),  # of its account's requests that precede it there, the largest ticket
        ("later_ns", np.int64),  # of those that follow it, the smallest
        ("work_ns", np.int64),  # of the prefills that precede it
        # Written by the decode kernels:
        ("sequences", np.float64),  # in the decode batch
        ("context", np.float64),  # tokens that they attend to
        ("expected", np.float64),  # of `committed`, the expected value
    ]
)
"""The load of one node; an array of these is indexed by the node's slot."""

ARRIVAL: Final = np.dtype(
    [
        ("now_ns", np.int64),
        ("level", np.int64),
        ("account", np.int64),
        ("priority", np.int64),
        ("due_ns", np.int64),
        ("arrived_ns", np.int64),
        ("ages_ns", np.int64),
        ("clock_ns", np.int64),  # of its class's `VirtualTime`, as is the next one
        ("started_ns", np.int64),
        ("finish_ns", np.int64),  # of its account
        ("prompt_tokens", np.int64),
        ("seen_tokens", np.int64),  # the most that one of them sees
        ("most_blocks", np.int64),  # that it may reuse
        ("block_tokens", np.int64),
        ("block_nbytes", np.int64),
        ("window_blocks", np.int64),
        ("window_nbytes", np.int64),  # of a block
        ("fetch_threshold", np.float64),  # ratio of prefixes above which one is fetched; inf: none is
    ]
)
"""The request to place; fields up to `ages_ns` as in REQUEST."""

MATCH: Final = np.dtype([("blocks", np.int64), ("ssd_blocks", np.int64), ("slot", np.int64)])
"""Leading blocks of the prompt on a pool node, and those of them on SSD only. `slot` NONE: it must not be used."""

_read_nbytes: Any = numba.njit(cost_formulas.read_nbytes)
_read_s: Any = numba.njit(cost_formulas.read_s)
_fetch_s: Any = numba.njit(cost_formulas.fetch_s)
_margin: Any = numba.njit(cost_formulas.margin)
_prefill_s: Any = numba.njit(cost_formulas.prefill_s)


def _tally_row(requests: Any, row: Any, now_ns: Any, loads: Any) -> Any:
    """Add one row to the loads; return the ns that its prefill still takes, 0 if it has ended."""
    request = requests[row]
    left = 0
    slot = request.prefill_node
    if slot != NONE:
        left = request.prefill_ns
        if request.started_ns != NONE:
            left -= max(now_ns - request.started_ns, 0)
        left = max(left, 0)
        loads[slot].queued_ns += left
    slot = request.decode_node
    if slot != NONE:
        loads[slot].committed += request.committed
    slot = request.sender
    if slot != NONE:
        loads[slot].num_sends += 1
    return left


_tally_row_of: Any = numba.njit(_tally_row)


def _reset(loads: Any) -> None:
    for slot in range(len(loads)):
        loads[slot].queued_ns = 0
        loads[slot].committed = 0
        loads[slot].num_sends = 0


_reset_of: Any = numba.njit(_reset)


def tally(requests: Any, now_ns: Any, loads: Any) -> None:
    """Sum what live requests claim on each node into the first three fields of `loads` [slots]."""
    _reset_of(loads)
    for row in range(len(requests)):
        _tally_row_of(requests, row, now_ns, loads)


def prefixes(most_blocks: Any, matches: Any, loads: Any, candidates: Any) -> Any:
    """Write the blocks on each candidate's own pool node; return the best pool node.

    It is returned as (index of its match or -1, blocks, those of them on SSD only, prefixes and copies that it sends).

    The best holds the most blocks, of equals the least on SSD, then the one that sends least; at most `most_blocks`.
    """
    held = np.zeros((2, len(loads)), np.int64)
    best, best_blocks, best_ssd, best_sends = -1, 0, 0, 0
    for i in range(len(matches)):
        slot, blocks = matches[i].slot, matches[i].blocks
        if slot < 0 or blocks == 0:
            continue
        have, on_ssd = min(blocks, most_blocks), matches[i].ssd_blocks
        if blocks > most_blocks:
            on_ssd = min(on_ssd, most_blocks)
        held[0, slot], held[1, slot] = have, on_ssd
        sending = loads[slot].num_sends + loads[slot].copy_sends
        if have and (
            have > best_blocks
            or (have == best_blocks and (on_ssd < best_ssd or (on_ssd == best_ssd and sending < best_sends)))
        ):
            best, best_blocks, best_ssd, best_sends = i, have, on_ssd, sending
    for c in range(len(candidates)):
        slot = candidates[c].pool_slot
        candidates[c].own_blocks = held[0, slot] if slot >= 0 else 0
        candidates[c].own_ssd_blocks = held[1, slot] if slot >= 0 else 0
    return best, best_blocks, best_ssd, best_sends


def _durations(
    request: Any, have: Any, on_ssd: Any, local: Any, missing: Any, num_sends: Any, cost: Any, path: Any
) -> Any:
    """Return the transfer time, the prefill time on a typical node and its margin, if `missing` blocks are fetched.

    `on_ssd`: blocks that pool nodes read from SSD, `have` and `local` as in PREFILL_CANDIDATE.
    """
    sizes = request.block_nbytes, request.window_blocks, request.window_nbytes
    loaded_nbytes = float(_read_nbytes(max(0, have - local), *sizes))
    missing_nbytes = float(_read_nbytes(missing, *sizes))
    ssd_nbytes = float(_read_nbytes(on_ssd, *sizes))
    transfer_s = (
        _read_s(path.load_fixed_s, path.load_per_byte_s, loaded_nbytes, 0)
        + _read_s(path.ssd_fixed_s, path.ssd_per_byte_s, ssd_nbytes, 0)
        + _fetch_s(
            _read_s(path.fetch_fixed_s, path.fetch_per_byte_s, missing_nbytes, num_sends),
            _read_s(path.load_fixed_s, path.load_per_byte_s, missing_nbytes, 0),
        )
    )
    reused, prompt = float((max(have, local) + missing) * request.block_tokens), request.prompt_tokens
    seen = min(prompt, request.seen_tokens)
    usual_s = _prefill_s(cost.fixed_s, cost.per_token_s, cost.per_pair_s, prompt, reused, seen)
    return transfer_s, usual_s, _margin(seen - reused, cost.most_new, float(seen), cost.most_prompt)


_durations_of: Any = numba.njit(_durations)


def score_prefill(
    arrival: Any, best: Any, best_ssd: Any, num_sends: Any, slowdowns: Any, costs: Any, transfers: Any, candidates: Any
) -> Any:
    """Run Algorithm 1's loop: write each candidate's transfer and prefill times and reuse.

    Unlike in the paper, a prefix is not fetched if that is predicted to take longer than to compute it
    (`may_recompute`).

    Return (index, TTFT) of the candidate with the least, and the least TTFT of any candidate without its queue.

    `arrival` ARRIVAL [1], `costs` PREFILL_COSTS [1], `transfers` TRANSFER_COSTS [1], `slowdowns` [2, slots] (see
    `NodeSlowdowns`), `candidates` PREFILL_CANDIDATE [n] with `queue_s`; `best`, `best_ssd`, `num_sends` of `prefixes`.
    """
    request, cost, path = arrival[0], costs[0], transfers[0]
    chosen, least_s, idle_s = 0, np.inf, np.inf
    have, have_ssd, local, uses, fetched = -1, -1, -1, -1, False
    transfer_s, usual_s, margin = 0.0, 0.0, 1.0
    for c in range(len(candidates)):
        node = candidates[c]
        # Most hold as much as the one before: nothing.
        if node.own_blocks != have or node.own_ssd_blocks != have_ssd or node.local_blocks != local:
            have, have_ssd, local = node.own_blocks, node.own_ssd_blocks, node.local_blocks
            known = max(have, local)
            fetched = best > local and best > request.fetch_threshold * known
            missing = best - known if fetched else 0
            uses = known + missing
            on_ssd = have_ssd + min(missing, best_ssd)  # the pool also reads those that the node has itself
            transfer_s, usual_s, margin = _durations_of(request, have, on_ssd, local, missing, num_sends, cost, path)
            if fetched and path.may_recompute:
                own_transfer_s, own_s, own_margin = _durations_of(
                    request, have, have_ssd, local, 0, num_sends, cost, path
                )
                if own_transfer_s + own_s * own_margin < transfer_s + usual_s * margin:
                    fetched, uses = False, known
                    transfer_s, usual_s, margin = own_transfer_s, own_s, own_margin
        prefill_s = usual_s * slowdowns[PREFILL, node.slot] * margin
        node.reuse_blocks = uses
        node.fetches = fetched
        node.transfer_s = transfer_s
        node.prefill_s = prefill_s
        idle_s = min(idle_s, transfer_s + prefill_s)
        ttft_s = transfer_s + node.queue_s + prefill_s
        if ttft_s < least_s:
            chosen, least_s = c, ttft_s
    return chosen, least_s, idle_s


def rank_prefill(candidates: Any, found: Any) -> None:
    """Write into `found` the indices of the candidates with the least TTFT, in that order, of equals the first."""
    count = 0
    for c in range(len(candidates)):
        ttft_s = candidates[c].transfer_s + candidates[c].queue_s + candidates[c].prefill_s
        at = count
        while at > 0:
            other = candidates[found[at - 1]]
            if other.transfer_s + other.queue_s + other.prefill_s <= ttft_s:
                break
            if at < len(found):
                found[at] = found[at - 1]
            at -= 1
        if at < len(found):
            found[at] = c
            count = min(count + 1, len(found))


LATEST_NS: Final = 1 << 62  # a ticket later than any; its negative is earlier than any


def _precedes(queued: Any, request: Any) -> Any:
    """Return True if a queued request precedes a newcomer with the same ticket."""
    if queued.priority != request.priority:
        return queued.priority < request.priority
    if queued.due_ns != request.due_ns:
        return queued.due_ns < request.due_ns
    return queued.arrived_ns <= request.arrived_ns


_precedes_of: Any = numba.njit(_precedes)
_advanced_ns: Any = numba.njit(advanced_ns)


def queue_position(requests: Any, arrival: Any, loads: Any, candidates: Any) -> Any:
    """Write `queue_s` of each candidate and tally the loads; return (virtual time, ticket of the newcomer).

    `arrival` ARRIVAL [1], `loads` NODE_LOAD [slots], `candidates` PREFILL_CANDIDATE [n].
    """
    me = arrival[0]
    now, rows = me.now_ns, len(requests)
    _reset_of(loads)
    for slot in range(len(loads)):
        loads[slot].earlier_ns = -LATEST_NS
        loads[slot].later_ns = LATEST_NS
        loads[slot].is_candidate = 0
        loads[slot].work_ns = 0
    for c in range(len(candidates)):
        loads[candidates[c].slot].is_candidate = 1
    has_aged = now >= me.ages_ns
    least, waiting, in_order = -1, 0, not has_aged
    queue, left_ns = np.empty(rows, np.int64), np.empty(rows, np.int64)
    for row in range(rows):
        queued = requests[row]
        left, slot = _tally_row_of(requests, row, now, loads), queued.prefill_node
        if slot == NONE or not loads[slot].is_candidate:
            continue
        same_level, is_own, goes_before = queued.level == me.level, queued.account == me.account, False
        if same_level and is_own:
            goes_before = _precedes_of(queued, me)
        if left > 0:
            queue[waiting], left_ns[waiting] = row, left
            waiting += 1
            in_order &= goes_before and now < queued.ages_ns
        if queued.prefill_ns <= 0 or not same_level:
            continue
        ticket = queued.ticket_ns
        if queued.started_ns == NONE and ticket >= 0 and (least < 0 or ticket < least):
            least = ticket
        if not is_own:
            continue
        if goes_before:
            loads[slot].earlier_ns = max(loads[slot].earlier_ns, ticket)
        else:
            loads[slot].later_ns = min(loads[slot].later_ns, ticket)
    clock_ns = _advanced_ns(me.clock_ns, me.started_ns, least)
    brought = max(clock_ns, me.finish_ns)
    if in_order:  # nearly always: all that is queued is the account's own, and precedes it
        for c in range(len(candidates)):
            candidates[c].queue_s = loads[candidates[c].slot].queued_ns / 1e9
        return clock_ns, brought
    for i in range(waiting):
        queued = requests[queue[i]]
        slot = queued.prefill_node
        row_has_aged = now >= queued.ages_ns
        if row_has_aged or has_aged:
            goes_before = row_has_aged and (not has_aged or queued.arrived_ns <= me.arrived_ns)
        elif queued.level != me.level:
            goes_before = queued.level < me.level
        else:
            mine = min(max(brought, loads[slot].earlier_ns), loads[slot].later_ns)
            by_ticket = queued.account != me.account and queued.ticket_ns != mine
            goes_before = queued.ticket_ns < mine if by_ticket else _precedes_of(queued, me)
        if goes_before:
            loads[slot].work_ns += left_ns[i]
    for c in range(len(candidates)):
        candidates[c].queue_s = loads[candidates[c].slot].work_ns / 1e9
    return clock_ns, brought


def reassign_tickets(requests: Any, row: Any) -> None:
    """Reassign tickets among the account's queued requests of this class at the row's prefill node.

    The first uses the smallest ticket, the next one the next, as on the node
    (`worker.policy.scheduling_order.WaitQueue`).
    """
    slot, account, level = requests[row].prefill_node, requests[row].account, requests[row].level
    rows = len(requests)
    group = np.empty(rows, np.int64)
    count = 0
    for other in range(rows):
        if (
            requests[other].prefill_node == slot
            and requests[other].account == account
            and requests[other].level == level
            and requests[other].prefill_ns > 0
        ):
            group[count] = other
            count += 1
    # Shell's sort: as fast as any for a few requests, and not quadratic for thousands.
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            mine, at = group[i], i
            while at >= gap:
                before = group[at - gap]
                if requests[before].priority != requests[mine].priority:
                    is_later = requests[before].priority > requests[mine].priority
                elif requests[before].due_ns != requests[mine].due_ns:
                    is_later = requests[before].due_ns > requests[mine].due_ns
                elif requests[before].arrived_ns != requests[mine].arrived_ns:
                    is_later = requests[before].arrived_ns > requests[mine].arrived_ns
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
        tickets[i] = requests[group[i]].ticket_ns
    tickets.sort()
    for i in range(count):
        requests[group[i]].ticket_ns = tickets[i]


_queue_position: Any = numba.njit(queue_position)
_prefixes: Any = numba.njit(prefixes)
_score_prefill: Any = numba.njit(score_prefill)


def score_arrival(
    requests: Any, arrival: Any, matches: Any, loads: Any, slowdowns: Any, costs: Any, transfers: Any, candidates: Any
) -> Any:
    """Run `queue_position`, `prefixes` and `score_prefill`, and return their results one after the other.

    One call saves what three would take for their arguments.
    """
    clock_ns, ticket_ns = _queue_position(requests, arrival, loads, candidates)
    best, blocks, on_ssd, num_sends = _prefixes(arrival[0].most_blocks, matches, loads, candidates)
    chosen, ttft_s, idle_s = _score_prefill(arrival, blocks, on_ssd, num_sends, slowdowns, costs, transfers, candidates)
    return clock_ns, ticket_ns, best, blocks, on_ssd, num_sends, chosen, ttft_s, idle_s


class PrefillKernels(NamedTuple):
    """See the functions of the same names."""

    tally: Any
    prefixes: Any
    score_prefill: Any
    rank_prefill: Any
    reassign_tickets: Any
    score_arrival: Any


@functools.cache
def prefill_kernels() -> PrefillKernels:
    """All of them, compiled or loaded at the first call."""
    signatures: Any = types
    n, f = types.int64, types.float64
    requests, arrival, matches, loads, costs, transfers, candidates = (
        types.Array(numba.from_dtype(dtype), 1, "C")
        for dtype in (REQUEST, ARRIVAL, MATCH, NODE_LOAD, PREFILL_COSTS, TRANSFER_COSTS, PREFILL_CANDIDATE)
    )
    ints, slowdowns = types.Array(n, 1, "C"), types.Array(f, 2, "C")
    return PrefillKernels(
        compiled_with_gil(tally, types.void(requests, n, loads)),
        compiled_with_gil(prefixes, signatures.UniTuple(n, 4)(n, matches, loads, candidates)),
        compiled_with_gil(
            score_prefill, signatures.Tuple((n, f, f))(arrival, n, n, n, slowdowns, costs, transfers, candidates)
        ),
        compiled_with_gil(rank_prefill, types.void(candidates, ints)),
        compiled_with_gil(reassign_tickets, types.void(requests, n)),
        compiled_with_gil(
            score_arrival,
            signatures.Tuple((n, n, n, n, n, n, n, f, f))(
                requests, arrival, matches, loads, slowdowns, costs, transfers, candidates
            ),
        ),
    )
