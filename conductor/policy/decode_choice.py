"""Which decode node: the least predicted time between tokens at the moment the prefill ends, where there is room."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.config import NS
from conductor.policy.costs import ModelCosts
from conductor.policy.nodes import Candidates
from conductor.policy.requests import Pace, RequestTable

__all__ = ["DecodeScores", "peak_tokens", "score_decode", "wait_for_room_s", "wait_for_tbt_s"]


@dataclass(frozen=True, slots=True)
class DecodeScores:
    """Per candidate: predicted TBT with this request in the batch, and ledger room left before it."""

    tbt_s: NDArray[np.float64]
    free_tokens: NDArray[np.int64]
    need_tokens: int

    @property
    def has_room(self) -> NDArray[np.bool_]:
        """Can the request's peak be committed now?"""
        return self.free_tokens >= self.need_tokens

    def choose(self) -> int:
        """Index of the node: least TBT with room; where none has room, the one with most free. First of equals."""
        if self.has_room.any():
            return int(np.argmin(np.where(self.has_room, self.tbt_s, np.inf)))
        return int(np.argmax(self.free_tokens))


def peak_tokens(prompt_tokens: int, max_new_tokens: int, block_tokens: int) -> int:
    """The pages a request may need, in tokens: whole blocks."""
    return -(-(prompt_tokens + max_new_tokens) // block_tokens) * block_tokens


def score_decode(
    nodes: Candidates,
    table: RequestTable,
    costs: ModelCosts,
    *,
    at_ns: int,
    prompt_tokens: int,
    need_tokens: int,
    num_slots: int,
) -> DecodeScores:
    """Score all candidates for a request whose prefill ends at `at_ns`."""
    batch, context = table.decoding_at(at_ns, num_slots, _pace(costs, costs.typical_step_s))
    committed = table.committed_tokens(num_slots)[nodes.slots].astype(np.int64)
    tbt_s = _tbt_s(costs, batch[nodes.slots] + 1, context[nodes.slots] + prompt_tokens, nodes.max_batch)
    return DecodeScores(tbt_s, nodes.capacity_tokens - committed, need_tokens)


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
        if _tbt_s(costs, np.array(batch, float), np.array(context, float), nodes.max_batch[index]) <= objective_s:
            break
        batch, context, end_ns = batch - 1, context - tokens, end
    return (end_ns - now_ns) / NS


def _departures(
    nodes: Candidates, index: int, table: RequestTable, costs: ModelCosts, now_ns: int
) -> list[tuple[int, int, int]]:
    """Who leaves the candidate when, at the pace that its requests give it."""
    slot = int(nodes.slots[index])
    batch, context = table.claims_at(slot)
    step_s = float(_tbt_s(costs, np.array(batch, float), np.array(context, float), nodes.max_batch[index]))
    return table.departures(slot, now_ns, _pace(costs, step_s))


def _tbt_s(
    costs: ModelCosts, batch: NDArray[np.float64], context: NDArray[np.float64], max_batch: NDArray[np.int64]
) -> NDArray[np.float64]:
    # Beyond the largest batch the sequences take turns.
    turns = np.maximum(1.0, batch / max_batch)
    return costs.decode_step_s(batch / turns, context / turns) * turns


def _pace(costs: ModelCosts, step_s: float) -> Pace:
    mean_s = costs.decode_time.mean_s
    return Pace(None if mean_s is None else round(mean_s * NS), max(1, round(step_s * NS)))
