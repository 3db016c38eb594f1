"""Choices of the prefill node that ignore the prefix, the baselines of the Mooncake paper's scheduling experiments."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from conductor.policy.state import PlacementContext

__all__ = ["choose_blindly"]


def choose_blindly(context: PlacementContext, candidates: NDArray[np.void]) -> tuple[int, float]:
    """Return the index and the TTFT of any of the scored PREFILL_CANDIDATE [n], or of any with the shortest queue.

    The request's id decides among them, so that the same request always gets the same answer.
    """
    queue_s = candidates["queue_s"]
    among = np.arange(len(candidates))
    if context.state.config.placement == "load-balance":
        among = np.flatnonzero(queue_s == queue_s.min())
    request = context.request
    digest = blake2b(f"{request.request_id} {request.attempt}".encode(), digest_size=8).digest()
    chosen = int(among[int.from_bytes(digest, "big") % len(among)])
    terms = candidates[chosen]
    return chosen, float(terms["transfer_s"] + terms["queue_s"] + terms["prefill_s"])
