"""Choice of the decode node: the least predicted TBT at the moment the prefill ends, among those that have room.

The compiled loops predict how many sequences and tokens a node will have, and when it has room, by one of three views
of the future. NOW is what decodes at this moment. UNIFORM (Mooncake, section 6.3) adds requests whose prefill will have
ended, and removes those that will have decoded for longer than `decode_ns`. LEARNED weights each request with the
probability that it is still there, by its length curve and its progress: sums are expected values. Requests whose
prefill ends later count in full, since they are admitted and decode beside the earlier ones.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from conductor.policy.costs import DECODE, DECODE_COSTS, ModelCosts
from conductor.policy.decisions import DecodeScore
from conductor.policy.events import NS, to_ns
from conductor.policy.kernels import NODE_LOAD
from conductor.policy.lengths import survival
from conductor.policy.nodes import DECODE_CANDIDATE, Candidates
from conductor.policy.requests import NONE, REQUEST
from conductor.policy.state import ClusterState, PlacementContext
from jit.compiling import compiled_with_gil
from jit.fast_dataclass import fast_dataclass
from settings.conductor import AdmissionMode
from worker.policy import cost_formulas

__all__ = [
    "LEARNED",
    "NOW",
    "UNIFORM",
    "DecodeChoice",
    "DecodeKernels",
    "choose_decode",
    "decode_kernels",
    "mean_load",
    "peak_tokens",
    "tbt_each_s",
    "tbt_now_s",
    "wait_for_room_s",
    "wait_for_tbt_s",
]

Records = NDArray[np.void]
NOW, UNIFORM, LEARNED = range(3)
_LONGEST_NS: Final = 86_400_000_000_000  # of a wait: one day
_NEAR_NS: Final = 1_000_000  # precision of waits
_tbt_s: Any = numba.njit(cost_formulas.tbt_s)
_margin: Any = numba.njit(cost_formulas.margin)
_survival: Any = numba.njit(survival)


DECODE_QUERY: Final = np.dtype(
    [
        ("now_ns", np.int64),
        ("at_ns", np.int64),  # the instant whose load is predicted
        ("future", np.int64),  # NOW, UNIFORM or LEARNED
        ("decode_ns", np.int64),  # t_d, how long a request decodes; -1 while unknown
        ("step_ns", np.int64),  # of a usual step
        ("prompt_tokens", np.int64),  # of the request to place
        ("need_tokens", np.int64),  # pages that it needs
    ]
)
"""What to predict: at which instant, by which view of the future, for which request."""


def predict_load(requests: Any, query: Any, curves: Any, counts_committed: Any, loads: Any) -> None:
    """Write the decode load at `at_ns` into `loads` [slots]: sequences, context and, if asked for, expected committed
    tokens.

    `requests` REQUEST [n], `query` DECODE_QUERY [1], `curves` of `Lengths`.
    """
    # One loop without calls that return several values: they would take three times as long.
    for slot in range(len(loads)):
        loads[slot].sequences = 0.0
        loads[slot].context = 0.0
        loads[slot].expected = 0.0
    now_ns, at_ns, sees, decode_ns = query[0].now_ns, query[0].at_ns, query[0].future, query[0].decode_ns
    per_ns = 1.0 / query[0].step_ns
    for row in range(len(requests)):
        request = requests[row]
        slot = request.decode_node
        if slot == NONE:
            continue
        joined = request.joined_ns
        # What has not joined yet does so now at the earliest.
        since = joined if joined != NONE else max(request.ready_ns, now_ns)
        limit = float(request.max_new)  # 0: not known
        share, grown = 1.0, 0.0
        if since > at_ns:
            if not counts_committed and sees != LEARNED:
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
            base, curve = float(request.generated), request.curve
            share = _survival(curves, curve, base + grown)
            if base + before > 0.0:
                alive = _survival(curves, curve, base + before)
                share = share / alive if alive > 0.0 else 1.0
        else:
            grown = (at_ns - since) * per_ns
            if sees == NOW:
                if joined == NONE and request.prefill_ns != 0:
                    continue
            elif decode_ns >= 0:
                if at_ns - since > decode_ns:
                    continue
            elif 0.0 < limit <= grown:
                continue
        loads[slot].sequences += share
        loads[slot].context += share * (request.prompt + min(grown, limit))
        if counts_committed:
            loads[slot].expected += share * request.committed


_predict_load: Any = numba.njit(predict_load)


def _step(cost: Any, slowdown: Any, batch: Any, context: Any, max_batch: Any) -> Any:
    """Seconds between tokens, as `ModelCosts.step_cost_s` has it."""
    seconds = _tbt_s(cost.fixed_s, cost.per_sequence_s, cost.per_token_s, batch, context, max_batch) * slowdown
    if batch <= max_batch:
        return seconds * _margin(batch, cost.most_batch, context, cost.most_context)
    turns = batch / max_batch
    return seconds * _margin(batch / turns, cost.most_batch, context / turns, cost.most_context)


_step_of: Any = numba.njit(_step)


def pick_decode(requests: Any, query: Any, curves: Any, loads: Any, slowdowns: Any, costs: Any, candidates: Any) -> Any:
    """Choose the candidate with the least TBT that has room for `need_tokens`; predict all candidates.

    Return (index, sequences in one step, tokens of context), the last two with this request. If none has room, choose
    the one with the most free tokens; of equals the first. `loads` NODE_LOAD [slots] as `tally` leaves it, `slowdowns`
    [2, slots] (`NodeSlowdowns`), `costs` DECODE_COSTS [1], `candidates` DECODE_CANDIDATE [n].
    """
    _predict_load(requests, query, curves, False, loads)
    prompt_tokens, need_tokens = query[0].prompt_tokens, query[0].need_tokens
    chosen, has_room, tbt_s, free = -1, False, 0.0, np.int64(0)
    for c in range(len(candidates)):
        node = candidates[c]
        load = loads[node.slot]
        here_free = node.capacity_tokens - load.committed
        batch, context = load.sequences + 1.0, load.context + prompt_tokens
        here_s = _step_of(costs[0], slowdowns[DECODE, node.slot], batch, context, node.max_batch)
        node.tbt_s, node.free_tokens = here_s, here_free
        here_room = here_free >= need_tokens
        if has_room and not here_room:
            continue
        if chosen < 0 or here_room != has_room or (here_s < tbt_s if here_room else here_free > free):
            chosen, has_room, tbt_s, free = c, here_room, here_s, here_free
    load = loads[candidates[chosen].slot]
    return chosen, min(load.sequences + 1.0, float(candidates[chosen].max_batch)), load.context + prompt_tokens


def rank_decode(candidates: Any, need_tokens: Any, found: Any) -> None:
    """After `pick_decode`: write into `found` the indices of the best candidates, in the order of its choice."""
    count = 0
    for c in range(len(candidates)):
        here = candidates[c]
        at, has_room = count, here.free_tokens >= need_tokens
        while at > 0:
            other = candidates[found[at - 1]]
            if has_room != (other.free_tokens >= need_tokens):
                is_better = has_room
            elif has_room:
                is_better = here.tbt_s < other.tbt_s
            else:
                is_better = here.free_tokens > other.free_tokens
            if not is_better:
                break
            if at < len(found):
                found[at] = found[at - 1]
            at -= 1
        if at < len(found):
            found[at] = c
            count = min(count + 1, len(found))


def _at_node(requests: Any, slot: Any, but: Any) -> Any:
    """Return a copy of the node's requests, but for row `but`, in which the node has slot 0."""
    count = 0
    for row in range(len(requests)):
        count += requests[row].decode_node == slot and row != but
    here = np.empty(count, REQUEST)
    at = 0
    for row in range(len(requests)):
        if requests[row].decode_node == slot and row != but:
            here[at] = requests[row]
            here[at].decode_node = 0
            at += 1
    return here


_at_node_of: Any = numba.njit(_at_node)


def load_now(requests: Any, query: Any, curves: Any, slot: Any, but: Any) -> Any:
    """(sequences, tokens of context) that decode on the node now, but for row `but`; `query` NOW at `now_ns`."""
    here, loads = _at_node_of(requests, slot, but), np.empty(1, NODE_LOAD)
    _predict_load(here, query, curves, False, loads)
    return loads[0].sequences, loads[0].context


def wait_ns(
    requests: Any, query: Any, curves: Any, slowdowns: Any, costs: Any, candidate: Any, objective_s: Any
) -> Any:
    """Return the expected wait until requests on the node have given back `need_tokens`.

    With `objective_s` > 0 it is the wait until so many have left that one more decodes within that TBT. No arrivals are
    assumed. If neither is ever reached, it is the wait until all have left. `candidate` DECODE_CANDIDATE [1]. Changes
    `query.at_ns`.
    """
    node, asked = candidate[0], query[0]
    here, loads = _at_node_of(requests, node.slot, -1), np.empty(1, NODE_LOAD)
    now_ns, slowdown, count = asked.now_ns, slowdowns[DECODE, node.slot], len(here)
    prompts = committed = 0
    for row in range(count):
        prompts += here[row].prompt
        committed += here[row].committed
    step_s = _step_of(costs[0], slowdown, float(count), float(prompts), node.max_batch)
    step_ns = np.int64(max(1.0, min(1e9 * step_s, float(_LONGEST_NS))))
    asked.step_ns = step_ns
    low = high = now_ns
    for row in range(count):
        joined, limit = here[row].joined_ns, here[row].max_new
        lasts_ns = _LONGEST_NS
        if asked.future == UNIFORM and asked.decode_ns >= 0:
            lasts_ns = min(_LONGEST_NS, asked.decode_ns + 1)
        elif 0 < limit <= _LONGEST_NS // step_ns:
            lasts_ns = limit * step_ns
        high = max(high, max(now_ns, joined if joined != NONE else here[row].ready_ns) + lasts_ns)
    at_ns = now_ns
    while True:
        asked.at_ns = at_ns
        _predict_load(here, query, curves, True, loads)
        if objective_s > 0.0:
            batch, context = loads[0].sequences + 1.0, loads[0].context + asked.prompt_tokens
            is_over = _step_of(costs[0], slowdown, batch, context, node.max_batch) <= objective_s
        else:
            is_over = committed - loads[0].expected >= asked.need_tokens
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
    requests, query, loads, costs, candidates = (
        types.Array(numba.from_dtype(dtype), 1, "C")
        for dtype in (REQUEST, DECODE_QUERY, NODE_LOAD, DECODE_COSTS, DECODE_CANDIDATE)
    )
    ints, reals = types.Array(n, 1, "C"), types.Array(f, 2, "C")
    return DecodeKernels(
        compiled_with_gil(predict_load, types.void(requests, query, reals, types.boolean, loads)),
        compiled_with_gil(
            pick_decode, signatures.Tuple((n, f, f))(requests, query, reals, loads, reals, costs, candidates)
        ),
        compiled_with_gil(rank_decode, types.void(candidates, n, ints)),
        compiled_with_gil(load_now, signatures.UniTuple(f, 2)(requests, query, reals, n, n)),
        compiled_with_gil(wait_ns, n(requests, query, reals, reals, costs, candidates, f)),
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
    """Return the capacity that a request may need, in tokens, rounded up to whole blocks."""
    return -(-(prompt_tokens + max_new_tokens) // block_tokens) * block_tokens


def choose_decode(
    context: PlacementContext, nodes: Candidates, loads: Records, *, at_ns: int, need_tokens: int
) -> DecodeChoice:
    """Choose for a prefill that ends at `at_ns`: least TBT with room; if none has room, the most free tokens.

    `loads` [slots]: as `state.tally` leaves it. The admission mode decides how load is predicted (`decode_kernels`).
    """
    state, costs = context.state, context.costs
    sees = _SEES[state.config.admission_mode]
    candidates = nodes.decode_records()
    index, batch, tokens = _pick(context, candidates, loads, sees, at_ns, need_tokens)
    scores = _scores(nodes, candidates, state.config.explain, need_tokens) if state.config.explain else ()
    return DecodeChoice(
        index,
        candidates["tbt_s"].item(index),
        candidates["free_tokens"].item(index),
        costs.covers_decode(batch, tokens),
        scores,
    )


def _pick(
    context: PlacementContext, candidates: Records, loads: Records, future: int, at_ns: int, need_tokens: int
) -> tuple[int, float, float]:
    """Run `pick_decode` for the request by one view of the future; NOW ignores `at_ns`."""
    state, request, costs, now_ns = context.state, context.request, context.costs, context.now_ns
    when_ns = now_ns if future == NOW else at_ns
    picked: tuple[int, float, float] = decode_kernels().pick_decode(
        state.requests.records,
        _query(costs, now_ns, when_ns, future, request.most_held(request.prompt_tokens), need_tokens),
        state.lengths.curves,
        loads,
        costs.slowdowns.factors,
        costs.terms.decode_record,
        candidates,
    )
    return picked


def _scores(nodes: Candidates, candidates: Records, count: int, need_tokens: int) -> tuple[DecodeScore, ...]:
    """The `count` best candidates, best first."""
    best = np.empty(min(count, len(nodes)), np.int64)
    decode_kernels().rank_decode(candidates, need_tokens, best)
    ranked = candidates[best]
    rows = zip(best.tolist(), ranked["tbt_s"].tolist(), ranked["free_tokens"].tolist(), strict=True)
    return tuple(DecodeScore(nodes.ids[index], *terms) for index, *terms in rows)


def tbt_each_s(context: PlacementContext, nodes: Candidates, loads: Records, *, at_ns: int) -> NDArray[np.float64]:
    """Return [2, candidates]: the TBT that `choose_decode` predicts of each, and the same as of now."""
    candidates, seconds = nodes.decode_records(), np.empty((2, len(nodes)))
    for row, future in enumerate((_SEES[context.state.config.admission_mode], NOW)):
        _pick(context, candidates, loads, future, at_ns, need_tokens=0)
        seconds[row] = candidates["tbt_s"]
    return seconds


def mean_load(now_ns: int, state: ClusterState, costs: ModelCosts) -> Records:
    """Return NODE_LOAD [slots] with the decode load of now: `sequences` and `context`."""
    loads = np.empty(state.nodes.num_slots, NODE_LOAD)
    query = _query(costs, now_ns, now_ns, NOW)
    decode_kernels().predict_load(state.requests.records, query, state.lengths.curves, False, loads)
    return loads


def tbt_now_s(nodes: Candidates, index: int, state: ClusterState, costs: ModelCosts, now_ns: int, row: int) -> float:
    """Predicted TBT of request `row` among those that decode on the candidate now."""
    requests, slot = state.requests, int(nodes.slots[index])
    query = _query(costs, now_ns, now_ns, NOW)
    batch, context = decode_kernels().load_now(requests.records, query, state.lengths.curves, slot, row)
    prompt_tokens = 0 if row == NONE else int(requests.column("prompt")[row])
    return costs.step_cost_s(batch + 1, context + prompt_tokens, int(nodes.max_batch[index]), slot)


def wait_for_room_s(
    nodes: Candidates, index: int, state: ClusterState, costs: ModelCosts, *, now_ns: int, missing_tokens: int
) -> float:
    """Predicted seconds until `missing_tokens` more are free on the candidate; 0 when none is missing."""
    if missing_tokens <= 0:
        return 0.0
    query = _query(costs, now_ns, now_ns, _waits_by(state), 0, missing_tokens)
    return _wait_s(nodes, index, state, costs, query, 0.0)


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
    query = _query(costs, now_ns, now_ns, _waits_by(state), prompt_tokens)
    return _wait_s(nodes, index, state, costs, query, objective_s)


def _waits_by(state: ClusterState) -> int:
    """The view of waits: NOW knows of no end of any request."""
    return UNIFORM if _SEES[state.config.admission_mode] == UNIFORM else LEARNED


def _wait_s(
    nodes: Candidates, index: int, state: ClusterState, costs: ModelCosts, query: Records, objective_s: float
) -> float:
    wait_ns: int = decode_kernels().wait_ns(
        state.requests.records,
        query,
        state.lengths.curves,
        costs.slowdowns.factors,
        costs.terms.decode_record,
        nodes.decode_records()[index : index + 1],
        objective_s,
    )
    return wait_ns / NS


def _query(
    costs: ModelCosts, now_ns: int, at_ns: int, future: int, prompt_tokens: int = 0, need_tokens: int = 0
) -> Records:
    """Return DECODE_QUERY [1]; in a typical step each request receives one token."""
    mean_s = costs.decode_time.mean_s  # t_d, how long a request decodes (Mooncake, section 6.3)
    decode_ns = -1 if mean_s is None else to_ns(mean_s)
    query = np.empty(1, DECODE_QUERY)
    query[0] = now_ns, at_ns, future, decode_ns, max(1, to_ns(costs.typical_step_s)), prompt_tokens, need_tokens
    return query
