"""All HTTP connections of a front door: how many may be open, and how long one may stay without a request in flight.

Time is counted in ticks of a sweep over all of them, so that a request costs no timer and no look at the clock.
"""

import asyncio
import logging
import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

_log = logging.getLogger(__name__)
_LONGEST_TICK_S: Final = 1.0
_TICKS_OF_TIMEOUT: Final = 4
_LEAVING_PART: Final = 16
_STUCK_TIMEOUTS: Final = 4
_TOLD_EVERY_S: Final = 60.0


class Connection(Protocol):
    """What is asked of one."""

    since_tick: int
    """When it was made, began to send a request's head, or had its last answer."""

    @property
    def is_serving(self) -> bool:
        """Whether a request is in flight, or an answer not sent whole."""

    def unsent_since(self, tick: int) -> int:
        """The tick since which the client has taken nothing of what waits for it; `tick`, now, while nothing waits."""

    def leave(self) -> None:
        """Close it at once."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one front door's connections."""

    max_connections: int = 10_000
    header_timeout_s: float = 15.0
    """From the connection, or the first byte of a further request, until the request's headers are there; also for the
    rest of a body after it was refused. A client that takes nothing of its answer has four times as long."""
    max_header_nbytes: int = 64 << 10
    """The request line and all headers."""
    max_headers: int = 128
    max_pipelined: int = 16
    """Requests sent ahead of the answer to the first."""


class Connections:
    """Whoever must leave does so within a tick. `start` before use, `close` after it."""

    def __init__(self, limits: Limits, open_now: Callable[[], set[Connection]], count: Callable[[str], None]) -> None:
        """`count` is called with the reason whenever somebody is refused or sent away."""
        self.limits = limits
        self.tick = 0
        self._open_now = open_now
        self._count = count
        self._tick_s = min(_LONGEST_TICK_S, limits.header_timeout_s / _TICKS_OF_TIMEOUT)
        self._patience = math.ceil(limits.header_timeout_s / self._tick_s)
        self._most = min(limits.max_connections, _descriptors_for_connections())
        self._timer: asyncio.TimerHandle | None = None
        self._untold: dict[str, int] = {}
        self._told_tick = -math.inf

    def start(self) -> None:
        """Sweep from now on."""
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._sweep)

    def close(self) -> None:
        """Sweep no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell()

    def refused(self, reason: str) -> None:
        """Count somebody who was; told in the log together with others."""
        self._count(reason)
        self._untold[reason] = self._untold.get(reason, 0) + 1

    def has_room(self, num_opening: int) -> bool:
        """Whether one more may come in, besides `num_opening` that are about to; if not at first, those leave who have
        waited longest without a request in flight: whoever holds connections open keeps nobody out."""
        open_now = self._open_now()
        if len(open_now) + num_opening < self._most:
            return True
        waiting = sorted((each for each in open_now if not each.is_serving), key=lambda each: each.since_tick)
        for each in waiting[: max(1, self._most // _LEAVING_PART)]:
            self.refused("no_room")
            each.leave()
        if not waiting:
            self.refused("no_room")
        # They are gone in the next turn of the loop; the one that came may stand in for one of them.
        return bool(waiting)

    def _sweep(self) -> None:
        self.tick += 1
        late, stuck = self.tick - self._patience, self.tick - self._patience * _STUCK_TIMEOUTS
        for each in list(self._open_now()):
            if each.unsent_since(self.tick) < stuck:
                self.refused("answer_not_read")
                each.leave()
            elif each.since_tick < late and not each.is_serving:
                self.refused("header_timeout")
                each.leave()
        if (self.tick - self._told_tick) * self._tick_s >= _TOLD_EVERY_S:
            self._tell()
        self.start()

    def _tell(self) -> None:
        """In one line however many they are: whoever can fill the door cannot fill the disk."""
        if self._untold:
            what = ", ".join(f"{count} {reason}" for reason, count in sorted(self._untold.items()))
            _log.warning("connections refused or sent away since this was last told: %s", what)
            self._untold.clear()
            self._told_tick = self.tick


def _descriptors_for_connections() -> int:
    """Three quarters of the files this process may have open: the rest is for workers, conductors and logs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft * 3 // 4
