"""Replacements of modules that every simulation needs: threads, time and randomness."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from tools.prove.world import clock, futures, queues, threads

REPLACED: Final[dict[str, ModuleType]] = {
    "concurrent.futures": futures,
    "queue": queues,
    "random": clock.random,
    "secrets": clock.secrets,
    "threading": threads,
    "time": clock.time,
    "uuid": clock.uuid,
}
"""For `imports.install`."""
