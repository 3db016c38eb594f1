"""Shadow prices: which requests to serve when the nodes cannot serve all of them.

Each admitted request takes node time from others: seconds of prefill, and seconds of decode at the TBT objective. The
largest number of requests is served by those with `prefill_s * prefill price + decode_s * decode price <= 1`, where the
prices are the dual variables of a linear program: maximise the number of requests served, subject to the node time that
there is (bid prices; K. Talluri and G. van Ryzin, "An Analysis of Bid-Price Controls for Network Revenue Management",
Management Science 1998). The program is solved for the requests of the last minute, rejected ones included, so prices
follow the demand, and are 0 while there is enough time for all.

A request that costs more than 1 is not rejected: it has to leave a part of the room for load free, which cheaper ones
may use (trunk reservation; F. P. Kelly, "Loss networks", Annals of Applied Probability 1991). So it is served when the
load is low.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.events import NS

__all__ = ["ShadowPrices", "decode_need_s", "fitting_prices"]

Floats = NDArray[np.float64]
_WINDOW_NS: Final = 60 * NS  # of the demand
_LEAST_NS: Final = 10 * NS  # over which the first requests count as spread
_SAMPLES: Final = 1024  # maximum in the window; requests between two samples add to the weight of the first
_FILL: Final = 1.08  # demand to admit, as a share of the node time: what costs most leaves some of it free
_LEAST_SHARE: Final = 0.1  # of a step that serves somebody, however long its fixed part
_ROUNDS: Final = 4  # of alternately fitting each price to the other, starting from the last solution


class ShadowPrices:
    """Prices of the node time of one model, in requests per second of it."""

    def __init__(self) -> None:
        self.prefill = 0.0
        self.decode = 0.0
        self._at_ns = np.zeros(_SAMPLES, np.int64)
        self._needs_s = np.zeros((_SAMPLES, 2))
        self._weights = np.zeros(_SAMPLES)
        self._num_samples = 0
        self._since_ns: int | None = None

    def cost_of(self, prefill_s: float, decode_s: float) -> float:
        """Return what a request costs, in requests that could be served instead of it."""
        return self.prefill * prefill_s + self.decode * decode_s

    def count(self, now_ns: int, prefill_s: float, decode_s: float) -> None:
        """Add an arriving request to the demand."""
        last = (self._num_samples - 1) % _SAMPLES
        if self._since_ns is None:
            self._since_ns = now_ns
        if self._num_samples and now_ns - self._at_ns.item(last) < _WINDOW_NS // _SAMPLES:
            self._weights[last] += 1
        else:
            at = self._num_samples % _SAMPLES
            self._at_ns[at], self._needs_s[at, 0], self._needs_s[at, 1] = now_ns, prefill_s, decode_s
            self._weights[at] = 1
            self._num_samples += 1

    def adapt(self, now_ns: int, prefill_nodes: float, decode_nodes: float) -> None:
        """Fit the prices to the demand until now and the nodes that there are for it."""
        if self._since_ns is None:
            return
        recent = self._at_ns > now_ns - _WINDOW_NS
        recent[self._num_samples :] = False
        needs_s, weights = self._needs_s[recent], self._weights[recent]
        there_s = _FILL * min(_WINDOW_NS, max(_LEAST_NS, now_ns - self._since_ns)) / NS
        there = (prefill_nodes * there_s, decode_nodes * there_s)
        for _ in range(_ROUNDS):
            self.prefill, self.decode = fitting_prices(needs_s, weights, there, (self.prefill, self.decode))


def decode_need_s(steps: float, context_tokens: float, costs: tuple[float, float, float], tbt_s: float) -> float:
    """Return the seconds of a decode node whose steps take `tbt_s` that an answer of `steps` steps needs.

    `costs` of a step: seconds fixed, per sequence, per token of context. The fixed part serves nobody.
    """
    fixed_s, per_sequence_s, per_token_s = costs
    share_s = per_sequence_s + per_token_s * context_tokens
    return steps * share_s * tbt_s / max(tbt_s - fixed_s, _LEAST_SHARE * tbt_s)


def fitting_prices(
    needs_s: Floats, weights: Floats, there_s: tuple[float, float], before: tuple[float, float]
) -> tuple[float, float]:
    """Return prices per second of (prefill, decode) closer to those at which what is worth it just fits than `before`.

    `needs_s` [n, 2], seconds of both that a request needs; `weights` [n], how many such requests there are; `there_s`,
    the seconds that there are. Repeated, this descends to a solution of the dual program.
    """
    prefill = _price(1 - before[1] * needs_s[:, 1], needs_s[:, 0], weights, there_s[0])
    return prefill, _price(1 - prefill * needs_s[:, 0], needs_s[:, 1], weights, there_s[1])


def _price(gain: Floats, needs_s: Floats, weights: Floats, there_s: float) -> float:
    """Return the least price per second at which the requests worth it need no more than `there_s`.

    Requests [n] are worth it if their `gain` exceeds the price of what they need.
    """
    counts = (gain > 0) & (needs_s > 0)
    gain, needs_s, weights = gain[counts], needs_s[counts], weights[counts]
    worth = gain / needs_s
    order = np.argsort(-worth, kind="stable")
    first_excluded = int(np.searchsorted(np.cumsum((needs_s * weights)[order]), there_s, side="right"))
    return float(worth[order[first_excluded]]) if first_excluded < len(order) else 0.0
