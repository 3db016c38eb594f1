"""Byte ranges to copy between a device and its host mirror, and their merging into few strided copies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Ranges of `nbytes` bytes at the offsets `host` [n] in the mirror and `device` [n] in device memory."""

    host: NDArray[np.int64]
    device: NDArray[np.int64]
    nbytes: int

    @classmethod
    def same(cls, offsets: NDArray[np.int64], nbytes: int) -> Ranges:
        """Return ranges with equal offsets on both sides."""
        return cls(offsets, offsets, nbytes)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """`rows` rows of `nbytes` bytes, each a pitch after the preceding one; a single row has its own size as pitch."""

    host: int
    device: int
    nbytes: int
    rows: int
    host_pitch: int
    device_pitch: int

    def each_row(self) -> Iterator[tuple[int, int]]:
        """Yield (host, device) offsets of the rows."""
        for row in range(self.rows):
            yield self.host + row * self.host_pitch, self.device + row * self.device_pitch


def merged(parts: Iterable[Ranges], max_pitch: int) -> list[StridedCopy]:
    """Return few copies that move the ranges, none of which overlap.

    Adjacent ranges become one row, equally spaced ones the rows of one copy, if their pitches are at most `max_pitch`.
    """
    return [copy for part in parts if len(part.host) for copy in _merged(part, max_pitch)]


def _merged(part: Ranges, max_pitch: int) -> Iterator[StridedCopy]:
    order = np.argsort(part.host, kind="stable")
    host, device = part.host[order], part.device[order]
    nbytes, last = part.nbytes, len(host) - 1
    host_steps, device_steps = np.diff(host).tolist(), np.diff(device).tolist()
    begin = 0
    while begin <= last:
        end = begin
        if begin < last:
            steps = host_steps[begin], device_steps[begin]
            if nbytes <= min(steps) and max(steps) <= max_pitch:
                end += 1
                while end < last and (host_steps[end], device_steps[end]) == steps:
                    end += 1
        at, to, rows = int(host[begin]), int(device[begin]), end - begin + 1
        if rows == 1 or steps == (nbytes, nbytes):
            yield StridedCopy(at, to, nbytes * rows, 1, nbytes * rows, nbytes * rows)
        else:
            yield StridedCopy(at, to, nbytes, rows, *steps)
        begin = end + 1
