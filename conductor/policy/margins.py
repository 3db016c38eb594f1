"""How far predictions must stay below an objective so that nearly all who are admitted meet it. Learned; no clock.

A prediction is an expectation: admitting up to the objective itself lets half of the admitted miss it, the more so as
those admitted later share the node. What is learned is the error that all but a share of requests stay below, as a
share of the objective. Requests that were never near their objective say nothing about it. A margin that lets in
nobody who is near it would never learn that times have changed: what no request has confirmed for long fades.
"""

from typing import Final

from conductor.policy.config import NS

__all__ = ["Margin", "Margins"]

_STEP: Final = 0.01  # of the objective, by which errors beyond the margin raise it; others lower it in proportion
_MOST: Final = 0.5
_NEAR: Final = 0.5  # predictions below this share of the objective teach nothing
_FADES_NS: Final = 120 * NS  # without a request that teaches something, after which a margin is half of what it was


class Margin:
    """Of one objective: follows the quantile of (measured - predicted) / objective by counting who exceeds it."""

    def __init__(self) -> None:
        self.share = 0.0  # of the objective
        self.num_samples = 0
        self._looked_at = 0  # of the samples
        self._taught_ns: int | None = None

    def learn(self, met: float, predicted_s: float, measured_s: float, objective_s: float) -> None:
        """What came of a request that was admitted, when a share `met` is to meet the objective; 0: none need.

        Times and objectives of 0 are none.
        """
        if not (met > 0 and objective_s > 0 and measured_s > 0 and _NEAR * objective_s <= predicted_s < float("inf")):
            return
        self.num_samples += 1
        exceeds = measured_s - predicted_s > self.share * objective_s
        self.share += _STEP * met if exceeds else -_STEP * (1 - met)
        self.share = min(max(self.share, 0.0), _MOST)

    def pass_time(self, now_ns: int) -> None:
        """It is `now_ns`, once in a while."""
        if self._taught_ns is None or self.num_samples != self._looked_at:
            self._taught_ns, self._looked_at = now_ns, self.num_samples
        elif now_ns - self._taught_ns >= _FADES_NS:
            self._taught_ns = now_ns
            self.share /= 2


class Margins:
    """Of a model's two objectives."""

    def __init__(self) -> None:
        self.ttft = Margin()
        self.tbt = Margin()

    def pass_time(self, now_ns: int) -> None:
        """It is `now_ns`, once in a while."""
        self.ttft.pass_time(now_ns)
        self.tbt.pass_time(now_ns)

    def summary(self) -> dict[str, float]:
        """For export, as shares of the objective."""
        return {"ttft": self.ttft.share, "tbt": self.tbt.share}
