"""The compiled loops over what decodes: how many sequences and tokens a node will have, and when it has room.

Three views of the future, `sees`: NOW is what decodes at this moment. UNIFORM (Mooncake, section 6.3) adds those whose
prefill will have ended, and takes away those that will have decoded for longer than `decode_ns`. LEARNED takes each for
as likely to be there as its length curve says, given how far it has come: sums are expected values; and those whose
prefill ends later, in full: they are admitted, and decode beside whoever was there first. They only compute.
"""

import functools
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types

from conductor.policy.compiling import decision_kernel
from conductor.policy.costs import DECODE
from conductor.policy.lengths import survival
from conductor.policy.requests import (
    COMMITTED,
    CURVE,
    DECODE_NODE,
    GENERATED,
    JOINED,
    MAX_NEW,
    NONE,
    PREFILL_NS,
    PROMPT,
    READY,
)
from worker.policy import cost_formulas

__all__ = ["LEARNED", "NOW", "UNIFORM", "DecodeKernels", "decode_kernels"]

NOW, UNIFORM, LEARNED = range(3)
_LONGEST_NS: Final = 86_400_000_000_000  # a wait that nobody sits out
_NEAR_NS: Final = 1_000_000  # waits are found this exactly
_tbt_s: Any = numba.njit(cost_formulas.tbt_s)
_margin: Any = numba.njit(cost_formulas.margin)
_survival: Any = numba.njit(survival)


def predict_load(
    table: Any,
    rows: Any,
    now_ns: Any,
    at_ns: Any,
    sees: Any,
    decode_ns: Any,
    step_ns: Any,
    curves: Any,
    holding: Any,
    load: Any,
) -> Any:
    """What decodes at `at_ns`, into `load` [slots, 3]: sequences, tokens of context, committed tokens.

    A request adds a token every `step_ns`. `holding`: those that have yet to come count however it `sees`, since
    they have their pages; committed tokens are summed up only then.
    """
    # One loop without calls that return several values: they would take three times as long.
    load[:] = 0.0
    per_ns = 1.0 / step_ns
    for row in range(rows):
        slot = table[DECODE_NODE, row]
        if slot == NONE:
            continue
        joined = table[JOINED, row]
        # What has not joined yet does so now at the earliest.
        since = joined if joined != NONE else max(table[READY, row], now_ns)
        limit = float(table[MAX_NEW, row])  # 0: not known
        share, grown = 1.0, 0.0
        if since > at_ns:
            if not holding and sees != LEARNED:
                continue
        elif sees == LEARNED:
            begin = max(since, now_ns)
            before = (begin - since) * per_ns
            if limit > 0.0:
                # It is there now, however slow it was.
                before = min(before, limit - 1.0)
            grown = before + (at_ns - begin) * per_ns
            if limit > 0.0 and grown >= limit:
                continue
            base, curve = float(table[GENERATED, row]), table[CURVE, row]
            share = _survival(curves, curve, base + grown)
            if base + before > 0.0:
                alive = _survival(curves, curve, base + before)
                share = share / alive if alive > 0.0 else 1.0
        else:
            grown = (at_ns - since) * per_ns
            if sees == NOW:
                if joined == NONE and table[PREFILL_NS, row] != 0:
                    continue
            elif decode_ns >= 0:
                if at_ns - since > decode_ns:
                    continue
            elif 0.0 < limit <= grown:
                continue
        load[slot, 0] += share
        load[slot, 1] += share * (table[PROMPT, row] + min(grown, limit))
        if holding:
            load[slot, 2] += share * table[COMMITTED, row]


_predict_load: Any = numba.njit(predict_load)


def _step(decode: Any, slowdown: Any, batch: Any, context: Any, max_batch: Any) -> Any:
    """Seconds between tokens, as `ModelCosts.step_cost_s` has it."""
    seconds = _tbt_s(decode[0], decode[1], decode[2], batch, context, max_batch) * slowdown
    if batch <= max_batch:
        return seconds * _margin(batch, decode[3], context, decode[4])
    turns = batch / max_batch
    return seconds * _margin(batch / turns, decode[3], context / turns, decode[4])


_step_of: Any = numba.njit(_step)


def pick_decode(
    table: Any,
    rows: Any,
    now_ns: Any,
    at_ns: Any,
    sees: Any,
    decode_ns: Any,
    step_ns: Any,
    curves: Any,
    sums: Any,
    load: Any,
    slots: Any,
    capacity_tokens: Any,
    max_batch: Any,
    slowdown: Any,
    prompt_tokens: Any,
    need_tokens: Any,
    decode: Any,
) -> Any:
    """(index, predicted TBT, free tokens, sequences in one step, tokens of context) of the candidate with the least TBT
    that has room for `need_tokens`; the last two are with this request.

    Where none has room: of the one with most free. First of equals. `load` [slots, 3]: as `predict_load` leaves it.
    `slowdown` [2, slots]: see `paces`. `sums` [slots, 3] is what `tally` found, committed tokens at 1.
    """
    _predict_load(table, rows, now_ns, at_ns, sees, decode_ns, step_ns, curves, False, load)
    chosen, has_room, tbt_s, free = -1, False, 0.0, np.int64(0)
    for c in range(len(slots)):
        slot = slots[c]
        here_free = capacity_tokens[c] - sums[slot, 1]
        here_room = here_free >= need_tokens
        if has_room and not here_room:
            continue
        batch, context = load[slot, 0] + 1.0, load[slot, 1] + prompt_tokens
        here_s = _step_of(decode, slowdown[DECODE, slot], batch, context, max_batch[c])
        if chosen < 0 or here_room != has_room or (here_s < tbt_s if here_room else here_free > free):
            chosen, has_room, tbt_s, free = c, here_room, here_s, here_free
    batch, context = load[slots[chosen], 0] + 1.0, load[slots[chosen], 1] + prompt_tokens
    return chosen, tbt_s, free, min(batch, float(max_batch[chosen])), context


def rank_decode(
    sums: Any,
    load: Any,
    slots: Any,
    capacity_tokens: Any,
    max_batch: Any,
    slowdown: Any,
    prompt_tokens: Any,
    need_tokens: Any,
    decode: Any,
    seconds: Any,
    free: Any,
    found: Any,
) -> None:
    """After `pick_decode`: each candidate's predicted TBT and free tokens, and into `found` the numbers of the best
    ones in the order in which that would choose them, as many as it has room for."""
    count = 0
    for c in range(len(slots)):
        slot = slots[c]
        free[c] = capacity_tokens[c] - sums[slot, 1]
        batch, context = load[slot, 0] + 1.0, load[slot, 1] + prompt_tokens
        seconds[c] = _step_of(decode, slowdown[DECODE, slot], batch, context, max_batch[c])
        at, has_room = count, free[c] >= need_tokens
        while at > 0:
            other = found[at - 1]
            other_room = free[other] >= need_tokens
            if has_room != other_room:
                is_better = has_room
            elif has_room:
                is_better = seconds[c] < seconds[other]
            else:
                is_better = free[c] > free[other]
            if not is_better:
                break
            if at < len(found):
                found[at] = other
            at -= 1
        if at < len(found):
            found[at] = c
            count = min(count + 1, len(found))


def _at_node(table: Any, rows: Any, slot: Any, but: Any) -> Any:
    """The node's rows alone, as a table of their own in which the node has slot 0; without row `but`."""
    count = 0
    for row in range(rows):
        count += table[DECODE_NODE, row] == slot and row != but
    here = np.empty((table.shape[0], count), np.int64)
    at = 0
    for row in range(rows):
        if table[DECODE_NODE, row] == slot and row != but:
            here[:, at] = table[:, row]
            here[DECODE_NODE, at] = 0
            at += 1
    return here


_at_node_of: Any = numba.njit(_at_node)


def load_now(table: Any, rows: Any, slot: Any, but: Any, now_ns: Any, step_ns: Any, curves: Any) -> Any:
    """(sequences, tokens of context) that decode on the node now, but for row `but`."""
    here, load = _at_node_of(table, rows, slot, but), np.empty((1, 3))
    _predict_load(here, here.shape[1], now_ns, now_ns, NOW, -1, step_ns, curves, False, load)
    return load[0, 0], load[0, 1]


def wait_ns(
    table: Any,
    rows: Any,
    slot: Any,
    now_ns: Any,
    sees: Any,
    decode_ns: Any,
    curves: Any,
    decode: Any,
    slowdown: Any,
    max_batch: Any,
    missing_tokens: Any,
    prompt_tokens: Any,
    objective_s: Any,
) -> Any:
    """Until requests on the node are expected to have given back `missing_tokens`; with `objective_s` > 0 instead until
    so many have left that one more decodes with that TBT. Nobody comes meanwhile. Where that never is: until all left.
    """
    here, load = _at_node_of(table, rows, slot, -1), np.empty((1, 3))
    count = here.shape[1]
    step_s = _step_of(decode, slowdown, float(count), float(here[PROMPT].sum()), max_batch)
    step_ns = np.int64(max(1.0, min(1e9 * step_s, float(_LONGEST_NS))))
    low = high = now_ns
    for row in range(count):
        joined, limit = here[JOINED, row], here[MAX_NEW, row]
        lasts_ns = _LONGEST_NS
        if sees == UNIFORM and decode_ns >= 0:
            lasts_ns = min(_LONGEST_NS, decode_ns + 1)
        elif 0 < limit <= _LONGEST_NS // step_ns:
            lasts_ns = limit * step_ns
        high = max(high, max(now_ns, joined if joined != NONE else here[READY, row]) + lasts_ns)
    committed, at_ns = here[COMMITTED].sum(), now_ns
    while True:
        _predict_load(here, count, now_ns, at_ns, sees, decode_ns, step_ns, curves, True, load)
        if objective_s > 0.0:
            batch, context = load[0, 0] + 1.0, load[0, 1] + prompt_tokens
            is_over = _step_of(decode, slowdown, batch, context, max_batch) <= objective_s
        else:
            is_over = committed - load[0, 2] >= missing_tokens
        if is_over:
            high = at_ns
        else:
            low = at_ns
        if high - low <= _NEAR_NS:
            return high - now_ns
        at_ns = low + (high - low) // 2


class DecodeKernels(NamedTuple):
    """See the functions of the same names."""

    predict_load: Any
    pick_decode: Any
    rank_decode: Any
    load_now: Any
    wait_ns: Any


@functools.cache
def decode_kernels() -> DecodeKernels:
    """All of them, compiled or loaded at the first call."""
    signatures: Any = types
    n, f = types.int64, types.float64
    ints, wide = types.Array(n, 1, "C"), types.Array(n, 2, "C")
    floats, reals, five = types.Array(f, 1, "C"), types.Array(f, 2, "C"), signatures.UniTuple(f, 5)
    chosen, pair = signatures.Tuple((n, f, n, f, f)), signatures.UniTuple(f, 2)
    return DecodeKernels(
        decision_kernel(predict_load, types.void(wide, n, n, n, n, n, n, reals, types.boolean, reals)),
        decision_kernel(
            pick_decode, chosen(wide, n, n, n, n, n, n, reals, wide, reals, ints, ints, ints, reals, n, n, five)
        ),
        decision_kernel(rank_decode, types.void(wide, reals, ints, ints, ints, reals, n, n, five, floats, ints, ints)),
        decision_kernel(load_now, pair(wide, n, n, n, n, n, reals)),
        decision_kernel(wait_ns, n(wide, n, n, n, n, n, reals, five, f, n, n, n, f)),
    )
