"""Detection of silent and lagging lanes of a connection, run by the leader with the link's lock held.

A lane is silent after the configured time; one that lags behind its own measured speed, while another lane completes
work, is found much earlier (`Rails.lagging`), in `LAG_LOOKS` looks in a row: between two looks all completions are
polled, so time in which this process did not run does not count.
"""

import time
from collections.abc import Callable

from messenger.rdma.connection_io import ConnectionIO
from messenger.rdma.lane import Lane
from messenger.rdma.policy.silence_detector import PostedCounts, SilenceDetector
from messenger.rdma.verbs import abi

LAG_SHARE = 50
"""Ratio of the configured time to the shortest time after which a lane lags."""
LAG_LOOKS = 3


class LivenessWatch:
    """Watch over a connection's lanes: `on_silence(lane, reason)` is called for one that completes none of its work."""

    def __init__(self, io: ConnectionIO, on_silence: Callable[[int, str], None]) -> None:
        self._io = io
        self._on_silence = on_silence
        self._limit_s = min(lane.device.silence_s for lane in io.lanes)
        self._silence = SilenceDetector(int(self._limit_s * 1e9), time.monotonic_ns())
        self._lag_ns = int(self._limit_s * 1e9 / LAG_SHARE)
        self._next_lag_ns = 0
        self._lags: dict[int, int] = {}  # lane -> looks in a row in which it lagged

    def look(self) -> None:
        """Report silent and lagging lanes; request a completion on lanes whose pending work is all unsignalled."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._next_lag_ns:
            self._next_lag_ns = now_ns + self._lag_ns // LAG_LOOKS
            self._look_for_lags(now_ns)
        if now_ns < self._silence.next_ns:
            return
        lanes = self._io.lanes
        silent, unasked = self._silence.tick([_book(lane) for lane in lanes], now_ns)
        for index in unasked:
            if lanes[index].pair.room:
                lanes[index].pair.post_one(None, opcode=abi.WR_RDMA_WRITE, signalled=True)
        for index in silent:
            if not lanes[index].pair.failed:
                self._on_silence(index, f"nothing completed in {self._limit_s:g} s")

    def wait_s(self) -> float | None:
        """Return the seconds until `look` is due; None if nothing is in flight."""
        due_ns = self._silence.next_ns
        if self._may_lag():
            due_ns = min(due_ns, self._next_lag_ns)
        elif self._silence.is_at_rest and all(lane.pair.posted == lane.pair.done for lane in self._io.lanes):
            return None
        return max(0.0, (due_ns - time.monotonic_ns()) / 1e9)

    def _may_lag(self) -> bool:
        """Return True if a lane has data in flight, and there is another one to take it over."""
        rails = self._io.rails
        return len(self._io.lanes) > 1 and any(rails.in_flight_nbytes(lane) for lane in range(len(self._io.lanes)))

    def _look_for_lags(self, now_ns: int) -> None:
        if not self._may_lag():
            self._lags.clear()
            return
        lagging = self._io.rails.lagging(self._lag_ns, now_ns)
        self._lags = {lane: self._lags.get(lane, 0) + 1 for lane in lagging}
        for lane, looks in list(self._lags.items()):
            if looks >= LAG_LOOKS and not self._io.lanes[lane].pair.failed:
                del self._lags[lane]
                self._on_silence(lane, "it lags far behind its speed, while another rail completes its work")


def _book(lane: Lane) -> PostedCounts | None:
    pair = lane.pair
    return PostedCounts(pair, pair.posted, pair.asked, pair.done) if pair.is_usable else None
