"""Resource usage of a process, and detection of growth as a trend over the run."""

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

ALLOWED_GROWTH = {"rss_kib": 16 << 10, "descriptors": 6, "threads": 4}
"""Allowed difference between the medians of the last and the middle third of the samples."""
FEWEST_SAMPLES = 60


def usage() -> dict[str, int]:
    """Return the resource usage of this process, after returning free memory to the system.

    Otherwise heap fragmentation caused by short-lived threads would look like a leak.
    """
    with contextlib.suppress(AttributeError):  # malloc_trim exists only in glibc
        ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "threads": int(status["Threads"]),
    }


def open_descriptors() -> list[str]:
    """Return the targets of this process's file descriptors."""
    found = []
    for number in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def running_threads() -> list[str]:
    """Return the names of the running Python threads."""
    return [thread.name for thread in threading.enumerate()]


def verbs_resources() -> dict[str, int]:
    """Return the counts of queue pairs, registrations etc. of this machine's verbs devices; empty without devices."""
    tool = shutil.which("rdma")
    if tool is None or not Path("/sys/class/infiniband").is_dir():
        return {}
    counts: dict[str, int] = {}
    shown = subprocess.run([tool, "resource", "show"], capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        # 0: rxe0: pd 3 cq 6 qp 7 cm_id 0 mr 12 ctx 2 srq 1
        words = line.split()[2:]
        for name, number in zip(words[::2], words[1::2], strict=False):
            counts[name] = counts.get(name, 0) + int(number)
    return counts


def growth(name: str, samples: Sequence[dict[str, int]]) -> list[str]:
    """Describe resources that grew from the middle third of the samples to the last; empty with too few samples."""
    if len(samples) < FEWEST_SAMPLES:
        return []
    third = len(samples) // 3
    found = []
    for what, allowed in ALLOWED_GROWTH.items():
        middle, last = (
            statistics.median(sample[what] for sample in part) for part in (samples[third:-third], samples[-third:])
        )
        if last - middle > allowed:
            found.append(f"{name}: {what} grew from {middle:.0f} to {last:.0f}; a growth of {allowed} is allowed")
    return found
