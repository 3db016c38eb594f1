"""Checks of the machine: cores, memory, resource limits, huge pages, kernel settings, clock, locked memory."""

import ctypes
import os
import resource
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from moonpool.cluster_view.formatting import size_text
from moonpool.doctor.checks import ONE_AT_A_TIME, Check, Level, Needs, Purpose, Verdict, optional, read_text
from moonpool.supervision.threads import usable_cores

GIB: Final = 1 << 30
# A cluster of the bundled model by default: 5 processes of 0.1 to 0.4 GiB, two engines' KV, and a pool of up to 1 GiB.
LEAST_MEMORY_NBYTES: Final = 2 * GIB
GOOD_MEMORY_NBYTES: Final = 4 * GIB
LEAST_FILES: Final = 512
GOOD_FILES: Final = 4096
_STA_UNSYNC: Final = 0x40
_TIMEX_NBYTES: Final = 512  # more than struct timex has on any platform
_TIMEX_MAXERROR, _TIMEX_STATUS = 24, 40  # offsets on 64-bit Linux
_UNLIMITED: Final = 1 << 60  # cgroup v1 reports "no limit" as a number near 2**63


@dataclass(frozen=True)
class Cores:
    """CPU cores; `usable` excludes those that the affinity or the container's quota denies."""

    total: int
    usable: int
    load: float  # runnable threads over the last minute


def observe_cores() -> Cores:
    return Cores(os.cpu_count() or 1, usable_cores(), os.getloadavg()[0])


def judge_cores(seen: Cores, needs: Needs) -> Verdict:
    found = f"{seen.usable} usable of {seen.total}, load {seen.load:.1f}"
    if seen.usable < 2:
        return Level.WARN, found, "Use 2 cores or more: on a single core, prefill and decode run alternately."
    if seen.load > seen.usable:
        return Level.WARN, found, "Other programs use the cores: stop them, or expect higher latencies."
    return Level.OK, found, ""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; `limit` is the container's (0: none), and `used` counts towards it."""

    total: int
    available: int
    limit: int
    used: int
    swap_used: int

    @property
    def usable(self) -> int:
        return min(self.available, self.limit - self.used) if self.limit else self.available


def observe_memory() -> Memory:
    info = meminfo(Path("/proc/meminfo").read_text())
    limit, used = _cgroup_memory(Path("/sys/fs/cgroup"))
    swap_used = info.get("SwapTotal", 0) - info.get("SwapFree", 0)
    return Memory(info["MemTotal"], info["MemAvailable"], limit, used, swap_used)


def judge_memory(seen: Memory, needs: Needs) -> Verdict:
    limit = f"; this container's limit is {size_text(seen.limit)}" if seen.limit else ""
    found = f"{size_text(max(0, seen.usable))} free of {size_text(seen.total)}{limit}"
    advice = "Free memory, raise the container's limit, or reduce --pool-bytes and --capacity-tokens."
    if seen.usable < LEAST_MEMORY_NBYTES:
        return Level.FAIL, found, advice
    if seen.usable < GOOD_MEMORY_NBYTES:
        return Level.WARN, found, advice
    if seen.swap_used > seen.total // 20:
        swapped = f"{found}; {size_text(seen.swap_used)} swapped out"
        return (
            Level.WARN,
            swapped,
            "Turn swap off: a node whose memory is swapped out responds late and is considered lost.",
        )
    return Level.OK, found, ""


def meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo: sizes in bytes, counts unchanged."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _cgroup_memory(root: Path) -> tuple[int, int]:
    """Return the container's memory limit (0: none) and usage in bytes, from cgroup v2 or v1."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = int((root / limit_name).read_text()), int((root / used_name).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return (limit, used) if limit < _UNLIMITED else (0, 0)
    return 0, 0


@dataclass(frozen=True)
class FileLimits:
    """Limits on this process's open files; -1 is unlimited."""

    files: int
    files_hard: int


def observe_limits() -> FileLimits:
    def limit(which: int, index: int) -> int:
        value = resource.getrlimit(which)[index]
        return -1 if value == resource.RLIM_INFINITY else value

    return FileLimits(limit(resource.RLIMIT_NOFILE, 0), limit(resource.RLIMIT_NOFILE, 1))


def judge_files(seen: FileLimits, needs: Needs) -> Verdict:
    found = "unlimited" if seen.files == -1 else f"{seen.files} (hard limit {_count_text(seen.files_hard)})"
    advice = f"Raise the limit (ulimit -n {GOOD_FILES}): each client connection is an open file."
    if 0 <= seen.files < LEAST_FILES:
        return Level.FAIL, found, advice
    return (Level.NOTE, found, advice) if 0 <= seen.files < GOOD_FILES else (Level.OK, found, "")


def _count_text(count: int) -> str:
    return "unlimited" if count == -1 else str(count)


@dataclass(frozen=True)
class HugePages:
    """Huge pages: reserved, and transparent for private memory ("always", "madvise" or "never").

    `joins`: the kernel can collapse shared memory into huge pages on request.
    """

    reserved: int
    free: int
    transparent: str
    joins: bool


def observe_huge_pages() -> HugePages:
    with ONE_AT_A_TIME:
        from messenger.mapping import can_collapse
    info = meminfo(Path("/proc/meminfo").read_text())
    text = read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = text[text.find("[") + 1 : text.find("]")] if "[" in text else "unknown"
    return HugePages(info.get("HugePages_Total", 0), info.get("HugePages_Free", 0), chosen, can_collapse())


def judge_huge_pages(seen: HugePages, needs: Needs) -> Verdict:
    found = f"{seen.reserved} reserved, {seen.free} free; transparent: {seen.transparent}, "
    found += "shared memory on request" if seen.joins else "not for shared memory"
    if seen.reserved and seen.free == seen.reserved:
        advice = (
            "None is in use: a pool uses them only if all its memory fits. Release unused ones (vm.nr_hugepages=0)."
        )
        return Level.NOTE, found, advice
    if not seen.joins and not seen.reserved:
        advice = "Small pages slow down copies of KV: use Linux 6.1 or newer, or reserve huge pages (vm.nr_hugepages)."
        return Level.NOTE, found, advice
    return Level.OK, found, ""


@dataclass(frozen=True)
class Kernel:
    """Kernel settings for memory and connections; -1 for one that cannot be read."""

    release: str
    overcommit: int
    swappiness: int
    max_map_count: int
    somaxconn: int


def observe_kernel() -> Kernel:
    def number(path: str) -> int:
        text = read_text(Path("/proc/sys") / path)
        return int(text) if text.isdigit() else -1

    return Kernel(
        os.uname().release,
        number("vm/overcommit_memory"),
        number("vm/swappiness"),
        number("vm/max_map_count"),
        number("net/core/somaxconn"),
    )


def judge_kernel(seen: Kernel, needs: Needs) -> Verdict:
    if seen.overcommit == 2:
        found = f"Linux {seen.release}; memory overcommit is off (vm.overcommit_memory=2)"
        return (
            Level.WARN,
            found,
            "Set vm.overcommit_memory=0: a pool reserves its whole arena and commits memory as it fills.",
        )
    if 0 <= seen.somaxconn < 1024:
        found = f"Linux {seen.release}; net.core.somaxconn is {seen.somaxconn}"
        return Level.NOTE, found, "Set net.core.somaxconn=4096, to queue bursts of new connections."
    return Level.OK, f"Linux {seen.release}", ""


@dataclass(frozen=True)
class KernelClock:
    """State of the kernel's clock. `is_synchronised` is None if unknown."""

    is_synchronised: bool | None
    max_error_s: float


def observe_clock() -> KernelClock:
    buffer = ctypes.create_string_buffer(_TIMEX_NBYTES)  # modes is 0: read only
    if ctypes.CDLL(None).adjtimex(buffer) < 0:
        return KernelClock(None, 0.0)
    (status,) = struct.unpack_from("<i", buffer, _TIMEX_STATUS)
    (microseconds,) = struct.unpack_from("<q", buffer, _TIMEX_MAXERROR)
    return KernelClock(not status & _STA_UNSYNC, microseconds / 1e6)


def judge_clock(seen: KernelClock, needs: Needs) -> Verdict:
    if seen.is_synchronised is None:
        return Level.NOTE, "unknown", ""
    if not seen.is_synchronised:
        advice = "Run chrony or systemd-timesyncd on every host, so that timestamps in their logs are comparable."
        return Level.NOTE, "not synchronised", advice
    return Level.OK, f"synchronised, within {seen.max_error_s:.3g} s", ""


CHECKS: Final = (
    Check("cores", observe_cores, judge_cores),
    Check("memory", observe_memory, judge_memory),
    Check("open files", observe_limits, judge_files),
    Check("huge pages", observe_huge_pages, judge_huge_pages),
    Check("kernel", observe_kernel, judge_kernel),
    Check("clock", observe_clock, judge_clock),
)


DEFAULT_REGISTERED_NBYTES: Final = 2 << 30
"""The default memory of a pool node, plus the same amount for a worker's cache."""
_CAP_IPC_LOCK: Final = 14
_WHOLE_ID_RANGE: Final = ["0", "0", "4294967295"]


class HostEnvironment(StrEnum):
    """Environment that started this process and sets its limits."""

    KUBERNETES = "Kubernetes"
    CONTAINER = "a container"
    SYSTEMD = "a systemd unit"
    SHELL = "a shell"


@dataclass(frozen=True)
class Locking:
    """Limits on locked memory in bytes, -1 unlimited, and the bytes that RDMA is to register.

    `may_exceed`: the process has the host's CAP_IPC_LOCK, which lifts the limit.
    """

    soft: int
    hard: int
    may_exceed: bool
    surroundings: HostEnvironment
    registered: int


_CURES: Final = {
    HostEnvironment.KUBERNETES: (
        "give the pod securityContext.capabilities.add: [IPC_LOCK], or set LimitMEMLOCK=infinity for the container "
        "runtime of the Kubernetes nodes (containerd.service)"
    ),
    HostEnvironment.CONTAINER: "start the container with --ulimit memlock=-1 (or --cap-add IPC_LOCK)",
    HostEnvironment.SYSTEMD: "set LimitMEMLOCK=infinity in the unit (systemctl edit), then restart it",
    HostEnvironment.SHELL: (
        "run ulimit -l unlimited if the hard limit allows it, otherwise set 'memlock unlimited' in "
        "/etc/security/limits.conf and log in again"
    ),
}


def observe_locking(registered: int, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Locking:
    soft, hard = (
        -1 if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return Locking(soft, hard, _may_exceed(root), surroundings(root, environ), registered)


def judge_locking(seen: Locking, needs: Needs) -> Verdict:
    if seen.soft == -1:
        return Level.OK, "unlimited", ""
    limit = f"{size_text(seen.soft)} (hard limit {'unlimited' if seen.hard == -1 else size_text(seen.hard)})"
    if seen.may_exceed:
        return Level.OK, f"{limit}, which CAP_IPC_LOCK overrides", ""
    needed = size_text(seen.registered)
    if seen.soft >= seen.registered:
        return Level.OK, f"{limit}, enough to register {needed}", ""
    advice = f"RDMA locks the memory that it registers, here {needed}: {_CURES[seen.surroundings]}."
    return optional(needs, Purpose.RDMA), f"{limit}, in {seen.surroundings} without IPC_LOCK", advice


def surroundings(root: Path, environ: Mapping[str, str]) -> HostEnvironment:
    """Detect the environment by the traces of container runtimes and systemd."""
    if "KUBERNETES_SERVICE_HOST" in environ or (root / "var/run/secrets/kubernetes.io").is_dir():
        return HostEnvironment.KUBERNETES
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists() or "container" in environ:
        return HostEnvironment.CONTAINER
    return HostEnvironment.SYSTEMD if "INVOCATION_ID" in environ else HostEnvironment.SHELL


def _may_exceed(root: Path) -> bool:
    """Return True if the process has CAP_IPC_LOCK in the host's user namespace, the only one that the kernel checks."""
    for line in read_text(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            has_capability = bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
            return has_capability and read_text(root / "proc/self/uid_map").split() == _WHOLE_ID_RANGE
    return False


def checks(registered: int) -> tuple[Check, ...]:
    """Return the check of locked memory for `registered` bytes of RDMA memory."""
    return (Check("locked memory", lambda: observe_locking(registered), judge_locking),)
