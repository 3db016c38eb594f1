"""The simulated `time`, `secrets`, `uuid`: the running process's clocks and randomness."""

from __future__ import annotations

import random as real_random
import secrets as real_secrets
import time as real_time
import uuid as real_uuid
from types import ModuleType
from typing import Any

from tools.prove.world.scheduler import ProcessState, world

_outside = real_random.Random(0)  # of values that are drawn while modules are loaded


def _process() -> ProcessState | None:
    from tools.prove.world import scheduler

    thread = None if scheduler._current is None else scheduler._current.current
    return None if thread is None else thread.process


def _monotonic_ns() -> int:
    process = _process()
    return 0 if process is None else world().read_clock() + process.monotonic_offset_ns


def _time_ns() -> int:
    process = _process()
    return 1_700_000_000 * 10**9 if process is None else world().read_clock() + process.wall_offset_ns


def _sleep(seconds: float) -> None:
    world().park(seconds)


def _random() -> real_random.Random:
    process = _process()
    return _outside if process is None else process.random


def _module(name: str, real: ModuleType, **replaced: Any) -> ModuleType:
    module = ModuleType(name, real.__doc__)
    module.__dict__.update({k: v for k, v in vars(real).items() if not k.startswith("__")})
    module.__dict__.update(replaced)
    return module


time = _module(
    "time",
    real_time,
    monotonic=lambda: _monotonic_ns() / 1e9,
    monotonic_ns=_monotonic_ns,
    perf_counter=lambda: _monotonic_ns() / 1e9,
    perf_counter_ns=_monotonic_ns,
    process_time=lambda: _monotonic_ns() / 1e9,
    thread_time=lambda: _monotonic_ns() / 1e9,
    time=lambda: _time_ns() / 1e9,
    time_ns=_time_ns,
    sleep=_sleep,
)

secrets = _module(
    "secrets",
    real_secrets,
    randbits=lambda k: _random().getrandbits(k),
    randbelow=lambda n: _random().randrange(n),
    token_bytes=lambda n=32: _random().randbytes(n),
    token_hex=lambda n=32: _random().randbytes(n).hex(),
)

uuid = _module("uuid", real_uuid, uuid4=lambda: real_uuid.UUID(int=_random().getrandbits(128), version=4))


class SimRandom(real_random.Random):
    """Random numbers; without a seed, they follow from the running process."""

    def __init__(self, x: Any = None) -> None:
        super().__init__(_random().getrandbits(64) if x is None else x)


random = _module("random", real_random, Random=SimRandom)
