"""Formulas for the duration of work, given coefficients; profiles, conductor and simulator share this single copy.

Plain arithmetic that numba also compiles (conductor/policy/kernels.py). No coefficient is negative, so no result is.
After an edit, delete the cache of compiled kernels: numba notices changes only in the file that it compiles.
"""

__all__ = ["fetch_s", "margin", "prefill_s", "read_nbytes", "read_s", "tbt_s"]

_LEAST_FETCH = 1.25  # multiple of a load's duration: measurement noise must not move a conversation away from its KV
_MARGIN_PER_RANGE = 0.1  # share of a prediction, per measured range that the argument exceeds
_MOST_MARGIN = 0.5


def margin(first: float, first_most: float, second: float, second_most: float) -> float:
    """Return the factor by which to lengthen a prediction whose arguments exceed the measured ranges.

    The factor is 1 inside the ranges and below them, since the formulas stay between 0 and the least measured value
    there; 1.1 at twice the range, 1.2 at three times, and 1.5 from six times on. It is also 1 if nothing was measured
    (`first_most` 0).
    """
    if first_most <= 0 or (first <= first_most and second <= second_most):
        return 1.0
    ratio = max(first / first_most, second / second_most if second_most > 0 else 1.0)
    return 1.0 + min(_MOST_MARGIN, _MARGIN_PER_RANGE * (ratio - 1.0))


def read_nbytes(count: int, nbytes: int, window: int, window_nbytes: int) -> int:
    """Return the bytes of the last `count` blocks (or tokens) of a prefix.

    `nbytes` are those of each in the lasting KV groups. In the groups with windows, each of the last `window` has
    `window_nbytes` more; those before them are not kept.
    """
    return count * nbytes + min(count, window) * window_nbytes


def read_s(fixed: float, per_byte: float, nbytes: float, num_concurrent: int) -> float:
    """Return the seconds to read `nbytes` from a sender that serves `num_concurrent` other readers."""
    return fixed * (nbytes > 0) + per_byte * nbytes * (1 + num_concurrent)


def fetch_s(over_network_s: float, from_memory_s: float) -> float:
    """Return the seconds of a fetch, given the time over the network and from the host's own memory."""
    return max(over_network_s, _LEAST_FETCH * from_memory_s)


def prefill_s(
    fixed: float, per_token: float, per_pair: float, prompt_tokens: int, reused_tokens: float, most_seen: int = 0
) -> float:
    """Return the seconds to prefill a prompt of which `reused_tokens` are not computed.

    Each new token attends to all reused ones and to half of the new ones (Mooncake's polynomial in both lengths). With
    a rolling window, each token beyond the first `most_seen` attends to as many; 0: there is no window.
    """
    seen = min(prompt_tokens, most_seen) if most_seen > 0 else prompt_tokens
    new = seen - reused_tokens
    further = prompt_tokens - seen
    seconds = fixed + per_token * new + per_pair * new * (reused_tokens + new / 2)
    return seconds + further * (per_token + per_pair * seen)


def tbt_s(fixed: float, per_sequence: float, per_token: float, batch: float, context: float, max_batch: int) -> float:
    """Return the seconds between tokens of `batch` sequences; beyond `max_batch` the sequences alternate."""
    if batch <= max_batch:
        return fixed + per_sequence * batch + per_token * context
    turns = batch / max_batch
    return (fixed + per_sequence * (batch / turns) + per_token * (context / turns)) * turns
