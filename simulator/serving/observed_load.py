"""Load of a simulated node as its metrics show it, for predictors that learn from such metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """Load of a node at one time, as engines export it."""

    num_waiting: int  # requests that have not begun
    num_running: int
    prefill_tokens: int  # prompt tokens still to be computed, of both
    kv_share: float  # of the node's KV pages in use
