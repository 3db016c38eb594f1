"""Injection and healing of faults, one class per kind. Healing is safe at any time, also after a failed injection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.chaos.cluster import Cluster, host_of
from tools.chaos.disks import SSD
from tools.chaos.network import SharedLoopback
from tools.chaos.schedule import CUTS, FaultKind, PlannedFault, Round

DUTY_S = 0.02  # of a slow node without control groups: a period of running and stopping
MEMORY_SLACK = 2 << 20
FLIPS = 64
CLOCK_STEPS_S = (-3600.0, -20.0, 20.0, 3600.0, 90 * 86400.0)


class Injection(ABC):
    """One fault. `skipped` is the reason why it was not injected, "" if it was."""

    def __init__(self, fault: PlannedFault, cluster: Cluster) -> None:
        self.fault = fault
        self.cluster = cluster
        self.role = cluster.roles[fault.node]
        self.detail = ""
        self.skipped = ""

    @abstractmethod
    async def inject(self) -> None:
        """Begin the fault."""

    async def heal(self) -> None:  # noqa: B027  (some faults leave nothing to undo)
        """End the fault."""


class Kill(Injection):
    """SIGKILL; the process is started again."""

    async def inject(self) -> None:
        if self.cluster.kill(self.fault.node) is None:
            self.skipped = "it was not running"


class Pause(Injection):
    """SIGSTOP and, at the end, SIGCONT."""

    _pid: int | None = None

    async def inject(self) -> None:
        self._pid = self.role.signal(signal.SIGSTOP)
        self.skipped = "" if self._pid is not None else "it was not running"

    async def heal(self) -> None:
        if self._pid is not None and self.role.pid == self._pid:
            self.role.signal(signal.SIGCONT)


class Cut(Injection):
    """A link whose packets vanish or are reset, in both directions."""

    _is_cut = False

    async def inject(self) -> None:
        network = self.cluster.network
        assert not isinstance(network, SharedLoopback)
        self.detail = "drop" if self.fault.drops else "reset"
        await asyncio.to_thread(network.cut, self.fault.node, self.fault.peer, drops=self.fault.drops)
        self._is_cut = True

    async def heal(self) -> None:
        network = self.cluster.network
        if self._is_cut and not isinstance(network, SharedLoopback):
            await asyncio.to_thread(network.join, self.fault.node, self.fault.peer, drops=self.fault.drops)


async def _heal_disk(cluster: Cluster, fault: PlannedFault) -> None:
    """Expect roles to start again, once a start that met the fault has been noticed."""
    await asyncio.sleep(1.0)
    cluster.failing_disks.discard(host_of(fault.node))


class DiskFull(Injection):
    """No room on the host's disk."""

    async def inject(self) -> None:
        self.cluster.failing_disks.add(host_of(self.fault.node))
        await asyncio.to_thread(self.cluster.disks[host_of(self.fault.node)].fill)

    async def heal(self) -> None:
        self.cluster.disks[host_of(self.fault.node)].free()
        await _heal_disk(self.cluster, self.fault)


class DiskErrors(Injection):
    """EIO, ENOSPC or short transfers for some of the pool node's reads, writes and syncs."""

    async def inject(self) -> None:
        error = (errno.EIO, errno.ENOSPC, -1)[int(self.fault.strength * 3)]
        share = 1000 if self.fault.drops else 200
        self.detail = f"{errno.errorcode.get(error, 'short')} for {share} of 1,000"
        self.cluster.failing_disks.add(host_of(self.fault.node))
        self.role.set_control(error=error, per_mille=share)

    async def heal(self) -> None:
        self.role.set_control(error=0, per_mille=0)
        await _heal_disk(self.cluster, self.fault)


class DiskSlow(Injection):
    """Every transfer of the pool node's disk is delayed."""

    async def inject(self) -> None:
        delay_us = int(5000 + 60_000 * self.fault.strength)
        self.detail = f"{delay_us} us"
        self.role.set_control(delay_us=delay_us)

    async def heal(self) -> None:
        self.role.set_control(delay_us=0)


class DiskCorrupt(Injection):
    """Flipped bits in the files of the pool node."""

    async def inject(self) -> None:
        disk = self.cluster.disks[host_of(self.fault.node)]
        flipped = await asyncio.to_thread(disk.corrupt, SSD, random.Random(self.fault.strength), FLIPS)
        self.detail = f"{flipped} bits"
        self.skipped = "" if flipped else "there are no files"


class ClockJump(Injection):
    """Another wall clock for one process and, at the end, the old one."""

    async def inject(self) -> None:
        step_s = CLOCK_STEPS_S[int(self.fault.strength * len(CLOCK_STEPS_S))]
        self.detail = f"{step_s:+.0f} s"
        self.role.set_control(clock_ns=int(step_s * 1e9))

    async def heal(self) -> None:
        self.role.set_control(clock_ns=0)


class SlowNode(Injection):
    """A share of 5 to 25 % of one core, by a CPU quota; without control groups by stopping and continuing."""

    _stepper: asyncio.Task[None] | None = None

    async def inject(self) -> None:
        share = 0.05 + 0.2 * self.fault.strength
        self.detail = f"{100 * share:.0f} % of a core"
        if self.cluster.groups.missing:
            self._stepper = asyncio.create_task(self._step(share))
        else:
            self.cluster.groups.limit_cpu(self.fault.node, share)

    async def _step(self, share: float) -> None:
        while True:
            stopped = self.role.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(DUTY_S * (1 - share) / share)
            finally:
                if self.role.pid == stopped:
                    self.role.signal(signal.SIGCONT)
            await asyncio.sleep(DUTY_S)

    async def heal(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepper
        elif not self.cluster.groups.missing:
            self.cluster.groups.limit_cpu(self.fault.node, None)


class MemoryPressure(Injection):
    """A memory limit just above what the node uses. The kernel reclaims pages and may kill the process."""

    _pid: int | None = None

    async def inject(self) -> None:
        groups, node = self.cluster.groups, self.fault.node
        self.cluster.short_of_memory.add(node)
        self._pid = self.role.pid
        if self._pid is not None:
            self.cluster.expected_kills.add(self._pid)
        limit = groups.memory_nbytes(node) + MEMORY_SLACK
        self.detail = f"{limit >> 20} MiB"
        await asyncio.to_thread(groups.limit_memory, node, limit)

    async def heal(self) -> None:
        await asyncio.to_thread(self.cluster.groups.limit_memory, self.fault.node, None)
        self.cluster.short_of_memory.discard(self.fault.node)
        if self.role.pid != self._pid:
            self.detail += ", killed by the kernel"
        if self.role.pid is not None:
            self.cluster.expected_kills.discard(self.role.pid)


CLASSES: dict[str, type[Injection]] = {
    FaultKind.KILL: Kill,
    FaultKind.PAUSE_SHORT: Pause,
    FaultKind.PAUSE_LONG: Pause,
    FaultKind.DISK_FULL: DiskFull,
    FaultKind.DISK_ERRORS: DiskErrors,
    FaultKind.DISK_SLOW: DiskSlow,
    FaultKind.DISK_CORRUPT: DiskCorrupt,
    FaultKind.CLOCK_JUMP: ClockJump,
    FaultKind.SLOW_NODE: SlowNode,
    FaultKind.MEMORY_PRESSURE: MemoryPressure,
    **dict.fromkeys(CUTS, Cut),
}


def unsupported(cluster: Cluster, network_missing: str) -> dict[str, str]:
    """Return the kinds that this machine cannot inject, with the reason."""
    found = dict.fromkeys(CUTS, network_missing) if network_missing else {}
    if cluster.groups.missing:
        found[FaultKind.MEMORY_PRESSURE] = cluster.groups.missing
    if missing := next((disk.missing for disk in cluster.disks if disk.missing), ""):
        found[FaultKind.DISK_FULL] = missing
    return found


@dataclass(frozen=True)
class Injected:
    """One fault as it happened; times since the run's beginning."""

    fault: PlannedFault
    began_s: float
    ended_s: float
    detail: str
    skipped: str


@dataclass
class Injector:
    """Runs the rounds of a schedule against a cluster."""

    cluster: Cluster
    began_s: float  # of `time.monotonic`
    history: list[Injected] = field(default_factory=list)
    slow_recoveries: list[str] = field(default_factory=list)

    async def run(self, rounds: Sequence[Round], *, round_s: float, recovery_limit_s: float) -> None:
        """Inject all rounds. After each the cluster recovers; one that does not within the limit is noted."""
        for each in rounds:
            started_s = time.monotonic()
            await asyncio.gather(*(self._run(fault, started_s) for fault in each.faults))
            healed_s = time.monotonic()
            if lacking := await self.cluster.wait_recovered(recovery_limit_s):
                self.slow_recoveries.append(f"round {each.number}: after {recovery_limit_s:.0f} s: {lacking}")
            print(
                f"{time.monotonic() - self.began_s:6.0f} s  round {each.number} on host {each.host}: "
                f"{', '.join(f'{fault.kind} {fault.node}' for fault in each.faults)}; "
                f"recovered in {time.monotonic() - healed_s:.1f} s",
                flush=True,
            )
            await asyncio.sleep(max(0.0, started_s + round_s - time.monotonic()))

    async def _run(self, fault: PlannedFault, started_s: float) -> None:
        await asyncio.sleep(max(0.0, started_s + fault.at_s - time.monotonic()))
        injection = CLASSES[fault.kind](fault, self.cluster)
        began_s = time.monotonic()
        try:
            await injection.inject()
            await asyncio.sleep(fault.seconds)
        except OSError as error:
            injection.skipped = str(error)
        finally:
            await injection.heal()
        ended_s = time.monotonic()
        self.history.append(
            Injected(
                fault, began_s - self.began_s, ended_s - self.began_s, injection.detail, injection.skipped
            )
        )  # fmt: skip

    def counts(self) -> dict[str, int]:
        """Return the number of faults per kind that were injected."""
        return dict(Counter(str(entry.fault.kind) for entry in self.history if not entry.skipped))
