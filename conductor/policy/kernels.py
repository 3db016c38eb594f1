"""The compiled loops of placement: over live requests, over what pool nodes hold, over candidates. They only compute.

Formulas are those of `cost_formulas`, in the same order of operations, so that a prediction is the same number wherever
it is made. Nothing here checks its arguments.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from conductor.policy.compiling import decision_kernel
from conductor.policy.paces import PREFILL
from conductor.policy.requests import (
    COMMITTED,
    DECODE_NODE,
    NONE,
    PREFILL_NODE,
    PREFILL_NS,
    SENDER,
    STARTED,
)
from worker.policy import cost_formulas

__all__ = ["Kernels", "kernels", "prefixes", "score_prefill", "tally_row"]

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
    """What each candidate's own pool node holds into `own` [2, candidates]: blocks, of these on SSD only.

    `slots`: of the pool nodes that `blocks` and `ssd_blocks` tell of, -1 for those to leave out. `sends` [slots]:
    copies, beside the prefixes in `sums`. Returns of the longest match its index, blocks, of these on SSD only, and how
    many prefixes its pool node sends; of equals the one with least on SSD, then the one that sends least, then the
    first. An index of -1: nobody holds anything.
    """
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

    `slowdown` [2, slots], `prefill_most`: see `paces` and `ModelCosts`.
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
        decision_kernel(tally, types.void(wide, n, n, wide)),
        decision_kernel(prefixes, signatures.UniTuple(n, 4)(ints, ints, ints, n, ints, wide, ints, wide)),
        decision_kernel(
            score_prefill,
            scored(wide, floats, n, n, n, n, n, n, f, ints, seconds, three, two, two, two, two, seconds, ints, flags),
        ),
        decision_kernel(best, types.void(seconds, floats, ints)),
    )
