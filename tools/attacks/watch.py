"""Observation of an attacked cluster: the peak memory of its processes, and the time until it holds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil
import yaml

from moonpool.cluster_view.collector import ValidationResult, validate_cluster
from moonpool.cluster_view.locate import locate
from moonpool.errors import ClusterNotFound
from tools.attacks.target import ADMIN, KEYS, AttackedCluster

VALUES = Path(__file__).parents[2] / "deploy" / "helm" / "moonpool" / "values.yaml"
_SAMPLE_S = 0.1
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def memory_limits() -> dict[str, int]:
    """Return the chart's memory limit in bytes by the beginning of a node's name."""
    values = yaml.safe_load(VALUES.read_text())
    pods = {
        "frontend": values["frontend"]["pod"],
        "conductor": values["conductor"]["pod"],
        "pool": values["pool"]["pod"],
        "prefill": values["workerPod"],
        "decode": values["workerPod"],
    }
    limits = {role: str(pod["resources"]["limits"]["memory"]) for role, pod in pods.items()}
    return {role: int(limit[:-2]) * _UNITS[limit[-2:]] for role, limit in limits.items()}


def over_limit(peak_bytes: Mapping[str, int]) -> dict[str, str]:
    """Return the nodes whose peak memory is over the chart's limit, with both. Raises KeyError for an unknown role."""
    limits = {node: memory_limits()[node.partition("-")[0]] for node in peak_bytes}
    return {
        node: f"{peak >> 20} MiB of {limits[node] >> 20}" for node, peak in peak_bytes.items() if peak > limits[node]
    }


class MemoryWatch:
    """Peak resident memory of every node of a cluster in bytes, with its child processes, while the context is open.

    The kernel's own peak of the node's process is used, reset at the beginning; children are sampled, and pages that
    they share with others are divided among them.
    """

    def __init__(self, target: AttackedCluster) -> None:
        self._target = target
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak_bytes: dict[str, int] = defaultdict(int)

    def __enter__(self) -> MemoryWatch:
        for pid in self._target.pids().values():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            for name, pid in self._target.pids().items():
                with contextlib.suppress(OSError, psutil.Error):
                    children = psutil.Process(pid).children(recursive=True)
                    nbytes = _status_bytes(pid, "VmHWM") + sum(map(_shared_bytes, children))
                    self.peak_bytes[name] = max(self.peak_bytes[name], nbytes)
            if self._over.wait(_SAMPLE_S):
                return


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


def _shared_bytes(child: psutil.Process) -> int:
    """Return the proportional resident memory of a process, 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


async def held(target: AttackedCluster) -> list[ValidationResult]:
    """Return the processes that hold something or do not answer."""
    located = locate(conductor="", url="", ready_file=target.ready_file)
    return [result for result in await validate_cluster(located, admin_key=KEYS[ADMIN]) if not result.ok]


async def wait_released(target: AttackedCluster, *, within_s: float) -> float:
    """Return the seconds until no process holds anything. Raises TimeoutError that names those that still do."""
    began = time.monotonic()
    while True:
        try:
            problems: list[ValidationResult] | str = await held(target)
        except ClusterNotFound as error:
            problems = str(error)
        if not problems:
            return time.monotonic() - began
        if time.monotonic() - began > within_s:
            raise TimeoutError(f"after {within_s:g} s some processes still hold something: {problems}")
        await asyncio.sleep(0.1)
