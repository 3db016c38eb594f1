"""Position of a request in the queue of its prefill node: its ordering key, the work ahead of it, and its charge."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.decisions import Place, Reject
from conductor.policy.events import NS, QueueKey, RequestArrived, to_ns
from conductor.policy.fairness import OTHERS, Account, Charge, Prices, Shares, Usage, VirtualTime
from conductor.policy.kernels import LATEST_NS, prefill_kernels
from conductor.policy.requests import NONE
from conductor.policy.state import ClusterState, PlacementContext
from jit.fast_dataclass import fast_dataclass

__all__ = [
    "QueuePosition",
    "accounts",
    "accrue_endless",
    "join_queue",
    "ordering_key",
    "record_prefill_start",
    "reject_endless",
    "restore_queue_key",
]

OrderingKey = tuple[int, int, int, int, int, int, int]
"""(now, level, account, priority, due, arrived, ages), times in ns of the policy's clock: as in ARRIVAL."""


@fast_dataclass
@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Account, ordering key and ticket of a request."""

    shares: Shares
    account: Account
    key: OrderingKey
    loads: NDArray[np.void]  # NODE_LOAD [slots], as `kernels.queue_position` leaves it
    ticket_ns: int

    @property
    def turn(self) -> QueueKey:
        """Ordering key as sent to the worker."""
        now_ns, level, _, priority, due_ns, arrived_ns, ages_ns = self.key
        waited_s, due_in_s, ages_in_s = (now_ns - arrived_ns) / NS, (due_ns - now_ns) / NS, (ages_ns - now_ns) / NS
        return QueueKey(level, self.account.token, self.ticket_ns, priority, waited_s, due_in_s, ages_in_s)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Ordering key as the last fields of REQUEST, from `level` on."""
        _, level, account, priority, due_ns, arrived_ns, ages_ns = self.key
        return level, account, self.ticket_ns, priority, due_ns, arrived_ns, ages_ns

    def take(self, state: ClusterState, row: int, slot: int) -> None:
        """Update the tickets of the account's requests in the queue that the request, booked in `row`, has joined."""
        # Tickets change hands only if the account has other requests in this queue and not all of them precede it.
        # A node that was not a candidate was not examined.
        loads = self.loads
        is_last = loads["later_ns"][slot] == LATEST_NS and loads["earlier_ns"][slot] <= self.ticket_ns
        if not is_last or not loads["is_candidate"][slot]:
            prefill_kernels().reassign_tickets(state.requests.records, row)


def ordering_key(
    context: PlacementContext, reusable_tokens: Callable[[], int]
) -> tuple[Shares, Account, VirtualTime, OrderingKey]:
    """Return the tenant's shares and account, the clock of the class, and the request's ordering key.

    `reusable_tokens` is called only where the objective depends on the reusable tokens of the prompt.
    """
    now_ns, state, request, former = context.now_ns, context.state, context.request, context.former
    wanted = state.slo.resolve(request.model, request.tenant, request.slo_class)
    if former is not None and not former.is_revived:
        objective_s = former.objectives.ttft_s
    elif not request.ttft_objective_s and not wanted.ttft.times:
        objective_s = wanted.ttft.seconds
    else:
        reused = min(reusable_tokens(), request.prompt_tokens - 1) if wanted.ttft.times else 0
        unloaded_s = _unloaded_s(context, reused) if wanted.ttft.times else 0.0
        objective_s = wanted.effective(request.ttft_objective_s, 0.0, unloaded_s, 0.0).ttft_s
    shares = state.shares_of(request.model)
    account = shares.account(request.tenant, state.is_charged)
    arrived_ns = now_ns - to_ns(request.waited_s) if request.waited_s else now_ns
    ages_ns = arrived_ns + state.aging_ns
    due_ns = min(ages_ns, arrived_ns + to_ns(objective_s)) if objective_s else ages_ns
    key = now_ns, wanted.priority, account.number, request.priority, due_ns, arrived_ns, ages_ns
    return shares, account, shares.clock(wanted.priority), key


def join_queue(context: PlacementContext, position: QueuePosition, row: int, placed: Place) -> None:
    """Add a placed request, booked in `row`, to the queue of its prefill node and charge its tenant."""
    state, request, costs, block_tokens = context.state, context.request, context.costs, context.model.block_tokens
    booked = state.requests.get
    position.take(state, row, booked(row, "prefill_node"))
    node = state.nodes.get(placed.decode or placed.prefill)
    assert node is not None
    num_blocks = node.capacity_tokens // block_tokens if booked(row, "decode_node") != NONE else 0
    prompt = request.prompt_tokens - request.generated
    charge = Charge(
        position.shares,
        position.account,
        Prices(costs.prefill, costs.decode, costs.typical_step_s, max(1, node.max_batch), num_blocks),
        prompt,
        min(placed.reuse_blocks * block_tokens, prompt),
        request.generated,
        booked(row, "committed") // block_tokens,
        request.endless,
        request.window_tokens,
    )
    charge.open(position.ticket_ns, request.max_new_tokens)
    state.requests.claims[row].charge = charge


def _unloaded_s(context: PlacementContext, reused_tokens: int) -> float:
    """Return the seconds of the request's prefill on an idle node."""
    request = context.request
    new = request.prompt_tokens - reused_tokens
    return context.costs.prefill_cost_s(new, reused_tokens, most_seen=request.window_tokens)


def accrue_endless(now_ns: int, state: ClusterState) -> None:
    """Charge endless requests for what they have used until now."""
    for claim in state.requests.claims:
        if claim.charge is not None and claim.charge.is_endless:
            claim.charge.accrue(now_ns)


def record_prefill_start(now_ns: int, state: ClusterState, row: int) -> None:
    """Record that the request's prefill has begun, which advances the virtual time of its class."""
    claim, queued = state.requests.claims[row], state.requests.get
    if claim.charge is not None:
        claim.charge.begin(now_ns)
    if queued(row, "account") >= 0:
        state.shares_of(claim.model).clock(queued(row, "level")).begin(queued(row, "ticket_ns"))


def restore_queue_key(now_ns: int, state: ClusterState, row: int, turn: QueueKey) -> None:
    """Restore the ordering key of a request that this conductor did not place from a worker's report."""
    account = state.shares_of(state.requests.claims[row].model).account_of(turn.account)
    arrived_ns, due_ns = now_ns - to_ns(turn.waited_s), now_ns + to_ns(turn.due_in_s)
    ages_ns = now_ns + to_ns(turn.ages_in_s)
    record = state.requests.records[row]
    record["level"], record["account"], record["ticket_ns"] = turn.level, account.number, turn.start_ns
    record["priority"], record["due_ns"], record["arrived_ns"] = turn.priority, due_ns, arrived_ns
    record["ages_ns"] = ages_ns


def accounts(state: ClusterState) -> Iterator[tuple[str, Account, int]]:
    """Yield (model, account, number of its live requests); the shared account only if it was used."""
    charged = state.requests.column("account")
    for model, shares in sorted(state.shares.items()):
        for account in shares:
            live = int(np.count_nonzero(charged == account.number))
            if account.name != OTHERS or live or account.used != Usage():
                yield model, account, live


def reject_endless(state: ClusterState, request: RequestArrived) -> Reject | None:
    """Reject an endless request if its tenant already runs `max_endless` of them; return None to admit it.

    A request that has generated tokens is always admitted.
    """
    if not request.endless or request.generated:
        return None
    most, account = state.config.max_endless, state.shares_of(request.model).account(request.tenant, state.is_charged)
    charges = (claim.charge for claim in state.requests.claims)
    running = sum(charge is not None and charge.is_endless and charge.account is account for charge in charges)
    if running < most:
        return None
    message = f"{running} endless requests of this tenant are running, of at most {most}; end one of them first"
    return Reject(request.request_id, request.attempt, "endless", message, 1.0)
