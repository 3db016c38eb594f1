"""The lanes of a connection watched for silence, by whoever leads; with the link's lock held."""

import time
from collections.abc import Callable

from messenger.rdma.courier import Courier
from messenger.rdma.lane import Lane
from messenger.rdma.policy.silence import Book, Silence
from messenger.rdma.verbs import abi


class Vigil:
    """`on_silence(lane, reason)` is called for a lane with work under way that completes nothing."""

    def __init__(self, courier: Courier, on_silence: Callable[[int, str], None]) -> None:
        self._courier = courier
        self._on_silence = on_silence
        self._limit_s = min(lane.device.silence_s for lane in courier.lanes)
        self._silence = Silence(int(self._limit_s * 1e9), time.monotonic_ns())

    def look(self) -> None:
        """Now and then: give silent lanes up, and have those tell of completions that would not."""
        now_ns = time.monotonic_ns()
        if now_ns < self._silence.next_ns:
            return
        lanes = self._courier.lanes
        silent, unasked = self._silence.tick([_book(lane) for lane in lanes], now_ns)
        for index in unasked:
            if lanes[index].pair.room:
                lanes[index].pair.post_one(None, opcode=abi.WR_RDMA_WRITE, signalled=True)
        for index in silent:
            if not lanes[index].pair.failed:
                self._on_silence(index, f"nothing completed in {self._limit_s:g} s")

    def wait_s(self) -> float | None:
        """How long until `look` has something to do of itself; None: not before something is posted."""
        if self._silence.is_at_rest and all(lane.pair.posted == lane.pair.done for lane in self._courier.lanes):
            return None
        return max(0.0, (self._silence.next_ns - time.monotonic_ns()) / 1e9)


def _book(lane: Lane) -> Book | None:
    pair = lane.pair
    return Book(pair, pair.posted, pair.asked, pair.done) if pair.is_usable else None
