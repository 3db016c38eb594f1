"""The cluster as hindsight looks at it, for as long as one event is taken in. Look-ups only."""

from conductor.policy.requests import NONE
from conductor.policy.state import ClusterState

__all__ = ["StateSurroundings"]

_NEVER = 1 << 62


class StateSurroundings:
    """`hindsight.Surroundings`, of a state that does not change meanwhile: each node is looked up once."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._oldest: dict[str, int] = {}
        self._free: dict[str, int] = {}

    def prefills_before(self, node_id: str, at_ns: int) -> bool:
        """Does a prefill that was placed there by then have yet to end?"""
        oldest_ns = self._oldest.get(node_id)
        if oldest_ns is None:
            requests, slot = self._state.requests, self._state.nodes.slot(node_id)
            here = (requests.column("prefill_node") == slot) & (requests.column("prefill_ns") > 0)
            oldest_ns = int(requests.column("placed_ns")[here].min(initial=_NEVER)) if slot != NONE else _NEVER
            self._oldest[node_id] = oldest_ns
        return oldest_ns <= at_ns

    def free_tokens(self, node_id: str) -> int:
        """Pages that nobody claims, in tokens; of no node, as many as one likes."""
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
        """What a decode step takes there, as predicted."""
        node = self._state.nodes.get(node_id)
        max_batch = max(1, node.max_batch) if node is not None else 1
        slot = self._state.nodes.slot(node_id)
        return self._state.costs_of(model).step_cost_s(batch, context_tokens, max_batch, slot)
