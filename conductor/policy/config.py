"""What the policy can be told: objectives and bounds. Nothing about sockets or files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Literal, get_args

from conductor.errors import ConfigError
from conductor.policy.objectives import SloRecord, record_of_seconds

__all__ = ["NS", "Admission", "AdmissionMode", "Objectives", "PolicyConfig", "RoleSwitching", "Undivided"]

NS = 1_000_000_000
# What becomes of requests that are predicted to miss their objectives: all are served, as many are, they are refused.
Admission = Literal["off", "shadow", "enforce"]
# By what: nothing; TTFT at arrival and decode load once the prefill has ended; both at arrival, by decode load as it is
# then; or as it will be when the prefill ends, with answers that all decode equally long, or as long as was learned.
AdmissionMode = Literal["none", "load", "early", "predicted-uniform", "predicted"]
RoleSwitching = Literal["off", "advise", "act"]
# Whether a request may be prefilled where it decodes: never; that is only counted and explained; or done.
Undivided = Literal["off", "advise", "act"]
_MOST_OVERRUN = 0.5


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a model's admitted requests must be predicted to meet, in seconds; 0 = off, None = as the cluster's."""

    ttft_s: float | None = None  # time to first token
    tbt_s: float | None = None  # time between tokens

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tbt_s"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise ConfigError(f"objective {name} is {value}: must be a finite number of at least 0")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """One cluster's policy. Objectives of 0 are off: then no request is rejected for latency."""

    ttft_objective_s: float = 0.0  # time to first token that an admitted request must be predicted to meet
    tbt_objective_s: float = 0.0  # time between tokens likewise
    model_objectives: Mapping[str, Objectives] = field(default_factory=dict)  # of models that have their own
    balancing_threshold: float = 1.5  # Algorithm 1: fetch the best prefix when it is this many times a node's own
    max_queue_s: float = 60.0  # longest predicted wait for a prefill turn or for decode pages
    aging_s: float = 60.0  # who has waited for so long goes before everything newer, whatever its class
    max_tenants: int = 64  # of a model, with accounts of their own; further ones share one
    max_endless: int = 4  # requests without an end that one tenant may have at a time
    replication_horizon_s: float = 60.0  # demand is measured over, and savings are predicted for, about so long
    replica_idle_s: float = 180.0  # a copied prefix that was not used for so long is given up again
    hot_load: float = 0.5  # share of its holders' time that a prefix may take before it is copied ahead of need
    max_copies: int = 8  # hot-spot copies under way at once in the cluster
    max_copies_per_pool: int = 2  # of them, into one pool node
    orphan_timeout_s: float = 120.0  # a request that no worker holds and no frontend completes is forgotten
    recent_s: float = 30.0  # how long a completed request is remembered, so that late reports do not revive it
    report_timeout_s: float = 0.0  # a node that has not reported for longer is suspect and gets no work; 0 = off
    return_s: float = 30.0  # after its loss, or after a start, a worker may be about to join: requests wait for it
    settle_s: float = 30.0  # after a start, a model that nobody serves yet may be one whose workers are reconnecting
    admission: Admission = "enforce"
    admission_mode: AdmissionMode = "predicted-uniform"
    attained_share: float = 0.0  # of the admitted that are to meet each objective: learned margins see to it; 0 = none
    overrun_probability: float = 0.0  # that an answer takes more pages than were reserved for it; 0 = never
    role_switching: RoleSwitching = "off"  # whether nodes change between prefill and decode, or that is only advised
    undivided: Undivided = "off"  # whether requests are prefilled where they decode when that is faster and harmless
    role_hold_s: float = 30.0  # a change must have been better for so long
    role_rest_s: float = 120.0  # between two changes of a model's nodes
    size_grow_hold_s: float = 15.0  # more nodes must have been needed for so long to be wanted
    size_shrink_hold_s: float = 300.0  # fewer must have been enough for so long
    prefill_group_size: int = 1  # most prefill nodes that compute one prompt together; 1 = each by itself
    prefill_group_min_tokens: int = 4096  # uncached tokens of a prompt from which on several may
    explain: int = 0  # candidates of each phase whose scores go into a decision, the best ones

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and (not isfinite(value) or value < 0):
                raise ConfigError(f"{each.name} is {value}: must be a finite number of at least 0")
        for name in ("prefill_group_size", "prefill_group_min_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.admission not in get_args(Admission):
            raise ConfigError(f"admission is {self.admission!r}: expected one of {', '.join(get_args(Admission))}")
        if self.admission_mode not in get_args(AdmissionMode):
            modes = ", ".join(get_args(AdmissionMode))
            raise ConfigError(f"admission_mode is {self.admission_mode!r}: expected one of {modes}")
        if self.role_switching not in get_args(RoleSwitching):
            modes = ", ".join(get_args(RoleSwitching))
            raise ConfigError(f"role_switching is {self.role_switching!r}: expected one of {modes}")
        if self.undivided not in get_args(Undivided):
            modes = ", ".join(get_args(Undivided))
            raise ConfigError(f"undivided is {self.undivided!r}: expected one of {modes}")
        if self.attained_share >= 1:
            raise ConfigError(f"attained_share is {self.attained_share}: must be below 1; nobody can promise all")
        if self.overrun_probability > _MOST_OVERRUN:
            text = f"must lie between 0 and {_MOST_OVERRUN:g}"
            raise ConfigError(f"overrun_probability is {self.overrun_probability}: {text}")
        if self.balancing_threshold < 1:
            raise ConfigError(f"balancing_threshold is {self.balancing_threshold}: must be at least 1")
        for name in ("max_queue_s", "aging_s", "orphan_timeout_s", "replication_horizon_s", "replica_idle_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be positive")

    @property
    def record(self) -> SloRecord:
        """The objectives as a record: what holds until an ObjectivesChanged comes."""
        return record_of_seconds(
            (self.ttft_objective_s or None, self.tbt_objective_s or None),
            {model: (own.ttft_s, own.tbt_s) for model, own in self.model_objectives.items()},
        )
