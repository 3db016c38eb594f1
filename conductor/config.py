"""The conductor's slice of the configuration; parsed and validated at the edge. `policy` is the part that decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conductor.decision_log.settings import DecisionLogConfig
from conductor.errors import ConfigError
from conductor.policy.config import Admission, AdmissionMode, Objectives, PolicyConfig, RoleSwitching, Undivided
from conductor.policy.objectives import SloRecord
from conductor.redis_url import check_redis_url
from worker.policy.cost_profile import CostProfile

__all__ = ["ConductorConfig", "Objectives"]


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """What one conductor process needs to know."""

    listen: str  # gRPC target to serve on
    node_id: str = "conductor"  # of this one among the conductors
    ttft_objective_s: float = 0.0  # requests predicted to miss it are rejected; 0 = off
    tbt_objective_s: float = 0.0  # likewise for the time between tokens
    model_objectives: Mapping[str, Objectives] = field(default_factory=dict)  # of models that have their own
    objectives: SloRecord | None = None  # in place of these three
    objectives_forced: bool = False  # they become a new version at each start that finds another in force
    objectives_dir: Path | None = None  # folder for versions of the objectives, without Redis; None = none is kept
    cost_profiles: Mapping[str, CostProfile] = field(default_factory=dict)  # what work costs at first, by model
    balancing_threshold: float = 1.5  # Algorithm 1: fetch the best prefix when it is this many times a node's own
    max_queue_s: float = 60.0  # longest predicted wait that a request is admitted with
    aging_s: float = 60.0  # who has waited for so long goes before everything newer, whatever its class
    max_tenants: int = 64  # of a model, with accounts of their own; further ones share one
    max_endless: int = 4  # requests without an end that one tenant may have at a time
    admission: Admission = "enforce"  # off: nothing is rejected by prediction; shadow: only counted
    admission_mode: AdmissionMode = "predicted-uniform"  # what requests are judged by
    attained_share: float = 0.95  # of the admitted that are to meet each objective: learned margins see to it; 0 = none
    overrun_probability: float = 0.0  # that an answer takes more pages than the ledger holds for it
    prefill_group_size: int = 1  # most prefill nodes that compute one prompt together; 1 = each by itself
    prefill_group_min_tokens: int = 4096  # uncached tokens of a prompt from which on several may
    max_copies: int = 8  # hot-spot copies under way at once; 0 = none are made
    replication_horizon_s: float = 60.0  # demand is measured over, and savings are predicted for, about so long
    replica_idle_s: float = 180.0  # a copied prefix that was not used for so long is given up again
    copy_timeout_s: float = 30.0  # a copy is given up after this long
    orphan_timeout_s: float = 120.0  # a request that nobody holds or completes is forgotten
    role_switching: RoleSwitching = "off"  # whether nodes change between prefill and decode, or that is only advised
    undivided: Undivided = "off"  # whether requests are prefilled where they decode when that is faster and harmless
    role_hold_s: float = 30.0  # a change must have been better for so long
    role_rest_s: float = 120.0  # between two changes of a model's nodes
    size_grow_hold_s: float = 15.0  # more nodes must have been needed for so long to be wanted
    size_shrink_hold_s: float = 300.0  # fewer must have been enough for so long
    report_timeout_s: float = 5.0  # a node that was silent for longer gets no work until it reports again; 0 = off
    tick_s: float = 1.0  # how often orphans and silent nodes are looked for
    decision_log: DecisionLogConfig | None = None  # None: none is kept
    redis_url: str = field(default="", repr=False)  # what conductors share; may hold a password; "" = nothing
    cluster_name: str = "moonpool"  # as written in Redis and in snapshots
    state_dir: Path | None = None  # folder for snapshots of the directory; None = none are kept
    shared_refresh_s: float = 2.0  # how often Redis is written and read
    shared_ttl_s: float = 60.0  # what nobody has written for so long is gone
    snapshot_s: float = 60.0  # how often a snapshot is written

    def __post_init__(self) -> None:
        for name in (
            *("copy_timeout_s", "tick_s"),
            *("shared_refresh_s", "shared_ttl_s", "snapshot_s"),
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be positive")
        if 0 < self.report_timeout_s < 2 * self.tick_s:
            text = f"must be 0 (off) or at least twice tick_s, which is {self.tick_s}"
            raise ConfigError(f"report_timeout_s is {self.report_timeout_s}: {text}")
        if self.orphan_timeout_s < 2 * self.tick_s:
            text = f"must be at least twice tick_s, which is {self.tick_s}"
            raise ConfigError(f"orphan_timeout_s is {self.orphan_timeout_s}: {text}")
        if self.redis_url:
            check_redis_url(self.redis_url)
        if not self.cluster_name.strip():
            raise ConfigError("cluster_name is empty: give a name, the same to all conductors of the cluster")
        _ = self.policy

    @property
    def policy(self) -> PolicyConfig:
        """The slice that the pure core gets. Losing scores are worked out only where they are logged."""
        return PolicyConfig(
            ttft_objective_s=self.ttft_objective_s,
            tbt_objective_s=self.tbt_objective_s,
            model_objectives=self.model_objectives,
            balancing_threshold=self.balancing_threshold,
            max_queue_s=self.max_queue_s,
            aging_s=self.aging_s,
            max_tenants=self.max_tenants,
            max_endless=self.max_endless,
            admission=self.admission,
            admission_mode=self.admission_mode,
            attained_share=self.attained_share,
            overrun_probability=self.overrun_probability,
            prefill_group_size=self.prefill_group_size,
            prefill_group_min_tokens=self.prefill_group_min_tokens,
            max_copies=self.max_copies,
            replication_horizon_s=self.replication_horizon_s,
            replica_idle_s=self.replica_idle_s,
            orphan_timeout_s=self.orphan_timeout_s,
            report_timeout_s=self.report_timeout_s,
            role_switching=self.role_switching,
            undivided=self.undivided,
            role_hold_s=self.role_hold_s,
            role_rest_s=self.role_rest_s,
            size_grow_hold_s=self.size_grow_hold_s,
            size_shrink_hold_s=self.size_shrink_hold_s,
            explain=self.decision_log.num_candidates if self.decision_log is not None else 0,
        )
