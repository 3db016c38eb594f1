"""When a rail that failed is tried again: rests that grow with every failure in a row."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

_MS: Final = 1_000_000
FIRST_REST_NS: Final = 100 * _MS
LONGEST_REST_NS: Final = 30_000 * _MS
HEALED_AFTER_NS: Final = 60_000 * _MS
"""A rail that worked for so long begins anew with the shortest rest."""


class RailState(Enum):
    UP = "up"
    RESTING = "resting"
    PROBING = "probing"


@dataclass
class Health:
    """One rail's state: UP → RESTING (it failed) → PROBING (rest is over, the shell rebuilds it) → UP or RESTING."""

    state: RailState = RailState.UP
    failures: int = 0
    since_ns: int = 0
    rest_ns: int = 0

    def failed(self, now_ns: int) -> None:
        """From UP or PROBING: rest, twice as long as last time unless it had worked for long."""
        if self.state is RailState.RESTING:
            return
        if self.state is RailState.UP and now_ns - self.since_ns >= HEALED_AFTER_NS:
            self.failures = 0
        self.rest_ns = min(FIRST_REST_NS << min(self.failures, 16), LONGEST_REST_NS)
        self.failures += 1
        self._become(RailState.RESTING, now_ns)

    def is_rested(self, now_ns: int) -> bool:
        return self.state is RailState.RESTING and now_ns >= self.rested_ns

    @property
    def rested_ns(self) -> int:
        """When a rest ends."""
        return self.since_ns + self.rest_ns

    def probe(self, now_ns: int) -> None:
        """Its rest is over and the shell tries to rebuild it."""
        self._become(RailState.PROBING, now_ns)

    def returned(self, now_ns: int) -> None:
        """It works again. Its failures are remembered until it has worked for long."""
        self._become(RailState.UP, now_ns)

    def _become(self, state: RailState, now_ns: int) -> None:
        self.state = state
        self.since_ns = now_ns
