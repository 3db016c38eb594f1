"""How often prefixes are used: counts that fade, of a bounded number of prefixes."""

from collections import OrderedDict
from math import exp

from conductor.policy.config import NS

__all__ = ["Heat"]

_MAX_PREFIXES = 16384


class Heat:
    """Uses per prefix within about `horizon_s`: each counts 1 when it happens and fades by e every horizon."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_ns = horizon_s * NS
        self._counts: OrderedDict[int, tuple[float, int]] = OrderedDict()  # (count, when), least recently used first

    def use(self, now_ns: int, key: int) -> float:
        """Count one use; returns the uses within the horizon, this one included."""
        count = self.of(now_ns, key) + 1.0
        self._counts[key] = count, now_ns
        self._counts.move_to_end(key)
        if len(self._counts) > _MAX_PREFIXES:
            self._counts.popitem(last=False)
        return count

    def of(self, now_ns: int, key: int) -> float:
        """Uses within the horizon, as of now."""
        count, at_ns = self._counts.get(key, (0.0, now_ns))
        return count * exp((at_ns - now_ns) / self._horizon_ns)
