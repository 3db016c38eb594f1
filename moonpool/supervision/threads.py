"""Number of CPU threads of each engine process."""

import math
import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Return the number of cores for this process: its affinity, limited by the container's CPU quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def engine_threads(configured: int, num_engines: int, cores: int) -> int:
    """Return the configured number, or an equal share of the cores if it is 0."""
    return configured or max(1, cores // max(1, num_engines))


def thread_environment(threads: int) -> dict[str, str]:
    """Return environment variables that limit a process's numeric libraries to `threads`.

    PASSIVE, because a spinning OpenMP thread would take the core from the process that it waits for.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
