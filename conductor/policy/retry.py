"""When a rejected request is told to come back: whole seconds, and not all at the same moment."""

from math import ceil, isfinite
from typing import Final
from zlib import crc32

__all__ = ["LONGEST_RETRY_S", "retry_after_s"]

LONGEST_RETRY_S: Final = 300.0
_SPREAD: Final = 0.5  # of the wait, over which those that were rejected together are spread


def retry_after_s(request_id: str, attempt: int, wait_s: float) -> float:
    """From the predicted wait: at least 1 and at most LONGEST_RETRY_S seconds, never sooner than predicted.

    Later by a part of half of the wait, or of 1 s, that follows from the request's name: the same for the same request.
    """
    soonest = max(1, ceil(min(wait_s, LONGEST_RETRY_S))) if isfinite(wait_s) else int(LONGEST_RETRY_S)
    spread = max(1, ceil(_SPREAD * soonest))
    later = crc32(f"{request_id}/{attempt}".encode()) % (spread + 1)
    return float(min(LONGEST_RETRY_S, soonest + later))
