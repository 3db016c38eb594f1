"""Detection of what a cluster at rest still holds: by the roles' own validation, and by the system's tables."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonpool.cluster_view.collector import ValidationResult
from moonpool.errors import ClusterNotFound
from tools.chaos.cluster import Cluster

REST_S = 60.0
ALLOWED_DESCRIPTORS = 24  # connections to restarted peers are opened anew and cached
ALLOWED_THREADS = 12


@dataclass(frozen=True)
class ProcessUsage:
    """Open descriptors and threads of one process."""

    descriptors: int
    threads: int
    rss_kib: int


def usage_of(pid: int) -> ProcessUsage:
    """Return the usage of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return ProcessUsage(descriptors, int(status["Threads"]), int(status.get("VmRSS", "0 kB").split()[0]))


def shared_memory() -> set[str]:
    """Return the names of the machine's shared memory segments."""
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if entry.is_file()}


def usages(cluster: Cluster) -> dict[str, ProcessUsage]:
    """Return the usage of each role's process."""
    return {name: usage_of(role.pid) for name, role in cluster.roles.items() if role.pid is not None}


async def held_at_rest(cluster: Cluster, rest_s: float = REST_S) -> tuple[list[str], float]:
    """Wait until no role holds anything. Returns what is still held after `rest_s`, and the seconds waited."""
    began_s = time.monotonic()
    while True:
        try:
            held = [describe(answer) for answer in await cluster.validate() if not answer.ok]
        except ClusterNotFound as error:
            held = [str(error)]
        waited_s = time.monotonic() - began_s
        if not held or waited_s > rest_s:
            return sorted(set(held)), waited_s
        await asyncio.sleep(0.5)


def describe(answer: ValidationResult) -> str:
    """Return one line about a role that holds something."""
    return f"{answer.node_id} at {answer.target}: {'; '.join(answer.problems)}"


def growth(before: Mapping[str, ProcessUsage], after: Mapping[str, ProcessUsage]) -> list[str]:
    """Return the roles whose descriptors or threads grew by more than connections explain."""
    found = []
    for name, now in after.items():
        then = before.get(name)
        if then is None:
            continue
        for what, allowed in (("descriptors", ALLOWED_DESCRIPTORS), ("threads", ALLOWED_THREADS)):
            old, new = getattr(then, what), getattr(now, what)
            if new > old + allowed:
                found.append(f"{name}: {new} {what}, {old} at the beginning")
    return found
