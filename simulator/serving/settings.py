"""What cluster is simulated, and how far the truth lies from what its cost profile says. Plain data, checked here."""

from dataclasses import dataclass
from math import isfinite

from simulator.errors import BadSetting

__all__ = ["ServingSettings"]


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """A cluster of one model's prefill and decode nodes, a host and a pool node for each prefill node.

    Times of the protocol are those that the live roles use: reports after `coalesce_s` when a request went a step on,
    else every `report_every_s`.
    """

    prefill_nodes: int = 8
    decode_nodes: int = 8
    ttft_objective_s: float = 30.0
    tbt_objective_s: float = 0.1
    max_new_tokens: int = 2048  # what every client allows; how long its answer will be nobody knows
    capacity_tokens: int = 1_000_000  # KV pages of a node, in tokens
    max_batch: int = 256
    chunk_tokens: int = 8192
    layers: int = 80  # pushed one by one: what is left to send after the last one's compute
    lookahead: int = 3  # requests that a prefill node loads and reserves for ahead of the one it computes
    pool_blocks: int = 6000  # that a pool node holds in memory
    ssd_blocks: int = 0  # and on SSD besides; 0: it has none
    eviction: str = "lru"
    request_noise: float = 0.1  # sigma (log-normal) of a prefill's time about what the profile says
    step_noise: float = 0.05  # likewise, of decode steps
    node_noise: float = 0.03  # likewise, of a node's speed as long as it lives
    network_s: float = 0.001  # a message between roles
    handoff_s: float = 0.005  # from the last KV that arrived to the decode batch
    report_every_s: float = 1.0
    coalesce_s: float = 0.02
    tick_s: float = 1.0

    def __post_init__(self) -> None:
        whole = ("prefill_nodes", "decode_nodes", "capacity_tokens", "max_batch", "chunk_tokens", "lookahead")
        for name in (*whole, "pool_blocks"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; give at least 1")
        if self.max_new_tokens < 2:
            text = "give at least 2: an answer of one token needs no decode node"
            raise BadSetting(f"max_new_tokens is {self.max_new_tokens}; {text}")
        for name in ("ttft_objective_s", "tbt_objective_s", "report_every_s", "coalesce_s", "tick_s"):
            if not isfinite(getattr(self, name)) or getattr(self, name) <= 0:
                raise BadSetting(f"{name} is {getattr(self, name)}; give a finite number above 0")
        for name in ("ssd_blocks", "request_noise", "step_noise", "node_noise", "network_s", "handoff_s"):
            if not isfinite(getattr(self, name)) or getattr(self, name) < 0:
                raise BadSetting(f"{name} is {getattr(self, name)}; give a finite number of at least 0")
