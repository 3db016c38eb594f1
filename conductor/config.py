"""Configuration of one conductor process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from conductor.errors import ConductorConfigError
from conductor.policy.objectives import SloRecord
from conductor.redis_url import check_redis_url
from settings.conductor import DecisionLogSettings, PolicyConfig, SharedStoreSettings, SloSettings
from settings.node import ListenSettings, NodeSettings
from worker.policy.cost_profile import CostProfile

__all__ = ["ConductorConfig"]


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """Configuration of one conductor process. Raises ConductorConfigError."""

    listen: ListenSettings
    node: NodeSettings = field(default_factory=lambda: NodeSettings("conductor"))
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    objectives: SloRecord | None = None  # content of slo_file; overrides the objectives of `policy`
    slo: SloSettings = field(default_factory=SloSettings)
    cost_profiles: Mapping[str, CostProfile] = field(default_factory=dict)  # initial cost predictions, by model
    decision_log: DecisionLogSettings = field(default_factory=DecisionLogSettings)
    shared_store: SharedStoreSettings = field(default_factory=SharedStoreSettings)
    copy_timeout_s: float = 30.0  # a copy is abandoned after this long
    tick_s: float = 1.0  # interval between searches for orphaned requests and silent nodes

    def __post_init__(self) -> None:
        for name in ("copy_timeout_s", "tick_s"):
            if getattr(self, name) <= 0:
                raise ConductorConfigError(f"{name} must be positive, got {getattr(self, name)}")
        text = f"at least twice tick_s ({self.tick_s})"
        if 0 < self.policy.report_timeout_s < 2 * self.tick_s:
            raise ConductorConfigError(
                f"report_timeout_s must be 0 (off) or {text}, got {self.policy.report_timeout_s}"
            )
        if self.policy.orphan_timeout_s < 2 * self.tick_s:
            raise ConductorConfigError(f"orphan_timeout_s must be {text}, got {self.policy.orphan_timeout_s}")
        if self.policy.placement != "moonpool":
            raise ConductorConfigError(
                f"placement must be moonpool, got {self.policy.placement}: the others are baselines of the simulator"
            )
        if self.shared_store.redis_url:
            check_redis_url(self.shared_store.redis_url)
