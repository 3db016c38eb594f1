"""Monotonic counters of a worker, reported to the conductor and exported by the frontend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping


class WorkerCounters:
    """Counts by name. `on_transfer(path, nbytes, seconds)`, if given, is called for every KV transfer."""

    def __init__(self, on_transfer: Callable[[str, int, float], None] | None = None) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self.on_transfer = on_transfer

    def add(self, name: str, value: float) -> None:
        self._values[name] += value

    def add_transfer(self, path: str, nbytes: int, seconds: float) -> None:
        """Count KV bytes and seconds of a transfer on one of the paths push, pull, load, fetch, store and group."""
        self._values[f"kv_{path}_bytes"] += nbytes
        if self.on_transfer is not None:
            self.on_transfer(path, nbytes, seconds)

    def snapshot(self) -> Mapping[str, float]:
        return dict(self._values)
