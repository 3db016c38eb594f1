"""The compiled loops over what decodes: how many sequences and tokens a node will have, and when it has room.

Three views of the future, `sees`: NOW is what decodes at this moment. UNIFORM (Mooncake, section 6.3) adds those whose
prefill will have ended, and takes away those that will have decoded for longer than `decode_ns`. LEARNED takes each for
as likely to be there as its length curve says, given how far it has come: sums are expected values; and those whose
prefill ends later, in full: they are admitted, and decode beside whoever was there first. They only compute.

Which decode node: the least predicted time between tokens at the moment the prefill ends, where there is room.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from conductor.policy.config import NS, AdmissionMode
from conductor.policy.costs import DECODE, ModelCosts
from conductor.policy.decisions import DecodeScore
from conductor.policy.event_bounds import to_ns
from conductor.policy.fast_dataclass import fast_dataclass
from conductor.policy.lengths import survival
from conductor.policy.nodes import Candidates
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
from conductor.policy.state import ClusterState
from jit.compiling import compiled_with_gil
from worker.policy import cost_formulas

__all__ = [
    "LEARNED",
    "NOW",
    "UNIFORM",
    "DecodeChoice",
    "DecodeKernels",
    "choose_decode",
    "decode_kernels",
    "peak_tokens",
    "tbt_each_s",
    "tbt_now_s",
    "wait_for_room_s",
    "wait_for_tbt_s",
]

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
    """Write the decode load at `at_ns` into `load` [slots, 3]: sequences, tokens of context, committed tokens."""
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
    `slowdown` [2, slots]: see `slowdowns`. `sums` [slots, 3] is what `tally` found, committed tokens at 1.
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
    """Return the expected wait until requests on the node have given back `missing_tokens`.

    With `objective_s` > 0 it is the wait until so many have left that one more decodes within that TBT. No arrivals are
    assumed. If neither is ever reached, it is the wait until all have left.
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
        compiled_with_gil(predict_load, types.void(wide, n, n, n, n, n, n, reals, types.boolean, reals)),
        compiled_with_gil(
            pick_decode, chosen(wide, n, n, n, n, n, n, reals, wide, reals, ints, ints, ints, reals, n, n, five)
        ),
        compiled_with_gil(
            rank_decode, types.void(wide, reals, ints, ints, ints, reals, n, n, five, floats, ints, ints)
        ),
        compiled_with_gil(load_now, pair(wide, n, n, n, n, n, reals)),
        compiled_with_gil(wait_ns, n(wide, n, n, n, n, n, reals, five, f, n, n, n, f)),
    )


_SEES: Final[Mapping[AdmissionMode, int]] = {
    "none": LEARNED,
    "load": NOW,
    "early": NOW,
    "predicted-uniform": UNIFORM,
    "predicted": LEARNED,
}


@fast_dataclass
@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """The candidate chosen: predicted TBT with this request in the batch, and ledger room left before it."""

    index: int
    tbt_s: float
    free_tokens: int
    is_covered: bool  # such a step was measured
    scores: tuple[DecodeScore, ...] = ()  # of the best candidates, where the policy explains


def peak_tokens(prompt_tokens: int, max_new_tokens: int, block_tokens: int) -> int:
    """The pages a request may need, in tokens: whole blocks."""
    return -(-(prompt_tokens + max_new_tokens) // block_tokens) * block_tokens


def choose_decode(
    nodes: Candidates,
    state: ClusterState,
    costs: ModelCosts,
    sums: NDArray[np.int64],
    *,
    now_ns: int,
    at_ns: int,
    prompt_tokens: int,
    need_tokens: int,
) -> DecodeChoice:
    """For a request whose prefill ends at `at_ns`: least TBT with room; where none has room, the one with most free.

    `sums` [slots, 3]: what `state.tally` found. Load is what the mode of admission goes by (`decode_kernels`).
    """
    sees = _SEES[state.config.admission_mode]
    load = np.empty((len(sums), 3))
    index, tbt_s, free_tokens, batch, context = decode_kernels().pick_decode(
        state.requests.table,
        len(state.requests),
        now_ns,
        now_ns if sees == NOW else at_ns,
        sees,
        _decode_ns(costs),
        _step_ns(costs),
        state.lengths.curves,
        sums,
        load,
        nodes.slots,
        nodes.capacity_tokens,
        nodes.max_batch,
        costs.slowdowns.factors,
        prompt_tokens,
        need_tokens,
        costs.terms.decode_terms,
    )
    scores = _scores(nodes, state, costs, sums, load, prompt_tokens, need_tokens) if state.config.explain else ()
    return DecodeChoice(index, tbt_s, free_tokens, costs.covers_decode(batch, context), scores)


def _scores(
    nodes: Candidates,
    state: ClusterState,
    costs: ModelCosts,
    sums: NDArray[np.int64],
    load: NDArray[np.float64],
    prompt_tokens: int,
    need_tokens: int,
) -> tuple[DecodeScore, ...]:
    """The best candidates, best first."""
    best = np.empty(min(state.config.explain, len(nodes)), np.int64)
    seconds, free = np.empty(len(nodes)), np.empty(len(nodes), np.int64)
    decode_kernels().rank_decode(
        sums,
        load,
        nodes.slots,
        nodes.capacity_tokens,
        nodes.max_batch,
        costs.slowdowns.factors,
        prompt_tokens,
        need_tokens,
        costs.terms.decode_terms,
        seconds,
        free,
        best,
    )
    rows = zip(best.tolist(), seconds[best].tolist(), free[best].tolist(), strict=True)
    return tuple(DecodeScore(nodes.ids[index], *terms) for index, *terms in rows)


def tbt_each_s(
    nodes: Candidates,
    state: ClusterState,
    costs: ModelCosts,
    sums: NDArray[np.int64],
    *,
    now_ns: int,
    at_ns: int,
    prompt_tokens: int,
) -> NDArray[np.float64]:
    """[2, candidates]: what `choose_decode` predicts of each, and the same as of now; `sums` as there."""
    sees, kernels = _SEES[state.config.admission_mode], decode_kernels()
    load, seconds, free = np.empty((len(sums), 3)), np.empty((2, len(nodes))), np.empty(len(nodes), np.int64)
    columns, none = (
        (nodes.slots, nodes.capacity_tokens, nodes.max_batch, costs.slowdowns.factors),
        np.empty(0, np.int64),
    )
    for row, (when_ns, how) in enumerate(((at_ns, sees), (now_ns, NOW))):
        kernels.pick_decode(
            state.requests.table,
            len(state.requests),
            now_ns,
            now_ns if how == NOW else when_ns,
            how,
            _decode_ns(costs),
            _step_ns(costs),
            state.lengths.curves,
            sums,
            load,
            *columns,
            prompt_tokens,
            0,
            costs.terms.decode_terms,
        )
        terms = costs.terms.decode_terms
        kernels.rank_decode(sums, load, *columns, prompt_tokens, 0, terms, seconds[row], free, none)
    return seconds


def tbt_now_s(nodes: Candidates, index: int, state: ClusterState, costs: ModelCosts, now_ns: int, row: int) -> float:
    """Predicted TBT of request `row` among those that decode on the candidate now."""
    requests = state.requests
    batch, context = decode_kernels().load_now(
        requests.table, len(requests), int(nodes.slots[index]), row, now_ns, _step_ns(costs), state.lengths.curves
    )
    prompt_tokens = 0 if row == NONE else int(requests.column("prompt")[row])
    max_batch, slot = int(nodes.max_batch[index]), int(nodes.slots[index])
    return costs.step_cost_s(batch + 1, context + prompt_tokens, max_batch, slot)


def wait_for_room_s(
    nodes: Candidates, index: int, state: ClusterState, costs: ModelCosts, *, now_ns: int, missing_tokens: int
) -> float:
    """Predicted seconds until `missing_tokens` more are free on the candidate; 0 when none is missing."""
    if missing_tokens <= 0:
        return 0.0
    return _wait_s(nodes, index, state, costs, now_ns, missing_tokens, 0, 0.0)


def wait_for_tbt_s(
    nodes: Candidates,
    index: int,
    state: ClusterState,
    costs: ModelCosts,
    *,
    now_ns: int,
    prompt_tokens: int,
    objective_s: float,
) -> float:
    """Predicted seconds until enough requests have left the candidate for one more to meet the objective.

    When not even an empty node meets it: until the node is empty.
    """
    return _wait_s(nodes, index, state, costs, now_ns, 0, prompt_tokens, objective_s)


def _wait_s(
    nodes: Candidates,
    index: int,
    state: ClusterState,
    costs: ModelCosts,
    now_ns: int,
    missing_tokens: int,
    prompt_tokens: int,
    objective_s: float,
) -> float:
    # What is going to end is not to be seen by looking at what is there.
    sees = UNIFORM if _SEES[state.config.admission_mode] == UNIFORM else LEARNED
    wait_ns: int = decode_kernels().wait_ns(
        state.requests.table,
        len(state.requests),
        int(nodes.slots[index]),
        now_ns,
        sees,
        _decode_ns(costs),
        state.lengths.curves,
        costs.terms.decode_terms,
        costs.slowdowns.of(DECODE, int(nodes.slots[index])),
        int(nodes.max_batch[index]),
        missing_tokens,
        prompt_tokens,
        objective_s,
    )
    return wait_ns / NS


def _decode_ns(costs: ModelCosts) -> int:
    """t_d, how long a request decodes (Mooncake, section 6.3); -1 while unknown."""
    mean_s = costs.decode_time.mean_s
    return -1 if mean_s is None else to_ns(mean_s)


def _step_ns(costs: ModelCosts) -> int:
    """A token per step."""
    return max(1, to_ns(costs.typical_step_s))
