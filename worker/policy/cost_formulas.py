"""How long work takes, given coefficients: the one copy of each formula, for profiles, conductor and simulator.

Plain arithmetic that numba compiles too (conductor/policy/kernels.py). No coefficient is negative, so no result is.
After an edit, delete the compiled kernels' cache: numba sees changes only in the file that it compiles.
"""

__all__ = ["fetch_s", "margin", "prefill_s", "read_s", "tbt_s"]

_LEAST_FETCH = 1.25  # times a load: noise in what was measured must not move a conversation from where its KV is
_MARGIN_PER_RANGE = 0.1  # of a prediction, per measured range that it lies beyond that range
_MOST_MARGIN = 0.5


def margin(first: float, first_most: float, second: float, second_most: float) -> float:
    """By how much to lengthen a prediction whose arguments lie beyond the most that was measured of each.

    1 inside: below the least that was measured, too, since the formulas lie between nothing and that there. Outside
    1.1 at twice the range, 1.2 at three times, 1.5 from six times on: never less than the formula, growing with the
    work, and bounded. 1 also where nothing was measured (`first_most` 0): a guess has no edge.
    """
    if first_most <= 0 or (first <= first_most and second <= second_most):
        return 1.0
    ratio = max(first / first_most, second / second_most if second_most > 0 else 1.0)
    return 1.0 + min(_MOST_MARGIN, _MARGIN_PER_RANGE * (ratio - 1.0))


def read_s(fixed: float, per_byte: float, nbytes: float, num_concurrent: int) -> float:
    """Seconds to read `nbytes` from somebody who sends to `num_concurrent` others."""
    return fixed * (nbytes > 0) + per_byte * nbytes * (1 + num_concurrent)


def fetch_s(over_network_s: float, from_memory_s: float) -> float:
    """Seconds to read what `read_s` says takes so long over the network, and so long from the host's own memory."""
    return max(over_network_s, _LEAST_FETCH * from_memory_s)


def prefill_s(fixed: float, per_token: float, per_pair: float, prompt_tokens: int, reused_tokens: float) -> float:
    """Seconds to prefill a prompt of which `reused_tokens` need not be computed.

    Each new token attends to all reused ones and to half of the new ones (Mooncake's polynomial in both lengths).
    """
    new = prompt_tokens - reused_tokens
    return fixed + per_token * new + per_pair * new * (reused_tokens + new / 2)


def tbt_s(fixed: float, per_sequence: float, per_token: float, batch: float, context: float, max_batch: int) -> float:
    """Seconds between tokens of `batch` sequences; beyond the largest batch they take turns."""
    if batch <= max_batch:
        return fixed + per_sequence * batch + per_token * context
    turns = batch / max_batch
    return (fixed + per_sequence * (batch / turns) + per_token * (context / turns)) * turns
