"""The compiled loops over what decodes: how many sequences and tokens a node will have, and when it has room.

Three views of the future, `sees`: NOW is what decodes at this moment. UNIFORM (Mooncake, section 6.3) adds those whose
prefill will have ended, and takes away those that will have decoded for longer than `decode_ns`. LEARNED takes each for
as likely to be there as its length curve says, given how far it has come: sums are expected values. They only compute.
"""

import functools
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types

from conductor.policy.length_kernels import survival
from conductor.policy.paces import DECODE
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
from messenger.native.compiling import compiled
from worker.policy import cost_formulas

__all__ = ["LEARNED", "NOW", "UNIFORM", "DecodeKernels", "decode_kernels"]

NOW, UNIFORM, LEARNED = range(3)
_LONGEST_NS: Final = 86_400_000_000_000  # a wait that nobody sits out
_NEAR_NS: Final = 1_000_000  # waits are found this exactly
_tbt_s: Any = numba.njit(cost_formulas.tbt_s)
_margin: Any = numba.njit(cost_formulas.margin)
_survival: Any = numba.njit(survival)


def _steps(elapsed: Any, step_ns: Any, per_ns: Any) -> Any:
    """elapsed // step_ns: the quotient by floating point is off by one at most."""
    steps = np.int64(elapsed * per_ns)
    rest = elapsed - steps * step_ns
    if rest < 0:
        return steps - 1
    return steps + 1 if rest >= step_ns else steps


_steps_of: Any = numba.njit(_steps)


def _since(table: Any, row: Any, now_ns: Any) -> Any:
    """When the row's decode began or is to begin: what has not joined yet does so now at the earliest."""
    joined = table[JOINED, row]
    return joined if joined != NONE else max(table[READY, row], now_ns)


_since_of: Any = numba.njit(_since)


def _presence(
    table: Any,
    row: Any,
    since: Any,
    now_ns: Any,
    at_ns: Any,
    sees: Any,
    decode_ns: Any,
    step_ns: Any,
    per_ns: Any,
    curves: Any,
) -> Any:
    """(how likely it is that the row decodes at `at_ns`, tokens that it will have added); `since` is no later."""
    limit = table[MAX_NEW, row]  # 0: not known
    elapsed = at_ns - since
    if sees != LEARNED:
        grown = _steps_of(elapsed, step_ns, per_ns)
        if sees == NOW:
            here = table[JOINED, row] != NONE or table[PREFILL_NS, row] == 0
        else:
            here = elapsed <= decode_ns if decode_ns >= 0 else limit == 0 or grown < limit
        return (1.0 if here else 0.0), min(grown, limit)
    before, begin = np.int64(0), since
    if now_ns > since:
        before, begin = _steps_of(now_ns - since, step_ns, per_ns), now_ns
    if limit > 0:
        # It is there now, however slow it was.
        before = min(before, limit - 1)
    after = before + _steps_of(at_ns - begin, step_ns, per_ns)
    if limit > 0 and after >= limit:
        return 0.0, limit
    base, curve = table[GENERATED, row], table[CURVE, row]
    alive = _survival(curves, curve, base + before)
    share = _survival(curves, curve, base + after) / alive if alive > 0.0 else 1.0
    return share, min(after, limit)


_presence_of: Any = numba.njit(_presence)


def _step(decode: Any, slowdown: Any, batch: Any, context: Any, max_batch: Any) -> Any:
    """Seconds between tokens, as `ModelCosts.step_cost_s` has it."""
    turns = max(1.0, batch / max_batch)
    seconds = _tbt_s(decode[0], decode[1], decode[2], batch, context, max_batch) * slowdown
    return seconds * _margin(batch / turns, decode[3], context / turns, decode[4])


_step_of: Any = numba.njit(_step)


def choose_decode(
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
    """(index, predicted TBT, free tokens) of the candidate with the least TBT that has room for `need_tokens`.

    Where none has room: of the one with most free. First of equals. `load` [slots, 2] is room for what decodes at
    `at_ns` per slot: sequences, tokens of context. `slowdown` [2, slots]: see `paces`. `sums` [slots, 3] is what
    `tally` found, committed tokens at 1.
    """
    load[:] = 0.0
    per_ns = 1.0 / step_ns
    for row in range(rows):
        slot = table[DECODE_NODE, row]
        if slot == NONE:
            continue
        since = _since_of(table, row, now_ns)
        if since > at_ns:
            continue
        share, grown = _presence_of(table, row, since, now_ns, at_ns, sees, decode_ns, step_ns, per_ns, curves)
        load[slot, 0] += share
        load[slot, 1] += share * (table[PROMPT, row] + grown)
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
    return chosen, tbt_s, free


def load_now(table: Any, rows: Any, slot: Any, but: Any, now_ns: Any, step_ns: Any) -> Any:
    """(sequences, tokens of context) that decode on the node now, but for row `but`."""
    per_ns = 1.0 / step_ns
    batch = context = np.int64(0)
    for row in range(rows):
        if table[DECODE_NODE, row] != slot or row == but:
            continue
        if table[JOINED, row] != NONE or table[PREFILL_NS, row] == 0:
            elapsed = now_ns - min(now_ns, _since_of(table, row, now_ns))
            batch += 1
            context += table[PROMPT, row] + min(_steps_of(elapsed, step_ns, per_ns), table[MAX_NEW, row])
    return batch, context


def _left(
    table: Any,
    here: Any,
    now_ns: Any,
    at_ns: Any,
    sees: Any,
    decode_ns: Any,
    step_ns: Any,
    curves: Any,
) -> Any:
    """(sequences, tokens of context, committed tokens given back) of rows `here` at `at_ns`, if nobody comes."""
    per_ns = 1.0 / step_ns
    batch, context, freed = 0.0, 0.0, 0.0
    for i in range(len(here)):
        row = here[i]
        since, share, grown = _since_of(table, row, now_ns), 1.0, np.int64(0)
        if since <= at_ns:
            share, grown = _presence_of(table, row, since, now_ns, at_ns, sees, decode_ns, step_ns, per_ns, curves)
        batch += share
        context += share * (table[PROMPT, row] + grown)
        freed += (1.0 - share) * table[COMMITTED, row]
    return batch, context, freed


_left_of: Any = numba.njit(_left)


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
    found = np.empty(rows, np.int64)
    count, context = 0, 0.0
    for row in range(rows):
        if table[DECODE_NODE, row] == slot:
            found[count] = row
            count += 1
            context += table[PROMPT, row]
    here = found[:count]
    step_s = _step_of(decode, slowdown, float(count), context, max_batch)
    step_ns = np.int64(max(1.0, min(1e9 * step_s, float(_LONGEST_NS))))
    low = high = now_ns
    for i in range(count):
        since, limit = max(now_ns, _since_of(table, here[i], now_ns)), table[MAX_NEW, here[i]]
        lasts_ns = _LONGEST_NS
        if 0 < limit <= _LONGEST_NS // step_ns:
            lasts_ns = limit * step_ns
        if sees == UNIFORM and decode_ns >= 0:
            lasts_ns = min(_LONGEST_NS, decode_ns + 1)
        high = max(high, since + lasts_ns)
    at_ns = now_ns
    while True:
        batch, context, freed = _left_of(table, here, now_ns, at_ns, sees, decode_ns, step_ns, curves)
        if objective_s > 0.0:
            next_s = _step_of(decode, slowdown, batch + 1.0, context + prompt_tokens, max_batch)
            is_over = next_s <= objective_s
        else:
            is_over = freed >= missing_tokens
        if is_over:
            high = at_ns
        else:
            low = at_ns
        if high - low <= _NEAR_NS:
            return high - now_ns
        at_ns = low + (high - low) // 2


class DecodeKernels(NamedTuple):
    """See the functions of the same names."""

    choose_decode: Any
    load_now: Any
    wait_ns: Any


@functools.cache
def decode_kernels() -> DecodeKernels:
    """All of them, compiled or loaded at the first call."""
    signatures: Any = types
    n, f = types.int64, types.float64
    ints, wide = types.Array(n, 1, "C"), types.Array(n, 2, "C")
    reals, five = types.Array(f, 2, "C"), signatures.UniTuple(f, 5)
    chosen, pair = signatures.Tuple((n, f, n)), signatures.UniTuple(n, 2)
    return DecodeKernels(
        compiled(
            choose_decode, chosen(wide, n, n, n, n, n, n, reals, wide, reals, ints, ints, ints, reals, n, n, five)
        ),
        compiled(load_now, pair(wide, n, n, n, n, n)),
        compiled(wait_ns, n(wide, n, n, n, n, n, reals, five, f, n, n, n, f)),
    )
