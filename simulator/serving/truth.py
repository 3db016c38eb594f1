"""What work truly takes in the simulated cluster: a cost profile, and noise about it of which the policy knows nothing.

Nodes differ in speed for as long as they live, requests and runs of decode steps each have their luck. A request's luck
is its own, the same wherever and whenever it is served: so that two runs of one seed differ by decisions alone.
"""

from math import exp
from random import Random

from simulator.serving.clock import NS
from simulator.serving.settings import ServingSettings
from simulator.serving.work import Work
from worker.policy.cost_profile import CostProfile

__all__ = ["Truth"]


class Truth:
    """Durations. Deterministic given the seed and the order of decode steps on each node."""

    def __init__(self, profile: CostProfile, settings: ServingSettings, seed: int) -> None:
        self._profile = profile
        self._settings = settings
        self._seed = seed
        self._speed: dict[str, float] = {}
        self._dice: dict[str, Random] = {}
        self.bytes_per_token = profile.kv_bytes_per_token

    def chunk_s(self, node_id: str, work: Work, start: int, end: int) -> float:
        """To compute prompt tokens [start, end) of a request on a node."""
        luck = exp(self._settings.request_noise * work.job.luck)
        return self._profile.prefill_s(end - start, start) * luck * self._node(node_id)

    def step_s(self, node_id: str, batch: int, context_tokens: int) -> float:
        """One decode step, the next of some that are alike."""
        luck = exp(self._settings.step_noise * self._rolls(node_id).gauss(0, 1))
        return self._profile.decode_s(batch, context_tokens) * luck * self._node(node_id)

    def transfer_ns(self, path: str, nbytes: int) -> int:
        """To move bytes when nobody else does; paths as in TransferSample."""
        return round(self._profile.transfer_s(path, nbytes) * NS)

    def _node(self, node_id: str) -> float:
        if node_id not in self._speed:
            roll = Random(f"{self._seed} speed {node_id}").gauss(0, 1)
            self._speed[node_id] = exp(self._settings.node_noise * roll)
        return self._speed[node_id]

    def _rolls(self, node_id: str) -> Random:
        if node_id not in self._dice:
            self._dice[node_id] = Random(f"{self._seed} steps {node_id}")
        return self._dice[node_id]
