"""Choice among the network paths to one peer: which of them fail or are slow, and how much each may carry.

A path is one address of the peer. No I/O and no clock: the caller samples the paths while they carry something, and
passes the time.

A path with work in flight that moves no byte for several of its own round trips is *stalled*. That alone proves
nothing, because the peer may be busy or stopped, so the path is left only if the peer has answered by another path
meanwhile: a request, or a probe, which the policy requests for this purpose. A path is *slow* if
another one would finish what it carries much sooner, even counting that path's own work.

A path that was left rests, is probed, and is used again once it answers; the rests grow as those of RDMA rails do.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from messenger.path_health import PathHealth, PathState

STALL_S: Final = 0.1
"""Shortest time without progress after which a path is stalled."""
STALL_ROUND_TRIPS: Final = 4
SLOW_FACTOR: Final = 4.0
"""A path is slow if another one would finish its work this many times as fast, and `SLOW_S` earlier."""
SLOW_S: Final = 0.1
CONFIRM_S: Final = 0.06
"""Time for which a path must be suspected while the peer is known to answer, before it is left."""
LATE_S: Final = 0.03
"""Time by which a sample may notice an event late."""
LEAST_SPAN_S: Final = 0.05
"""Shortest time with work in flight over which a speed is measured."""
SPAN_S: Final = 0.12
"""Time over which a speed is measured."""
MAX_GAP_S: Final = 0.1
"""If no sample was taken for longer, this process did not run, and the gap does not count as a stall."""
PROBE_SPACING_S: Final = 0.05
"""Shortest time between two probes that are to prove that the peer answers."""
LEAST_WINDOW_NBYTES: Final = 4 << 20
MOST_WINDOW_NBYTES: Final = 64 << 20
TRIAL_WINDOW_NBYTES: Final = 1
"""Window of a path that has returned and has no measured speed yet: one part at a time."""


class PathSample(NamedTuple):
    """State of a path's connections: a total of bytes moved, which never decreases, and unanswered work."""

    moved_nbytes: int
    in_flight_nbytes: int
    """Bytes of unanswered requests, at least 1 for each."""
    num_answers: int
    """Total of answers, which only the peer's process can give: its kernel accepts bytes even while it stands still."""
    round_trip_s: float


class Departure(NamedTuple):
    """A path that must not be used any more, for a reason."""

    path: int
    reason: str


class _Path:
    """State of one path."""

    def __init__(self) -> None:
        self.health = PathHealth()
        self.bytes_s: float | None = None
        self.round_trip_s = 0.0
        self.in_flight_nbytes = 0
        self.is_on_trial = False
        self.progressed_s = -math.inf  # the path was idle, or moved bytes
        self.alive_s = -math.inf  # the peer answered by this path, a request or a probe
        self.probed_s = -math.inf
        self.is_probed = False
        self.suspected_since_s = math.inf
        self.witnessed_s: float | None = None  # another path has shown since the last progress that the peer answers
        self.slow_since_s: float | None = None
        self._moved_nbytes = 0
        self._num_answers = 0
        self._samples: deque[tuple[float, int]] = deque()

    @property
    def is_up(self) -> bool:
        return self.health.state is PathState.UP

    def add(self, sample: PathSample, now_s: float) -> None:
        self.in_flight_nbytes = sample.in_flight_nbytes
        self.round_trip_s = sample.round_trip_s
        has_moved = sample.moved_nbytes > self._moved_nbytes
        self._moved_nbytes = sample.moved_nbytes
        if sample.num_answers > self._num_answers:
            self.alive_s = now_s
        if has_moved or sample.num_answers > self._num_answers:
            self.progressed_s = now_s
        self._num_answers = sample.num_answers
        if not sample.in_flight_nbytes:
            self.progressed_s = now_s
            self._samples.clear()
            return
        self._samples.append((now_s, sample.moved_nbytes))
        while now_s - self._samples[0][0] > SPAN_S:
            self._samples.popleft()
        first_s, first_nbytes = self._samples[0]
        if now_s - first_s >= LEAST_SPAN_S:
            self.bytes_s = (sample.moved_nbytes - first_nbytes) / (now_s - first_s)
            self.is_on_trial = False

    def shift(self, gap_s: float) -> None:
        """Exclude a time in which nothing could be observed."""
        self.progressed_s += gap_s
        self.witnessed_s = self.slow_since_s = None
        self._samples.clear()

    def is_stalled(self, now_s: float) -> bool:
        limit_s = max(STALL_S, STALL_ROUND_TRIPS * self.round_trip_s)
        return self.in_flight_nbytes > 0 and now_s - self.progressed_s > limit_s

    def forget(self) -> None:
        self.bytes_s = self.witnessed_s = self.slow_since_s = None
        self._samples.clear()


class PathPolicy:
    """State of all paths to one peer, by index; index 0 is the peer's first address. At first all are in use."""

    def __init__(self, num_paths: int) -> None:
        self._paths = [_Path() for _ in range(num_paths)]
        self._sampled_s = -math.inf

    def is_up(self, path: int) -> bool:
        """Return True if the path is in use."""
        return self._paths[path].is_up

    @property
    def num_down(self) -> int:
        """Number of paths that are not in use."""
        return sum(not path.is_up for path in self._paths)

    def order(self, home: int) -> list[int]:
        """Return all paths in the order in which to try them: `home` first if it is in use, those that rest last."""
        others = [path for path in range(len(self._paths)) if path != home]
        return sorted([home, *others], key=lambda path: not self._paths[path].is_up)

    def window_nbytes(self, path: int) -> int:
        """Return the number of bytes in flight from which on a connection on the path begins no further part."""
        one = self._paths[path]
        if one.is_on_trial:
            return TRIAL_WINDOW_NBYTES
        wanted = 2 * (one.bytes_s or 0.0) * one.round_trip_s
        return int(min(max(wanted, LEAST_WINDOW_NBYTES), MOST_WINDOW_NBYTES))

    def sample(self, samples: Sequence[PathSample], now_s: float) -> list[Departure]:
        """Add a sample of every path. Returns the paths to leave now, which count as failed."""
        gap_s = now_s - self._sampled_s
        self._sampled_s = now_s
        for path, sample in zip(self._paths, samples, strict=True):
            if math.isfinite(gap_s) and gap_s > MAX_GAP_S:
                path.shift(gap_s)
            path.add(sample, now_s)
        departures = []
        for index, path in enumerate(self._paths):
            self._note_witness(path, now_s)
            reason = self._suspicion(path, now_s) if path.is_up else ""
            if reason and self._is_confirmed(path, now_s):
                self.failed(index, now_s)
                departures.append(Departure(index, reason))
        return departures

    def failed(self, path: int, now_s: float) -> None:
        """Let the path rest, because it was left, or because no connection could be made by it."""
        failed = self._paths[path]
        failed.health.failed(_ns(now_s))
        failed.forget()

    def probes_due(self, now_s: float) -> list[int]:
        """Return the paths to probe now; the caller calls `probed` for each.

        They are those that have rested, and, while one is suspected, all others that may prove that the peer answers.
        """
        suspected = [path for path in self._paths if path.is_up and self._suspicion(path, now_s)]
        due = []
        for index, path in enumerate(self._paths):
            is_silent = any(other is not path and not _shows_life(path, other.suspected_since_s) for other in suspected)
            is_witness = is_silent and now_s - path.probed_s >= PROBE_SPACING_S
            if path.is_probed or not (is_witness or path.health.is_rested(_ns(now_s))):
                continue
            path.is_probed, path.probed_s = True, now_s
            if not path.is_up:
                path.health.probe(_ns(now_s))
            due.append(index)
        return due

    def probed(self, path: int, *, answered: bool, now_s: float) -> bool:
        """Record the outcome of a probe. Returns True if the path is in use again."""
        probed = self._paths[path]
        probed.is_probed = False
        if answered:
            probed.alive_s = now_s
        if probed.health.state is not PathState.PROBING:
            return False
        if not answered:
            probed.health.failed(_ns(now_s))
            return False
        probed.health.returned(_ns(now_s))
        probed.forget()
        probed.is_on_trial = True
        return True

    def next_probe_s(self) -> float | None:
        """Return the time at which the next rest ends; None if no path rests."""
        resting = [path.health.rested_ns for path in self._paths if path.health.state is PathState.RESTING]
        return min(resting) / 1e9 if resting else None

    def _others(self, path: _Path) -> list[_Path]:
        return [other for other in self._paths if other is not path]

    def _note_witness(self, path: _Path, now_s: float) -> None:
        if path.progressed_s >= now_s:
            path.witnessed_s = None
        elif path.witnessed_s is None and self._has_witness(path, path.progressed_s):
            path.witnessed_s = now_s

    def _has_witness(self, path: _Path, since_s: float) -> bool:
        """Return True if another path in use has shown since then that the peer answers."""
        return any(other.is_up and _shows_life(other, since_s) for other in self._others(path))

    def _is_confirmed(self, path: _Path, now_s: float) -> bool:
        """Return True if the suspicion has held for CONFIRM_S since the peer was known to answer.

        When a peer continues that stood still, its paths move again one after the other.
        """
        if path.is_stalled(now_s):
            return path.witnessed_s is not None and now_s - path.witnessed_s >= CONFIRM_S
        is_long = path.slow_since_s is not None and now_s - path.slow_since_s >= CONFIRM_S
        return is_long and self._has_witness(path, path.suspected_since_s)

    def _suspicion(self, path: _Path, now_s: float) -> str:
        """Return the reason to leave the path, unless the peer is the cause; "" if there is none.

        Sets the time from which on another path must have shown that the peer answers.
        """
        if path.is_stalled(now_s):
            path.suspected_since_s = path.progressed_s
            return f"nothing moved for {now_s - path.progressed_s:.3f} s while the peer answered by another path"
        if not path.bytes_s or not path.in_flight_nbytes:
            path.slow_since_s = None
            return ""
        path.suspected_since_s = now_s - SPAN_S
        left_s = path.in_flight_nbytes / path.bytes_s
        for other in self._others(path):
            if not other.is_up or not other.bytes_s:
                continue
            instead_s = (path.in_flight_nbytes + other.in_flight_nbytes) / other.bytes_s + 2 * other.round_trip_s
            if left_s > SLOW_FACTOR * instead_s and left_s - instead_s > SLOW_S:
                path.slow_since_s = now_s if path.slow_since_s is None else path.slow_since_s
                return (
                    f"it moves {path.bytes_s / 1e6:.3g} MB/s, and another path, with {other.bytes_s / 1e6:.3g}, takes "
                    "over its work"
                )
        path.slow_since_s = None
        return ""


def _shows_life(path: _Path, since_s: float) -> bool:
    """Return True if the peer has answered by the path since then; samples notice both times late."""
    return path.alive_s > since_s + LATE_S


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
