"""Whether the SSD can be used now, judged by how its reads and writes end. No I/O, no clock: `now_s` is given.

A failed write makes the SSD read-only, reads that fail one after the other make it failed; either is left alone for a
while, longer each time, and then tried again. What ends well ends the trouble.
"""

import enum
import logging

__all__ = ["SsdHealth", "SsdState"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_READS_TO_FAIL = 3  # a place that cannot be read is that place's trouble

_log = logging.getLogger(__name__)


class SsdState(enum.StrEnum):
    OK = "ok"
    READ_ONLY = "read_only"  # full, or writes fail: the node goes on with what is there
    FAILED = "failed"  # reads fail: the node goes on with its memory alone


class SsdHealth:
    """Of one node's SSD tier."""

    def __init__(self, what: str) -> None:
        self.state = SsdState.OK
        self._what = what  # named in the log
        self._pause_s = _FIRST_PAUSE_S
        self._again_s = 0.0  # no new trial before
        self._failed_reads = 0

    def may_read(self, now_s: float) -> bool:
        """Whether to read now. A failed SSD is tried after its pause."""
        return self.state is not SsdState.FAILED or now_s >= self._again_s

    def may_write(self, now_s: float) -> bool:
        """Whether to write now. One in trouble is tried after its pause."""
        return self.state is SsdState.OK or now_s >= self._again_s

    def wrote(self) -> None:
        """A batch was written. After failed reads this is a hope: the next failed read makes the pause longer still."""
        if self.state is SsdState.READ_ONLY:
            self._pause_s = _FIRST_PAUSE_S
        self._become(SsdState.OK, "writes succeed again")

    def write_failed(self, now_s: float, reason: str) -> None:
        """Something of a batch could not be written."""
        self._pause(now_s)
        if self.state is not SsdState.FAILED:
            self._become(SsdState.READ_ONLY, reason)

    def was_read(self) -> None:
        """Something of a batch could be read."""
        self._failed_reads = 0
        if self.state is SsdState.FAILED:
            self._pause_s = _FIRST_PAUSE_S
            self._become(SsdState.OK, "reads succeed again")

    def read_failed(self, now_s: float, reason: str) -> None:
        """Nothing of a batch could be read."""
        self._failed_reads += 1
        if self._failed_reads >= _READS_TO_FAIL:
            self._pause(now_s)
            self._become(SsdState.FAILED, reason)

    def _pause(self, now_s: float) -> None:
        self._again_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _become(self, state: SsdState, reason: str) -> None:
        if state is not self.state:
            level = logging.INFO if state is SsdState.OK else logging.ERROR
            _log.log(level, "the SSD tier in %s is %s now: %s", self._what, state.value, reason)
            self.state = state
