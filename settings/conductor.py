"""Settings of the conductor: policy, costs, objectives, decision log and shared store."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, get_args

from settings.keys import InvalidSetting, Key, SettingsGroup, parse_size

__all__ = [
    "BLIND_PLACEMENTS",
    "Admission",
    "AdmissionMode",
    "ColocatedPrefill",
    "CostSettings",
    "DecisionLogSettings",
    "Objectives",
    "Placement",
    "PolicyConfig",
    "RoleSwitching",
    "SharedStoreSettings",
    "SloSettings",
]

# Treatment of requests that are predicted to miss their objectives: serve them, serve and count them, reject them.
Admission = Literal["off", "shadow", "enforce"]
# Prediction that admission is based on. none: nothing; load: TTFT at arrival, and decode load again once the prefill
# has ended; early: both at arrival, with the decode load of that time; predicted-uniform, predicted: with the decode
# load expected when the prefill ends, for answers of one mean length or of learned lengths.
AdmissionMode = Literal["none", "load", "early", "predicted-uniform", "predicted"]
RoleSwitching = Literal["off", "advise", "act"]
# Choice of the prefill node. moonpool: Algorithm 1 of the Mooncake paper, with copies of prefixes where they are
# predicted to pay. The others are baselines of the simulator, which a live conductor rejects. algorithm1: as printed,
# with a copy of every prefix that is fetched; cache-aware: least TTFT, load-balance: shortest queue, random: any; these
# three reuse only what the node's own pool holds.
Placement = Literal["moonpool", "algorithm1", "cache-aware", "load-balance", "random"]
BLIND_PLACEMENTS: Final = frozenset[Placement]({"load-balance", "random"})  # those that ignore prefixes
ColocatedPrefill = Literal["off", "advise", "act"]
_MAX_OVERRUN = 0.5
_LONGEST_S = 1e9  # in nanoseconds within 64 bits


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives of one model in seconds; 0 = none, None = the cluster's. Raises InvalidSetting."""

    ttft_s: float | None = None  # time to first token
    tbt_s: float | None = None  # time between tokens

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tbt_s"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise InvalidSetting(f"objective {name} must be a finite number of at least 0, got {value}")


@dataclass(frozen=True, slots=True)
class PolicyConfig(SettingsGroup):
    """Configuration of the pure policy: admission, placement, copies, fairness, roles.

    The ranges of the keys apply to users. Simulations and tests may exceed them, so this class rejects only values with
    which the policy cannot work.
    """

    panel: ClassVar[str] = "Scheduling"
    ttft_slo_s: Annotated[
        float,
        Key(
            "Objective for the time to first token (TTFT), seconds; requests predicted to miss it are rejected with "
            "429",
            low=0,
            high=86400,
            unit="s",
            default_text="off",
        ),
    ] = 0.0
    tbt_slo_s: Annotated[
        float,
        Key(
            "Objective for the time between tokens (TBT), seconds; requests predicted to miss it are rejected with 429",
            low=0,
            high=3600,
            unit="s",
            default_text="off",
        ),
    ] = 0.0
    model_objectives: Mapping[str, Objectives] = field(
        default_factory=dict
    )  # by model name; only models with their own
    balancing_threshold: Annotated[
        float,
        Key(
            "Copy KV to a node if the longest cached prefix in the cluster is at least this many times as long as the "
            "node's own (Algorithm 1 of the Mooncake paper)",
            low=1,
            high=1e6,
        ),
    ] = 1.5
    max_queue_s: Annotated[
        float,
        Key(
            "Maximum predicted queueing time of an admitted request, seconds",
            low=0.1,
            high=86400,
            unit="s",
        ),
    ] = 60.0
    aging_s: Annotated[
        float,
        Key(
            "Seconds after which a waiting request is scheduled before all newer ones, regardless of class",
            low=1,
            high=86400,
            unit="s",
        ),
    ] = 60.0
    max_tenants: Annotated[
        int,
        Key(
            "Maximum tenants of a model with separate shares and metrics; all others are treated as one",
            low=1,
            high=4096,
        ),
    ] = 64
    max_endless: Annotated[
        int,
        Key("Maximum concurrent endless requests of a tenant per model; 0 rejects all of them", low=0, high=1024),
    ] = 4
    replication_horizon_s: Annotated[
        float,
        Key(
            "Seconds over which demand for a prefix is measured and the savings of a copy are predicted",
            low=1,
            high=86400,
            unit="s",
        ),
    ] = 60.0
    replica_idle_s: Annotated[
        float,
        Key("Seconds without use after which a copy of a prefix is deleted", low=1, high=86400, unit="s"),
    ] = 180.0
    ttft_reserve: float = 0.9  # share of its room that an expensive request leaves free, in the predicting modes
    tbt_reserve: float = 0.75
    hot_load: float = 0.5  # share of its holders' time from which a prefix is copied ahead of need
    max_copies: Annotated[
        int, Key("Maximum concurrent copies of hot prefixes between pool nodes; 0 disables copying", low=0, high=1024)
    ] = 8
    max_copies_per_pool: int = 2  # maximum of them into one pool node
    orphan_timeout_s: float = (
        120.0  # after this, a request that no worker reports and no frontend completes is released
    )
    recent_s: float = 30.0  # time for which late reports on a completed request are recognised and ignored
    report_timeout_s: Annotated[
        float,
        Key(
            "Seconds without a report after which a node gets no work until it reports again; at least 2, or 0 to "
            "disable",
            low=0,
            high=3600,
            unit="s",
        ),
    ] = 5.0
    return_s: float = 30.0  # time for which requests wait for a lost worker to return, or for one to join after a start
    settle_s: float = 30.0  # time after a start for which a model without workers is assumed to have some reconnecting
    admission: Annotated[
        Admission,
        Key(
            "Treatment of requests predicted to miss their objectives: off serves them, shadow serves and counts them, "
            "enforce rejects them"
        ),
    ] = "enforce"
    admission_mode: Annotated[
        AdmissionMode,
        Key(
            "Decode load that admission predicts with: none; early: the load at arrival; predicted-uniform and "
            "predicted: the load when the prefill ends, for answers of a mean length or of learned lengths",
            choices=("none", "early", "predicted-uniform", "predicted"),
        ),
    ] = "predicted-uniform"
    attained_share: Annotated[
        float,
        Key(
            "Share of the admitted requests that should meet each objective, by margins learned from earlier "
            "predictions; 0 disables margins",
            low=0,
            high=0.99,
        ),
    ] = 0.95
    overrun_probability: Annotated[
        float,
        Key(
            "Accepted probability that an answer needs more pages than reserved by learned lengths; 0 reserves pages "
            "for max_tokens",
            low=0,
            high=_MAX_OVERRUN,
        ),
    ] = 0.0
    role_switching: Annotated[
        RoleSwitching,
        Key("Switch nodes between prefill and decode as the load changes: off, advise (only report), act"),
    ] = "off"
    colocated_prefill: Annotated[
        ColocatedPrefill,
        Key(
            "Prefill a request on its decode node if that is faster and meets the objectives for the time between "
            "tokens: off, advise (only count and explain), act",
            former_names=("undivided",),
        ),
    ] = "off"
    role_hold_s: Annotated[
        float,
        Key(
            "Seconds for which another split of roles must be better before nodes are switched",
            low=1,
            high=86400,
            unit="s",
        ),
    ] = 15.0
    role_rest_s: Annotated[
        float, Key("Minimum seconds between two role switches of a model's nodes", low=1, high=86400, unit="s")
    ] = 60.0
    role_share: Annotated[
        float, Key("Largest share of a role's nodes that are switched at once; at least one node is", low=0, high=1)
    ] = 0.5
    size_grow_hold_s: Annotated[
        float,
        Key(
            "Seconds for which more nodes of a role must be needed before they are requested",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 15.0
    size_shrink_hold_s: Annotated[
        float,
        Key(
            "Seconds for which fewer nodes of a role must suffice before fewer are requested",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 300.0
    prefill_group_size: Annotated[
        int,
        Key("Maximum prefill nodes that compute one long prompt together; 1 disables prefill groups", low=1, high=64),
    ] = 1
    prefill_group_min_tokens: Annotated[int, Key("Minimum uncached prompt tokens for a prefill group", low=1)] = 4096
    per_node_costs: bool = True  # slowdown factors of each node; False only in simulations
    placement: Placement = "moonpool"  # choice of the prefill node; another one only in simulations
    explain: int = 0  # number of best candidates with scores per decision; set by the decision log's settings

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not 0 <= value < inf:
                raise InvalidSetting(f"{each.name} must be a finite number of at least 0, got {value}")
            if each.name.endswith("_s") and value > _LONGEST_S:
                raise InvalidSetting(f"{each.name} must be at most {_LONGEST_S:g} seconds, got {value}")
        for name in ("prefill_group_size", "prefill_group_min_tokens"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, kind in (
            ("admission", Admission),
            ("admission_mode", AdmissionMode),
            ("role_switching", RoleSwitching),
            ("colocated_prefill", ColocatedPrefill),
            ("placement", Placement),
        ):
            if getattr(self, name) not in get_args(kind):
                modes = ", ".join(get_args(kind))
                raise InvalidSetting(f"{name} must be one of {modes}, got {getattr(self, name)!r}")
        if self.attained_share >= 1:
            raise InvalidSetting(f"attained_share must be less than 1, got {self.attained_share}")
        if self.overrun_probability > _MAX_OVERRUN:
            raise InvalidSetting(
                f"overrun_probability must be from 0 to {_MAX_OVERRUN:g}, got {self.overrun_probability}"
            )
        if self.balancing_threshold < 1:
            raise InvalidSetting(f"balancing_threshold must be at least 1, got {self.balancing_threshold}")
        for name in ("max_queue_s", "aging_s", "orphan_timeout_s", "replication_horizon_s", "replica_idle_s"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class CostSettings(SettingsGroup):
    """Predicted costs of a model's work before its nodes have reported any."""

    panel: ClassVar[str] = "Scheduling"
    cost_profile: Annotated[
        tuple[str, ...],
        Key(
            "Predicted costs of a model until its nodes report measured ones: [MODEL=]PROFILE, a JSON file written by "
            "`moonpool bench profile` or the name of a bundled profile; may be given several times",
            default_text="a rough estimate",
        ),
    ] = ()


@dataclass(frozen=True)
class SloSettings(SettingsGroup):
    """Objectives by class, tenant and model."""

    panel: ClassVar[str] = "Scheduling"
    slo_file: Annotated[
        Path | None,
        Key(
            "YAML file with the first version of all objectives; replaces --ttft-slo and --tbt-slo",
            default_text="none",
        ),
    ] = None
    slo_force: Annotated[
        bool,
        Key("Store the configured objectives as a new version at each start if others are in force"),
    ] = False
    slo_dir: Annotated[
        Path | None,
        Key("Folder for versions of the objectives, if Redis is not used", default_text="objectives in --state-dir"),
    ] = None

    def check(self) -> None:
        try:
            is_there = self.slo_file is None or self.slo_file.is_file()
        except OSError:  # not a valid file name
            is_there = False
        if not is_there:
            raise InvalidSetting(f"--slo-file must be an existing file, got {str(self.slo_file)!r}")


@dataclass(frozen=True)
class SharedStoreSettings(SettingsGroup):
    """State that conductors share and restore after a restart: Redis, and snapshots of the directory."""

    panel: ClassVar[str] = "Shared store"
    redis_url: Annotated[
        str,
        Key(
            "URL of Redis for the registry of nodes: redis://, rediss:// or unix://; set the password by "
            "MOONPOOL_REDIS_PASSWORD",
            default_text="no Redis",
        ),
    ] = field(default="", repr=False)
    redis_password: Annotated[str, Key("Password for Redis, not URL-escaped, if --redis-url has none")] = field(
        default="", repr=False
    )
    cluster_name: Annotated[str, Key("Name of this cluster in Redis and in snapshots")] = "moonpool"
    state_dir: Annotated[
        Path | None,
        Key("Folder for the conductor's snapshot of the directory", default_text="no snapshot"),
    ] = None
    shared_refresh_s: float = 2.0  # interval between writes to, and reads from, Redis
    shared_ttl_s: float = 60.0  # lifetime of entries in Redis that are not refreshed
    snapshot_s: float = 60.0  # interval between snapshots

    def check(self) -> None:
        if self.redis_password and not self.redis_url:
            raise InvalidSetting("--redis-password needs --redis-url: give both or neither")
        if not self.cluster_name.strip():
            raise InvalidSetting(
                "--cluster-name must not be empty: give the same name to all conductors of the cluster"
            )
        for name in ("shared_refresh_s", "shared_ttl_s", "snapshot_s"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class DecisionLogSettings(SettingsGroup):
    """Log of the conductor's decisions. Records and events each have their own files, rotated and compressed."""

    panel: ClassVar[str] = "Decision log"
    decision_log: Annotated[
        Path | None,
        Key(
            "Folder for records of every decision, without prompt text, and for the events that reproduce them",
            default_text="off",
        ),
    ] = None
    decision_log_size_bytes: Annotated[
        int,
        Key(
            "Size at which a file of the decision log is closed and compressed",
            low=4096,
            unit="bytes",
            parse=parse_size,
            default_text="64MiB",
        ),
    ] = 64 << 20
    decision_log_files: Annotated[int, Key("Closed files kept, of records and of events each", low=1, high=100000)] = 8
    decision_log_block_tokens: Annotated[
        int, Key("Tokens per hash id in the decision log; 512 in Mooncake's traces", low=1, high=65536)
    ] = 512
    decision_log_candidates: Annotated[
        int, Key("Number of best candidates of each phase whose scores are recorded", low=1, high=1000)
    ] = 8
    decision_log_events: Annotated[bool, Key("Also log all events, as `moonpool decisions replay` requires")] = True
