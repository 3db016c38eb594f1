"""How many CPU threads each engine process takes. Reads the machine, changes nothing."""

import math
import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Cores this process may use: its affinity, cut to the container's CPU quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def engine_threads(configured: int, num_engines: int, cores: int) -> int:
    """The configured number, or an equal share of the cores."""
    return configured or max(1, cores // max(1, num_engines))


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that keep the numeric libraries of one process to `threads`.

    PASSIVE: a waiting OpenMP thread that spins steals the core from the process it waits for.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
