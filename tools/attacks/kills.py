"""`kill -9` of a frontend, as the kernel does it when a host runs out of memory."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter

from tools.attacks.target import Attack, AttackedCluster

_RESTART_S = 60.0


def frontends(target: AttackedCluster) -> dict[str, int]:
    """Return the process ids of the frontends."""
    return {name: pid for name, pid in target.pids().items() if name.startswith("frontend")}


async def wait_restarted(target: AttackedCluster, name: str, old_pid: int, *, within_s: float = _RESTART_S) -> bool:
    """Return True once a killed node is ready again in another process, False after `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        node = target.ready["nodes"].get(name, {})
        if node.get("pid") not in (None, old_pid) and node.get("ready"):
            return True
        await asyncio.sleep(0.05)
    return False


async def _kill_one(target: AttackedCluster) -> Counter[str]:
    name, pid = next(iter(frontends(target).items()))
    os.kill(pid, signal.SIGKILL)
    return Counter(["restarted" if await wait_restarted(target, name, pid) else "not restarted"])


KILLED = Attack("killed frontend", "kill -9 of a frontend", _kill_one, frozenset({"restarted"}), within_s=_RESTART_S)
