"""Which decode node: the least predicted time between tokens at the moment the prefill ends, where there is room."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.config import NS, AdmissionMode
from conductor.policy.costs import DECODE, ModelCosts
from conductor.policy.credible import to_ns
from conductor.policy.decisions import DecodeScore
from conductor.policy.decode_kernels import LEARNED, NOW, UNIFORM, decode_kernels
from conductor.policy.nodes import Candidates
from conductor.policy.quick import quick
from conductor.policy.requests import NONE
from conductor.policy.state import ClusterState

__all__ = [
    "DecodeChoice",
    "choose_decode",
    "peak_tokens",
    "tbt_each_s",
    "tbt_now_s",
    "wait_for_room_s",
    "wait_for_tbt_s",
]

_SEES: Final[Mapping[AdmissionMode, int]] = {
    "none": LEARNED,
    "load": NOW,
    "early": NOW,
    "predicted-uniform": UNIFORM,
    "predicted": LEARNED,
}


@quick
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
        costs.paces.slowdown,
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
        costs.paces.slowdown,
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
    columns, none = (nodes.slots, nodes.capacity_tokens, nodes.max_batch, costs.paces.slowdown), np.empty(0, np.int64)
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
        costs.paces.of(DECODE, int(nodes.slots[index])),
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
