"""The policy's state: nodes, requests, learned costs, statistics, and the look-ups that decisions are made from."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from conductor.policy.admission_evaluation import AdmissionEvaluation
from conductor.policy.admission_rule import Margins
from conductor.policy.costs import MeanDuration, ModelCosts, NodeSlowdowns, TransferCosts
from conductor.policy.events import NS, CostsGiven, RequestArrived, to_ns
from conductor.policy.fairness import Shares
from conductor.policy.history import Attainment, PredictionErrors, RequestHistory
from conductor.policy.kernels import NODE_LOAD, prefill_kernels
from conductor.policy.lengths import Lengths
from conductor.policy.nodes import Liveness, ModelNodes, NodeTable, unobserved_ns
from conductor.policy.objectives import DEFAULT_HEADERS, HeaderRule, ObjectiveBook, configured_record
from conductor.policy.replication import CopiesInFlight, HitCounts, Replication, SeenShare
from conductor.policy.requests import NONE, Claim, GroupMemberWork, RequestTable
from conductor.policy.roles import ModelSizing, Switching
from conductor.policy.sessions import SessionNodes
from conductor.policy.shadow_prices import ShadowPrices
from jit.fast_dataclass import fast_dataclass
from settings.conductor import BLIND_PLACEMENTS, PolicyConfig

__all__ = [
    "ClusterState",
    "ModelTally",
    "PlacementContext",
    "Recent",
    "StateView",
]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Recent:
    """A request that left the request table recently: late reports about it, or its completion, may still arrive."""

    claim: Claim
    at_ns: int
    may_return: bool = False  # its node was lost, possibly only the node's stream


@dataclass
class ModelTally:
    """Counters of one model, its prediction errors (mean of |predicted - measured| in seconds), margins and prices."""

    counts: Counter[str] = field(default_factory=Counter)
    ttft_error: MeanDuration = field(default_factory=MeanDuration)
    tbt_error: MeanDuration = field(default_factory=MeanDuration)
    margins: Margins = field(default_factory=Margins)
    prices: ShadowPrices = field(default_factory=ShadowPrices)


@dataclass
class ClusterState:
    """State of the cluster as known to the policy."""

    config: PolicyConfig
    default_headers: HeaderRule = DEFAULT_HEADERS
    nodes: NodeTable = field(default_factory=NodeTable)
    requests: RequestTable = field(default_factory=RequestTable)
    group_work: GroupMemberWork = field(default_factory=GroupMemberWork)  # what prefill nodes compute for others
    lengths: Lengths = field(default_factory=Lengths)
    evaluation: AdmissionEvaluation = field(default_factory=AdmissionEvaluation)
    costs: dict[str, ModelCosts] = field(default_factory=dict)
    given: dict[str, CostsGiven] = field(default_factory=dict)  # measured profiles, by model
    slowdowns: NodeSlowdowns = field(default_factory=NodeSlowdowns)
    errors: PredictionErrors = field(default_factory=PredictionErrors)
    refused_samples: dict[str, Counter[str]] = field(default_factory=dict)  # by node id and reason
    warnings: list[str] = field(default_factory=list)  # messages for operators, until `Conductor.take_warnings`
    shares: dict[str, Shares] = field(default_factory=dict)  # by model
    sessions: dict[str, SessionNodes] = field(default_factory=dict)  # by model, for models that a node has served
    switching: dict[str, Switching] = field(default_factory=dict)  # by model: whether nodes should change their role
    sizing: dict[str, ModelSizing] = field(default_factory=dict)  # by model: how many nodes its roles should have
    recent: dict[str, Recent] = field(default_factory=dict)  # oldest first
    counts: Counter[str] = field(default_factory=Counter)
    tallies: dict[str, ModelTally] = field(default_factory=dict)  # by model, for models that a node has served
    started_ns: int | None = None
    history: RequestHistory = field(default_factory=RequestHistory)
    lost_ns: dict[str, int] = field(default_factory=dict)  # by model: when it last lost a worker
    copies: CopiesInFlight = field(init=False)
    prefix_hits: HitCounts = field(init=False)
    seen_share: SeenShare = field(init=False)
    replication: Replication = field(init=False)
    liveness: Liveness = field(init=False)
    slo: ObjectiveBook = field(init=False)
    attainment: Attainment = field(init=False)
    transfers: TransferCosts = field(init=False)
    places_blindly: bool = field(init=False)  # by a baseline that ignores prefixes
    fetch_threshold: float = field(init=False)  # ratio of prefixes above which one is fetched; inf: none is
    aging_ns: int = field(init=False)  # waiting time after which no newer request precedes a request
    _orphan_timeout_ns: int = field(init=False)
    _account_numbers: Iterator[int] = field(default_factory=itertools.count)
    _now_ns: int | None = None

    def __post_init__(self) -> None:
        self.slo = ObjectiveBook(configured_record(self.config), default_headers=self.default_headers)
        self.attainment = Attainment(lambda tenant: tenant in self.slo.record.tenants, self.history.traffic.attained)
        self.copies = CopiesInFlight(self.config.max_copies, self.config.max_copies_per_pool)
        self.prefix_hits = HitCounts(self.config.replication_horizon_s)
        self.seen_share = SeenShare(self.config.replication_horizon_s)
        self.replication = Replication(self.config.replica_idle_s)
        self.liveness = Liveness(round(self.config.report_timeout_s * NS))
        self._orphan_timeout_ns = round(self.config.orphan_timeout_s * NS)
        placement = self.config.placement
        self.transfers = TransferCosts(may_recompute=placement == "moonpool")
        self.places_blindly = placement in BLIND_PLACEMENTS
        may_fetch = placement in ("moonpool", "algorithm1")
        self.fetch_threshold = self.config.balancing_threshold if may_fetch else inf
        self.aging_ns = round(self.config.aging_s * NS)
        self.counts["suspected"] = 0

    def costs_of(self, model: str) -> ModelCosts:
        """Return the model's costs; they start from its profile or from built-in guesses."""
        if model not in self.costs:
            self.costs[model] = ModelCosts(self.slowdowns)
            if model in self.given:
                self.costs[model].give(self.given[model])
        return self.costs[model]

    def shares_of(self, model: str) -> Shares:
        """Return the fair-sharing accounts of the model."""
        shares = self.shares.get(model)
        if shares is None:
            shares = self.shares[model] = Shares(self._account_numbers, self.config.max_tenants, self.slo.weight_of)
        return shares

    def sessions_of(self, model: str) -> SessionNodes:
        """Return the nodes that the model's sessions used last."""
        sessions = self.sessions.get(model)
        if sessions is None:
            sessions = self.sessions[model] = SessionNodes()
        return sessions

    def is_charged(self, account: int) -> bool:
        """Return True if the account of this number has a request."""
        return bool((self.requests.column("account") == account).any())

    def count(self, model: str, what: str, by: int = 1) -> None:
        """Add to the cluster's counter and to the model's.

        Models that no node has served have no counters, since clients can name any number of models.
        """
        self.count_all(model, ((what, by),))

    def count_all(self, model: str, counts: Sequence[tuple[str, int]]) -> None:
        """Add to several counters, as `count` does."""
        everywhere = self.counts
        for what, by in counts:
            everywhere[what] += by
        if model in self.costs:
            own = self.tally_of(model).counts
            for what, by in counts:
                own[what] += by

    def tally_of(self, model: str) -> ModelTally:
        """Return the model's counters and error statistics."""
        tally = self.tallies.get(model)
        if tally is None:
            tally = self.tallies[model] = ModelTally()
        return tally

    def answers(self, pool: str) -> bool:
        """Return True if the pool node has joined and is not suspect."""
        return self.nodes.slot(pool) != NONE and not self.nodes.is_suspect(pool)

    def pass_time(self, now_ns: int) -> None:
        """Advance to `now_ns`: nodes that have exceeded the report time-out become suspect.

        Time in which the conductor itself was stalled counts neither for nodes nor for orphaned requests.
        """
        before_ns, self._now_ns = self._now_ns if self._now_ns is not None else now_ns, now_ns
        if unobserved := unobserved_ns(before_ns, now_ns, self._orphan_timeout_ns):
            self.requests.column("seen_ns")[:] += unobserved
        self.history.traffic.pass_time(now_ns)
        if silent := self.liveness.pass_time(now_ns):
            self.counts["suspected"] += len(silent)
            self.nodes.set_suspects(self.liveness.suspects)

    def mark_alive(self, node_id: str, now_ns: int) -> None:
        """Record that a joined node is alive."""
        self.liveness.mark_alive(node_id, now_ns)
        self.nodes.set_suspects(self.liveness.suspects)

    def forget_node(self, node_id: str) -> None:
        """Remove a node that has left. Nothing may refer to its slot afterwards."""
        self.slowdowns.forget(self.nodes.slot(node_id))
        self.refused_samples.pop(node_id, None)
        if (node := self.nodes.get(node_id)) is not None:
            self.errors.forget(node.model, node_id)
        self.nodes.remove(node_id)
        self.liveness.forget(node_id)
        self.nodes.set_suspects(self.liveness.suspects)

    def retire(self, row: int, now_ns: int, *, may_return: bool = False) -> Claim:
        """Remove a request from the table and remember it as recent; returns its claim."""
        claim = self.requests.remove(row)
        self.recent.pop(claim.request_id, None)
        self.recent[claim.request_id] = Recent(claim, now_ns, may_return)
        return claim

    def forget_recent(self, now_ns: int) -> None:
        """Forget recent requests after `recent_s`."""
        before_ns = now_ns - round(self.config.recent_s * 1e9)
        while self.recent and next(iter(self.recent.values())).at_ns <= before_ns:
            del self.recent[next(iter(self.recent))]

    def count_running(self, now_ns: int) -> None:
        """Count the answers that are being generated in the statistics of lengths."""
        step_ns = np.ones(self.nodes.num_slots, np.int64)
        for name, costs in self.costs.items():
            if (model := self.nodes.model(name)) is not None:
                step_ns[model.all_slots] = max(1, to_ns(costs.typical_step_s))
        self.lengths.count_running(now_ns, self.requests.records, step_ns)

    def node_loads(self) -> NDArray[np.void]:
        """Return NODE_LOAD [slots] of which only the copies that each node sends are known."""
        loads = np.empty(self.nodes.num_slots, NODE_LOAD)
        loads["copy_sends"] = 0
        if len(self.copies):
            for pool, count in self.copies.num_sends().items():
                if (slot := self.nodes.slot(pool)) != NONE:
                    loads["copy_sends"][slot] = count
        return loads

    def tally(self, now_ns: int) -> NDArray[np.void]:
        """Return NODE_LOAD [slots] with what the live requests claim on each node."""
        loads = self.node_loads()
        prefill_kernels().tally(self.requests.records, now_ns, loads)
        return loads


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PlacementContext:
    """The request to place at `now_ns`, its model's nodes and costs, and the state of the cluster."""

    now_ns: int
    state: ClusterState
    request: RequestArrived
    model: ModelNodes
    costs: ModelCosts
    former: Claim | None  # of an earlier attempt
    is_preview: bool = False  # only judged: it does not count in the demand


_NEVER = 1 << 62


class StateView:
    """Implementation of `admission_evaluation.ClusterView`; caches per node, so the state must not change."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._oldest: dict[str, int] = {}
        self._free: dict[str, int] = {}

    def prefills_before(self, node_id: str, at_ns: int) -> bool:
        """Return True if a prefill that was placed on the node by `at_ns` has not ended yet."""
        oldest_ns = self._oldest.get(node_id)
        if oldest_ns is None:
            requests, slot = self._state.requests, self._state.nodes.slot(node_id)
            here = (requests.column("prefill_node") == slot) & (requests.column("prefill_ns") > 0)
            oldest_ns = int(requests.column("placed_ns")[here].min(initial=_NEVER)) if slot != NONE else _NEVER
            self._oldest[node_id] = oldest_ns
        return oldest_ns <= at_ns

    def free_tokens(self, node_id: str) -> int:
        """Return the tokens of unclaimed pages on the node; unlimited for an unknown node."""
        node = self._state.nodes.get(node_id)
        if node is None:
            return _NEVER
        free = self._free.get(node_id)
        if free is None:
            requests, slot = self._state.requests, self._state.nodes.slot(node_id)
            committed = requests.column("committed")[requests.column("decode_node") == slot]
            free = self._free[node_id] = node.capacity_tokens - int(committed.sum())
        return free

    def step_s(self, model: str, node_id: str, batch: float, context_tokens: float) -> float:
        """Return the predicted seconds of a decode step on the node."""
        node = self._state.nodes.get(node_id)
        max_batch = max(1, node.max_batch) if node is not None else 1
        slot = self._state.nodes.slot(node_id)
        return self._state.costs_of(model).step_cost_s(batch, context_tokens, max_batch, slot)
