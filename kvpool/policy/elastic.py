"""Size of an elastic arena, from readings of the machine's memory. No I/O, no clock.

A scope is the host, or a control group that limits the process's memory. In each, `available` is the memory that can
still be used without pushing anything but file cache out. The arena yields or grows by the tightest scope:

    available     0 ── 1/64 ──── 1/16 ─────────── 1/8 ──────────── total
                  critical │ pressure │    hold    │  idle: grow, and never beyond this mark
    stalled time  pressure: some task waited for memory in 10 % of the time; critical: all tasks in 20 %

    pressure  yields what is missing to the upper mark, at least 1/8 and at most 1/4 of the elastic part per decision
    critical  yields everything above the minimum at once
    idle      after 10 s without pressure, grows by up to 1/8 of the elastic part per second

Stalls are measured from the counters of PSI (`total`), since its averages lag behind by seconds. Growth stops at the
mark at which yielding stops, so that constant readings of the rest of the machine cause no oscillation.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_CRITICAL, _LOW, _HIGH = 1 / 64, 1 / 16, 1 / 8  # shares of a scope's memory that are available
_SOME_STALLED, _FULL_STALLED = 0.10, 0.20  # shares of the time
_STALL_WINDOW_NS = 500_000_000  # shortest time over which stalls are measured
_GROWTH_PERIOD_NS = 1_000_000_000
_QUIET_NS = 10_000_000_000  # time without pressure after which the arena grows
_LEAST_YIELD, _MOST_YIELD, _GROWTH = 1 / 8, 1 / 4, 1 / 8  # shares of the elastic part


class PressureLevel(enum.IntEnum):
    """State of the tightest scope."""

    NONE = 0
    HIGH = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class MemoryScope:
    """Memory of the host, or of one control group. Stalls are cumulative; 0 where the kernel does not report them."""

    name: str
    total_nbytes: int
    available_nbytes: int
    some_stalled_us: int = 0
    full_stalled_us: int = 0


@dataclass(frozen=True, slots=True)
class ElasticDecision:
    """Size that the arena should have."""

    target_nbytes: int
    pressure: PressureLevel
    reason: str  # for the log; empty if nothing changes


class ElasticSizing:
    """Target size of one arena between its least and its greatest size, in multiples of `step_nbytes`.

    The arena starts with its least size, which is rounded up; the greatest size itself need not be a multiple.
    """

    def __init__(self, least_nbytes: int, most_nbytes: int, step_nbytes: int) -> None:
        self.least_nbytes = min(-(-least_nbytes // step_nbytes) * step_nbytes, most_nbytes)
        self.most_nbytes = most_nbytes
        self.target_nbytes = self.least_nbytes
        self.pressure = PressureLevel.NONE
        self._step_nbytes = step_nbytes
        self._elastic_nbytes = most_nbytes - self.least_nbytes
        self._pressed_ns: int | None = None
        self._grown_ns: int | None = None
        self._stalls: dict[str, deque[tuple[int, int, int]]] = {}  # per scope: (time, some, full), oldest first

    def decide(self, now_ns: int, scopes: Sequence[MemoryScope], resident_nbytes: int) -> ElasticDecision:
        """Return the size to take now. `resident_nbytes` is the memory that the arena has at present."""
        if self._grown_ns is None:
            self._grown_ns = now_ns
        worst, reason = PressureLevel.NONE, ""
        for scope in scopes:
            pressure, why = self._pressure(now_ns, scope)
            if pressure > worst:
                worst, reason = pressure, f"{scope.name}: {why}"
        self.pressure = worst
        before = self.target_nbytes
        if worst is not PressureLevel.NONE:
            self._pressed_ns = now_ns
            self.target_nbytes = self._shrunk(scopes, resident_nbytes, worst)
        elif self._may_grow(now_ns):
            self.target_nbytes = self._grown(scopes, resident_nbytes)
            reason = f"{min(scope.available_nbytes for scope in scopes) >> 20} MiB are available" if scopes else ""
            if self.target_nbytes != before:
                self._grown_ns = now_ns
        return ElasticDecision(self.target_nbytes, worst, reason if self.target_nbytes != before else "")

    def _pressure(self, now_ns: int, scope: MemoryScope) -> tuple[PressureLevel, str]:
        some, full = self._stalled(now_ns, scope)
        share = scope.available_nbytes / max(1, scope.total_nbytes)
        what = f"{scope.available_nbytes >> 20} of {scope.total_nbytes >> 20} MiB are available"
        if share < _CRITICAL:
            return PressureLevel.CRITICAL, what
        if full >= _FULL_STALLED:
            return PressureLevel.CRITICAL, f"all tasks waited for memory in {full:.0%} of the time"
        if share < _LOW:
            return PressureLevel.HIGH, what
        if some >= _SOME_STALLED:
            return PressureLevel.HIGH, f"tasks waited for memory in {some:.0%} of the time"
        return PressureLevel.NONE, ""

    def _stalled(self, now_ns: int, scope: MemoryScope) -> tuple[float, float]:
        """Return the shares of the time in which some and all tasks waited, since the last reading but 500 ms."""
        seen = self._stalls.setdefault(scope.name, deque())
        seen.append((now_ns, scope.some_stalled_us, scope.full_stalled_us))
        while len(seen) > 2 and now_ns - seen[1][0] >= _STALL_WINDOW_NS:
            seen.popleft()
        began_ns, some_us, full_us = seen[0]
        elapsed_us = max(now_ns - began_ns, _STALL_WINDOW_NS) / 1000
        return (scope.some_stalled_us - some_us) / elapsed_us, (scope.full_stalled_us - full_us) / elapsed_us

    def _shrunk(self, scopes: Sequence[MemoryScope], resident_nbytes: int, pressure: PressureLevel) -> int:
        if pressure is PressureLevel.CRITICAL:
            return self.least_nbytes
        missing = max(int(scope.total_nbytes * _HIGH) - scope.available_nbytes for scope in scopes)
        least, most = (int(self._elastic_nbytes * share) for share in (_LEAST_YIELD, _MOST_YIELD))
        # Only memory that the arena has can be returned.
        wanted = min(self.target_nbytes, resident_nbytes) - min(max(missing, least), most)
        return max(self.least_nbytes, min(self._rounded(wanted), self.target_nbytes))

    def _may_grow(self, now_ns: int) -> bool:
        if self._grown_ns is None or now_ns - self._grown_ns < _GROWTH_PERIOD_NS:
            return False
        return self._pressed_ns is None or now_ns - self._pressed_ns >= _QUIET_NS

    def _grown(self, scopes: Sequence[MemoryScope], resident_nbytes: int) -> int:
        idle = min(scope.available_nbytes - int(scope.total_nbytes * _HIGH) for scope in scopes) if scopes else 0
        affordable = resident_nbytes + idle
        wanted = min(self.target_nbytes + max(int(self._elastic_nbytes * _GROWTH), self._step_nbytes), affordable)
        if wanted >= self.most_nbytes:
            return self.most_nbytes
        return max(self.target_nbytes, self._rounded(wanted))

    def _rounded(self, nbytes: int) -> int:
        return nbytes // self._step_nbytes * self._step_nbytes
