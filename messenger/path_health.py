"""Retry schedule of failed network paths, RDMA rails included: rests that grow with every consecutive failure."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

_MS: Final = 1_000_000
FIRST_REST_NS: Final = 100 * _MS
LONGEST_REST_NS: Final = 30_000 * _MS
HEALED_AFTER_NS: Final = 60_000 * _MS
"""Time without failures after which the next rest is the shortest again."""


class PathState(Enum):
    UP = "up"
    RESTING = "resting"
    PROBING = "probing"


@dataclass
class PathHealth:
    """State of one path: UP → RESTING (it failed) → PROBING (the rest is over, it is tested) → UP or RESTING."""

    state: PathState = PathState.UP
    failures: int = 0
    since_ns: int = 0
    rest_ns: int = 0

    def failed(self, now_ns: int) -> None:
        """Start a rest, from UP or PROBING: twice as long as the last, unless the path worked for HEALED_AFTER_NS."""
        if self.state is PathState.RESTING:
            return
        if self.state is PathState.UP and now_ns - self.since_ns >= HEALED_AFTER_NS:
            self.failures = 0
        self.rest_ns = min(FIRST_REST_NS << min(self.failures, 16), LONGEST_REST_NS)
        self.failures += 1
        self._become(PathState.RESTING, now_ns)

    def is_rested(self, now_ns: int) -> bool:
        return self.state is PathState.RESTING and now_ns >= self.rested_ns

    @property
    def rested_ns(self) -> int:
        """Time at which the rest ends."""
        return self.since_ns + self.rest_ns

    def probe(self, now_ns: int) -> None:
        """Enter PROBING after the rest."""
        self._become(PathState.PROBING, now_ns)

    def returned(self, now_ns: int) -> None:
        """Enter UP. Earlier failures count until the path has worked for HEALED_AFTER_NS."""
        self._become(PathState.UP, now_ns)

    def _become(self, state: PathState, now_ns: int) -> None:
        self.state = state
        self.since_ns = now_ns
