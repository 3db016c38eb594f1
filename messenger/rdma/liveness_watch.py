"""Detection of silent lanes of a connection, run by the leader with the link's lock held."""

import time
from collections.abc import Callable

from messenger.rdma.connection_io import ConnectionIO
from messenger.rdma.lane import Lane
from messenger.rdma.policy.silence_detector import PostedCounts, SilenceDetector
from messenger.rdma.verbs import abi


class LivenessWatch:
    """Watch over a connection's lanes: `on_silence(lane, reason)` is called for one that completes none of its work."""

    def __init__(self, io: ConnectionIO, on_silence: Callable[[int, str], None]) -> None:
        self._io = io
        self._on_silence = on_silence
        self._limit_s = min(lane.device.silence_s for lane in io.lanes)
        self._silence = SilenceDetector(int(self._limit_s * 1e9), time.monotonic_ns())

    def look(self) -> None:
        """Report silent lanes, and request a completion on lanes whose pending work is all unsignalled."""
        now_ns = time.monotonic_ns()
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
        if self._silence.is_at_rest and all(lane.pair.posted == lane.pair.done for lane in self._io.lanes):
            return None
        return max(0.0, (self._silence.next_ns - time.monotonic_ns()) / 1e9)


def _book(lane: Lane) -> PostedCounts | None:
    pair = lane.pair
    return PostedCounts(pair, pair.posted, pair.asked, pair.done) if pair.is_usable else None
