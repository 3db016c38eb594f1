"""Which decode node: the least predicted time between tokens at the moment the prefill ends, where there is room."""

from dataclasses import dataclass

import numpy as np

from conductor.policy.config import NS
from conductor.policy.costs import ModelCosts, tbt_s
from conductor.policy.decisions import DecodeScore
from conductor.policy.kernels import kernels
from conductor.policy.nodes import Candidates
from conductor.policy.requests import Pace, RequestTable

__all__ = ["DecodeChoice", "choose_decode", "peak_tokens", "wait_for_room_s", "wait_for_tbt_s"]


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """The candidate chosen: predicted TBT with this request in the batch, and ledger room left before it."""

    index: int
    tbt_s: float
    free_tokens: int

    def explain(self, ids: tuple[str, ...]) -> tuple[DecodeScore, ...]:
        """The candidate chosen."""
        return (DecodeScore(ids[self.index], self.tbt_s, self.free_tokens),)


def peak_tokens(prompt_tokens: int, max_new_tokens: int, block_tokens: int) -> int:
    """The pages a request may need, in tokens: whole blocks."""
    return -(-(prompt_tokens + max_new_tokens) // block_tokens) * block_tokens


def choose_decode(
    nodes: Candidates,
    table: RequestTable,
    costs: ModelCosts,
    *,
    at_ns: int,
    prompt_tokens: int,
    need_tokens: int,
    num_slots: int,
) -> DecodeChoice:
    """For a request whose prefill ends at `at_ns`: least TBT with room; where none has room, the one with most free."""
    pace = _pace(costs, costs.typical_step_s)
    chosen = kernels().choose_decode(
        table.table,
        len(table),
        at_ns,
        -1 if pace.decode_ns is None else pace.decode_ns,
        pace.step_ns,
        np.empty((num_slots, 3), np.int64),
        nodes.slots,
        nodes.capacity_tokens,
        nodes.max_batch,
        prompt_tokens,
        need_tokens,
        costs.decode,
    )
    return DecodeChoice(*chosen)


def wait_for_room_s(
    nodes: Candidates, index: int, table: RequestTable, costs: ModelCosts, *, now_ns: int, missing_tokens: int
) -> float:
    """Predicted seconds until `missing_tokens` more are free on the candidate; 0 when none is missing."""
    if missing_tokens <= 0:
        return 0.0
    freed, end_ns = 0, now_ns
    for end, committed, _ in _departures(nodes, index, table, costs, now_ns):
        if freed >= missing_tokens:
            break
        freed, end_ns = freed + committed, end
    return (end_ns - now_ns) / NS


def wait_for_tbt_s(
    nodes: Candidates,
    index: int,
    table: RequestTable,
    costs: ModelCosts,
    *,
    now_ns: int,
    prompt_tokens: int,
    objective_s: float,
) -> float:
    """Predicted seconds until enough requests have left the candidate for one more to meet the objective.

    When not even an empty node meets it: until the node is empty.
    """
    leaving = _departures(nodes, index, table, costs, now_ns)
    batch, context = len(leaving) + 1, sum(tokens for _, _, tokens in leaving) + prompt_tokens
    end_ns = now_ns
    for end, _, tokens in leaving:
        if tbt_s(*costs.decode, batch, context, int(nodes.max_batch[index])) <= objective_s:
            break
        batch, context, end_ns = batch - 1, context - tokens, end
    return (end_ns - now_ns) / NS


def _departures(
    nodes: Candidates, index: int, table: RequestTable, costs: ModelCosts, now_ns: int
) -> list[tuple[int, int, int]]:
    """Who leaves the candidate when, at the pace that its requests give it."""
    slot = int(nodes.slots[index])
    batch, context = table.claims_at(slot)
    step_s = tbt_s(*costs.decode, batch, context, int(nodes.max_batch[index]))
    return table.departures(slot, now_ns, _pace(costs, step_s))


def _pace(costs: ModelCosts, step_s: float) -> Pace:
    mean_s = costs.decode_time.mean_s
    return Pace(None if mean_s is None else round(mean_s * NS), max(1, round(step_s * NS)))
