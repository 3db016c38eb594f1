"""What helpers of prefill groups still have to compute, besides what was placed on them. Pure.

An entry lives no longer than its head's prefill, which the table of requests knows; nothing else has to end it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.nodes import NodeTable
from conductor.policy.requests import NONE, RequestTable

__all__ = ["HelpBook"]

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Help:
    attempt: int
    helpers: tuple[str, ...]
    share_ns: int  # that each of them computes


class HelpBook:
    """By request."""

    def __init__(self) -> None:
        self._helps: dict[str, _Help] = {}

    def __len__(self) -> int:
        return len(self._helps)

    def add(self, request_id: str, attempt: int, helpers: Sequence[str], share_ns: int) -> None:
        """From now on these nodes compute `share_ns` each for the request."""
        self._helps[request_id] = _Help(attempt, tuple(helpers), share_ns)

    def load_s(self, now_ns: int, nodes: NodeTable, requests: RequestTable) -> NDArray[np.float64]:
        """Per slot: seconds that helping will still take. Forgets those whose prefill is over, or lost its head."""
        load_ns = np.zeros(nodes.num_slots, np.int64)
        for request_id, one in list(self._helps.items()):
            row = requests.find(request_id, one.attempt)
            if row is None or requests.column("prefill_node")[row] == NONE or requests.column("prefill_ns")[row] <= 0:
                del self._helps[request_id]
                continue
            started_ns = int(requests.column("started_ns")[row])
            left_ns = one.share_ns - (now_ns - started_ns if started_ns != NONE else 0)
            slots = [nodes.slot(node_id) for node_id in one.helpers] if left_ns > 0 else []
            load_ns[[slot for slot in slots if slot != NONE]] += left_ns
        return load_ns / NS
