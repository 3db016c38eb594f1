"""Control groups of the cluster's processes: a CPU quota and a memory limit per node, with cgroup v1 or v2."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 20_000
_REMOVAL_S = 5.0


class ControlGroups:
    """A group per node; `missing` is the reason why there are none, "" if there are."""

    def __init__(self) -> None:
        self._name = f"mp-chaos-{os.getpid()}"
        self._is_v2 = (ROOT / "cgroup.controllers").exists()
        self._parents = {controller: _own_group(controller, is_v2=self._is_v2) for controller in ("cpu", "memory")}
        self.missing = self._probe()

    def add(self, node: str, pid: int) -> None:
        """Move a process into its node's groups."""
        for controller in self._parents if not self.missing else ():
            folder = self._folder(controller, node)
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))

    def limit_cpu(self, node: str, share: float | None) -> None:
        """Allow the node this share of one core; None: no limit."""
        folder = self._folder("cpu", node)
        quota = -1 if share is None else max(1000, int(PERIOD_US * share))
        if self._is_v2:
            (folder / "cpu.max").write_text(f"{'max' if share is None else quota} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))

    def limit_memory(self, node: str, nbytes: int | None) -> None:
        """Limit the node's memory; None: no limit. The kernel reclaims, and kills a process if that does not suffice.

        Raises OSError if the kernel cannot reclaim that much (cgroup v1).
        """
        folder = self._folder("memory", node)
        if self._is_v2:
            (folder / "memory.max").write_text("max" if nbytes is None else str(nbytes))
        else:
            (folder / "memory.limit_in_bytes").write_text("-1" if nbytes is None else str(nbytes))

    def memory_nbytes(self, node: str) -> int:
        """Return the memory charged to the node now."""
        name = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
        return int((self._folder("memory", node) / name).read_text())

    def close(self) -> None:
        """Remove the groups, which must be empty soon."""
        deadline_s = time.monotonic() + _REMOVAL_S
        for folder in self._made():
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.05)  # its processes have been killed

    def _made(self) -> Iterator[Path]:
        for top in {self._folder(controller, "").parent / self._name for controller in self._parents}:
            if top.exists():
                yield from sorted(path for path in top.iterdir() if path.is_dir())
                yield top

    def _folder(self, controller: str, node: str) -> Path:
        return self._parents[controller] / self._name / node

    def _probe(self) -> str:
        try:
            self.add_probe()
        except OSError as error:
            return f"control groups cannot be created: {error}"
        return ""

    def add_probe(self) -> None:
        """Create and remove a group with both limits. Raises OSError."""
        try:
            for controller in self._parents:
                self._folder(controller, "probe").mkdir(parents=True)
                if self._is_v2:
                    for parent in (self._parents[controller], self._parents[controller] / self._name):
                        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
            self.limit_cpu("probe", 0.5)
            self.limit_memory("probe", 1 << 30)
        finally:
            self.close()


def _own_group(controller: str, *, is_v2: bool) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if is_v2 and not controllers:
            return ROOT / path.lstrip("/")
        if not is_v2 and controller in controllers.split(","):
            return ROOT / controller / path.lstrip("/")
    return ROOT if is_v2 else ROOT / controller
