"""`kill -9` of the frontend that serves, as the kernel does it when a host runs out of memory."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter

from tools.attacks.target import Attack, AttackedCluster

_RESTART_S = 60.0


def frontends(target: AttackedCluster) -> dict[str, int]:
    """Return the process ids of the frontends that are ready, by name; those that serve come before the standbys."""
    ready = [
        (str(node["target"]) == "", name, int(node["pid"]))
        for name, node in target.ready["nodes"].items()
        if name.startswith("frontend") and node["ready"] and node["pid"]
    ]
    return {name: pid for _, name, pid in sorted(ready)}


async def wait_frontends(target: AttackedCluster, count: int = 2, *, within_s: float = _RESTART_S) -> bool:
    """Return True once `count` frontends are ready, of which one serves; False after `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        targets = {name: target.ready["nodes"][name]["target"] for name in frontends(target)}
        if len(targets) >= count and any(targets.values()):
            return True
        await asyncio.sleep(0.05)
    return False


async def wait_restarted(target: AttackedCluster, name: str, old_pid: int, *, within_s: float = _RESTART_S) -> bool:
    """Return True once a killed node is ready again in another process, False after `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        node = target.ready["nodes"].get(name, {})
        if node.get("pid") not in (None, old_pid) and node.get("ready"):
            return True
        await asyncio.sleep(0.05)
    return False


async def _kill_serving(target: AttackedCluster) -> Counter[str]:
    """Kill the frontend that serves once another one stands by, and wait until it is back."""
    if not await wait_frontends(target):
        return Counter({"no standby": 1})
    name, pid = next(iter(frontends(target).items()))
    os.kill(pid, signal.SIGKILL)
    return Counter(["restarted" if await wait_restarted(target, name, pid) else "not restarted"])


KILLED = Attack(
    "killed frontend",
    "kill -9 of the frontend that serves, each time another one stands by",
    _kill_serving,
    frozenset({"restarted"}),
    within_s=2 * _RESTART_S,
)
