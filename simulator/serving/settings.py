"""Settings of a simulated cluster, and the actual costs of its work: a cost profile with noise unknown to the policy.

Each node has a constant speed; each request and each run of decode steps has its own noise. A request's noise does not
depend on where and when it is served, so two runs of the same seed differ only by decisions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite
from random import Random
from types import MappingProxyType
from typing import Final, Literal, get_args

from simulator.errors import BadSetting
from simulator.serving.clock import NS, VirtualClock
from simulator.serving.requests import Arrival, SimulatedRequest
from simulator.serving.siblings import SiblingReuse
from worker.policy.cost_profile import CostProfile

# What the policy learns of a request's answer on its arrival: nothing, the length of the previous answer in its
# conversation, or (as the largest that the client allows) its own length.
KnownLengths = Literal["prompt", "dialogue", "oracle"]
# Duration of a step with both prompt chunks and decoding sequences: the sum of both parts, or the longer of them. That
# of a real one is between the two, since chunks are bound by computation and decoding by memory bandwidth.
MergedSteps = Literal["sum", "longest"]
NO_KINDS: Final[Mapping[str, CostProfile]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """Settings of a cluster of one model, with a host and a pool node per prefill node, or per aggregated node.

    With `hosts`, every worker has a host and a pool node of its own, as workers that change their role require: the
    first hosts begin with prefill nodes, the next with decode nodes, and the remaining ones without a worker.

    Protocol times are those of the live roles: a node reports `coalesce_s` after a request has progressed, otherwise
    every `report_every_s`.
    """

    prefill_nodes: int = 8
    decode_nodes: int = 8
    conductors: int = 1  # requests go to them in turn; each learns of the others' only by the nodes' reports
    is_aggregated: bool = False  # all these nodes compute prompts and answers, in merged steps, each on its own host
    merged_steps: MergedSteps = "sum"
    hosts: int = 0  # with one worker each, or none; 0: one per prefill or aggregated node
    start_s: float = 60.0  # from the start of a worker until it has loaded its model and joins
    ttft_objective_s: float = 30.0
    tbt_objective_s: float = 0.1
    max_new_tokens: int = 2048  # allowed by every client; actual answer lengths are unknown to the policy
    lengths: KnownLengths = "dialogue"
    capacity_tokens: int = 1_000_000  # KV pages of a node, in tokens
    max_batch: int = 256
    chunk_tokens: int = 8192
    layers: int = 80  # KV is pushed layer by layer; only the last layer's push does not overlap computation
    window_tokens: int = 0  # most tokens whose KV a request holds, sinks and rolling window; 0: no request slides
    siblings: SiblingReuse | None = None  # conversations whose prompts another model has computed
    lookahead: int = 3  # requests that a prefill node prepares (loads, reserves) ahead of the one it computes
    pool_blocks: int = 6000  # capacity of a pool node's memory
    ssd_blocks: int = 0  # capacity of a pool node's SSD; 0: no SSD
    eviction: str = "lru"
    retained_share: float = 0.75  # of each tier of a pool node, the most that hints may retain
    retained_tenant_share: float = 0.5  # likewise, those of one tenant
    request_noise: float = 0.1  # sigma (log-normal) of prefill times relative to the profile
    step_noise: float = 0.05  # likewise, of decode steps
    node_noise: float = 0.03  # likewise, of a node's constant speed
    network_s: float = 0.001  # latency of a message between roles
    handoff_s: float = 0.005  # from the arrival of the last KV to the decode batch
    report_every_s: float = 1.0
    coalesce_s: float = 0.02
    tick_s: float = 1.0

    def __post_init__(self) -> None:
        whole = (
            "prefill_nodes",
            "decode_nodes",
            "conductors",
            "capacity_tokens",
            "max_batch",
            "chunk_tokens",
            "lookahead",
        )
        for name in (*whole, "pool_blocks"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_new_tokens < 2:
            raise BadSetting(
                f"max_new_tokens must be at least 2, got {self.max_new_tokens}: an answer of one token needs no decode "
                "node"
            )
        if not isinstance(self.is_aggregated, bool):
            raise BadSetting(f"is_aggregated must be true or false, got {self.is_aggregated!r}")
        if self.merged_steps not in get_args(MergedSteps):
            raise BadSetting(f"merged_steps must be sum or longest, got {self.merged_steps!r}")
        for name in ("retained_share", "retained_tenant_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadSetting(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        for name in ("ttft_objective_s", "tbt_objective_s", "report_every_s", "coalesce_s", "tick_s"):
            if not isfinite(getattr(self, name)) or getattr(self, name) <= 0:
                raise BadSetting(f"{name} must be finite and above 0, got {getattr(self, name)}")
        if self.hosts and (self.is_aggregated or self.hosts < self.prefill_nodes + self.decode_nodes):
            raise BadSetting(
                f"hosts must be 0, or at least the number of prefill and decode nodes "
                f"({self.prefill_nodes + self.decode_nodes}) of a cluster that is not aggregated, got {self.hosts}"
            )
        if self.siblings is not None and self.is_aggregated:
            raise BadSetting("siblings: KV of other models is reused on prefill nodes; an aggregated cluster has none")
        for name in (
            "ssd_blocks",
            "window_tokens",
            "request_noise",
            "step_noise",
            "node_noise",
            "network_s",
            "handoff_s",
            "start_s",
        ):
            if not isfinite(getattr(self, name)) or getattr(self, name) < 0:
                raise BadSetting(f"{name} must be finite and at least 0, got {getattr(self, name)}")

    def held_tokens(self, tokens: int) -> int:
        """Return the tokens whose KV a request holds after `tokens`."""
        return min(tokens, self.window_tokens) if self.window_tokens else tokens

    def stored_blocks(self, blocks: Sequence[int], block_tokens: int) -> Sequence[int]:
        """Return the blocks that may be stored: none that was computed after the window slid."""
        return blocks[: self.window_tokens // block_tokens] if self.window_tokens else blocks

    def max_tokens_of(self, job: Arrival) -> int:
        """Return `max_tokens` of a request, at least 2, since an answer of one token needs no decode node."""
        return max(2, job.output_tokens) if self.lengths == "oracle" else self.max_new_tokens


class ActualCosts:
    """Actual durations of work. Deterministic given the seed and the order of decode steps on each node."""

    def __init__(
        self, profile: CostProfile, settings: ServingSettings, seed: int, kinds: Mapping[str, CostProfile] = NO_KINDS
    ) -> None:
        """`kinds`: profiles of the nodes whose computation `profile` does not describe, by node id."""
        self.profile = profile
        self._kinds = kinds
        self._settings = settings
        self._seed = seed
        self._speed: dict[str, float] = {}
        self._dice: dict[str, Random] = {}

    def chunk_s(self, node_id: str, work: SimulatedRequest, start: int, end: int) -> float:
        """Return the seconds to compute prompt tokens [start, end) of a request on a node."""
        luck = exp(self._settings.request_noise * work.job.luck)
        seconds = self._of(node_id).prefill_s(end - start, start, most_seen=self._settings.window_tokens)
        return seconds * luck * self._node(node_id)

    def step_s(self, node_id: str, batch: int, context_tokens: int) -> float:
        """Return the seconds of one decode step, with noise drawn for each call."""
        luck = exp(self._settings.step_noise * self._rolls(node_id).gauss(0, 1))
        return self._of(node_id).decode_s(batch, context_tokens) * luck * self._node(node_id)

    def push_ns(self, start: int, end: int, prompt_tokens: int) -> int:
        """Return the duration of a push of a prompt's tokens [start, end) without contention."""
        if self._settings.window_tokens:  # nothing reads what has left the window
            start = min(end, max(start, prompt_tokens - self._settings.window_tokens))
        return self.transfer_ns("push", self.profile.pushed_nbytes(start, end, prompt_tokens))

    def transfer_ns(self, path: str, nbytes: int) -> int:
        """Return the duration of a transfer without contention; paths as in TransferSample."""
        return round(self.profile.transfer_s(path, nbytes) * NS)

    def _of(self, node_id: str) -> CostProfile:
        return self._kinds.get(node_id, self.profile)

    def _node(self, node_id: str) -> float:
        if node_id not in self._speed:
            roll = Random(f"{self._seed} speed {node_id}").gauss(0, 1)
            self._speed[node_id] = exp(self._settings.node_noise * roll)
        return self._speed[node_id]

    def _rolls(self, node_id: str) -> Random:
        if node_id not in self._dice:
            self._dice[node_id] = Random(f"{self._seed} steps {node_id}")
        return self._dice[node_id]


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """Objects and settings that all nodes of one simulated cluster share."""

    clock: VirtualClock
    settings: ServingSettings
    costs: ActualCosts
    block_tokens: int
