"""Who reaches the first token how soon: a request's seat in line, the prefixes it may use, Algorithm 1 over both.

It gathers what one compiled loop (`reach_kernels`) needs, and gives names to what that found.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.algorithm1 import PrefillScores, Prefixes
from conductor.policy.costs import ModelCosts
from conductor.policy.events import RequestArrived
from conductor.policy.kernels import reach_kernels
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.placement_prefixes import find_prefixes, most_reused, usable_slots
from conductor.policy.quick import quick
from conductor.policy.requests import Claim
from conductor.policy.seats import Seat, standing
from conductor.policy.state import ClusterState

__all__ = ["Reach", "reach"]


@quick
@dataclass(frozen=True, slots=True)
class Reach:
    """What was found of the prefill candidates, while each that a request waits for is a prefill in line."""

    sums: NDArray[np.int64]  # [slots, 3]: what `state.tally` finds
    seat: Seat
    prefixes: Prefixes
    scores: PrefillScores


def reach(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    nodes: Candidates,
    model: ModelNodes,
    former: Claim | None,
    costs: ModelCosts,
) -> Reach:
    """The request's ticket is taken. `former`: what an earlier attempt claimed."""

    def reusable_tokens() -> int:
        sums = state.tally(now_ns)
        return find_prefixes(state, request, model, request.matches, nodes, sums).best * model.block_tokens

    shares, account, clock, me = standing(now_ns, state, request, former, costs, reusable_tokens)
    matches, requests, transfers, slots = request.matches, state.requests, state.transfers, nodes.slots
    count, num_slots = len(slots), state.nodes.num_slots
    sums, room = np.empty((num_slots, 3), np.int64), np.empty((4, num_slots), np.int64)
    own, queue_s, seconds = np.empty((2, count), np.int64), np.empty(count), np.empty((2, count))
    reuse, fetches = np.empty(count, np.int64), np.empty(count, np.bool_)
    clock.now_ns, ticket_ns, best, blocks, ssd_blocks, num_sends, chosen, ttft_s = reach_kernels().reach(
        requests.table,
        requests.turns,
        len(requests.claims),
        me,
        clock.now_ns,
        clock.started_ns,
        account.finish_ns,
        matches.blocks,
        matches.ssd_blocks,
        usable_slots(state, request, matches),
        most_reused(request, model),
        state.copy_sends(),
        slots,
        nodes.pool_slots,
        request.prompt_tokens,
        model.block_tokens,
        model.block_nbytes,
        state.config.balancing_threshold,
        costs.paces.slowdown,
        costs.terms.prefill,
        costs.prefill_most,
        transfers.of("load"),
        transfers.of("fetch"),
        transfers.of("ssd_read"),
        sums,
        room,
        own,
        queue_s,
        seconds,
        reuse,
        fetches,
    )
    seat = Seat(shares, account, me, room, ticket_ns, queue_s)
    prefixes = Prefixes(own, blocks, ssd_blocks, matches.roster[best] if best >= 0 else "", num_sends)
    return Reach(sums, seat, prefixes, PrefillScores(seconds, queue_s, reuse, fetches, chosen, ttft_s))
