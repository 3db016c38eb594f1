"""How much memory this process may lock: RDMA pins all that it registers, and cannot register more."""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from moonpool.doctor.finding import Check, Level, Needs, Purpose, Verdict, optional, size_text

DEFAULT_REGISTERED_NBYTES: Final = 2 << 30
"""A pool node's memory by default, and as much again for a worker's cache."""
_CAP_IPC_LOCK: Final = 14
_WHOLE_ID_RANGE: Final = ["0", "0", "4294967295"]


class Surroundings(StrEnum):
    """What started this process: decides who sets its limits."""

    KUBERNETES = "Kubernetes"
    CONTAINER = "a container"
    SYSTEMD = "a systemd unit"
    SHELL = "a shell"


@dataclass(frozen=True)
class Locking:
    """`soft` and `hard` limits in bytes, -1 unlimited. `may_exceed`: with CAP_IPC_LOCK of the host the kernel counts
    nothing. `registered`: bytes that are to be registered."""

    soft: int
    hard: int
    may_exceed: bool
    surroundings: Surroundings
    registered: int


_CURES: Final = {
    Surroundings.KUBERNETES: (
        "give the pod securityContext.capabilities.add: [IPC_LOCK], or the nodes' container runtime "
        "LimitMEMLOCK=infinity (containerd.service)"
    ),
    Surroundings.CONTAINER: "start the container with --ulimit memlock=-1 (or --cap-add IPC_LOCK)",
    Surroundings.SYSTEMD: "set LimitMEMLOCK=infinity in the unit (systemctl edit), then restart it",
    Surroundings.SHELL: (
        "ulimit -l unlimited where the hard limit allows it, else 'memlock unlimited' in /etc/security/limits.conf and "
        "a new login"
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
    wanted = size_text(seen.registered)
    if seen.soft >= seen.registered:
        return Level.OK, f"{limit}, enough to register {wanted}", ""
    advice = f"RDMA locks what it registers, here {wanted}: {_CURES[seen.surroundings]}."
    return optional(needs, Purpose.RDMA), f"{limit}, in {seen.surroundings} without IPC_LOCK", advice


def surroundings(root: Path, environ: Mapping[str, str]) -> Surroundings:
    """By the marks that container runtimes and systemd leave."""
    if "KUBERNETES_SERVICE_HOST" in environ or (root / "var/run/secrets/kubernetes.io").is_dir():
        return Surroundings.KUBERNETES
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists() or "container" in environ:
        return Surroundings.CONTAINER
    return Surroundings.SYSTEMD if "INVOCATION_ID" in environ else Surroundings.SHELL


def _may_exceed(root: Path) -> bool:
    """The kernel asks for the capability in the host's user namespace: in one of a container it counts for nothing."""
    for line in _read(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            has_capability = bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
            return has_capability and _read(root / "proc/self/uid_map").split() == _WHOLE_ID_RANGE
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def checks(registered: int) -> tuple[Check, ...]:
    """With the bytes that are to be registered."""
    return (Check("locked memory", lambda: observe_locking(registered), judge_locking),)
