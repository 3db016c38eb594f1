"""Configuration of one pool node, validated where it is made."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.errors import PoolConfigError
from kvpool.policy import PoolLimits
from messenger import MessengerConfig
from messenger.memory import HugePages

_MIN_ARENA_NBYTES = 64 << 10
_MIN_SSD_NBYTES = 1 << 20
_MAX_SLAB_NBYTES = 1 << 20
_PAGE_NBYTES = 4096


@dataclass(frozen=True)
class PoolNodeConfig:
    """Raises PoolConfigError for values that cannot work."""

    node_id: str
    """Name of the node in the cluster."""
    listen: str
    """gRPC target to serve at: "unix:/dir/name.sock" or "host:port"."""
    advertise: str = ""
    """gRPC target that others dial, port 0 being the port listened at; empty: `listen`."""
    conductor_targets: tuple[str, ...] = ()
    """The conductors to join, all of them; empty: none."""
    arena_bytes: int = 256 << 20
    """Memory for blocks. Committed by the kernel as it is used, not at the start."""
    hugepages: HugePages = "auto"
    """Whether the arena is made of huge pages: auto as far as there are any, on only of such."""
    policy: str = "moonpool"
    """Who leaves a full tier first: a name that `kvpool.policy.eviction` knows."""
    quotas: Mapping[bytes, float] = field(default_factory=dict)
    """Largest share of memory that the blocks of one namespace take; others take what is left."""
    ssd_dir: Path | None = None
    """Folder on an SSD: the node keeps blocks in `ssd_folder`, also over its restarts. None: no SSD tier."""
    ssd_bytes: int = 0
    """Room for blocks there, taken at the first start."""
    ssd_depth: int = 16
    """Reads and writes in flight on the SSD."""
    host_id: str = ""
    """Nodes of equal host share memory; empty: the messenger's."""
    messenger: MessengerConfig = field(default_factory=MessengerConfig)
    """How bytes of blocks are read and written."""
    operation_s: float = 30.0
    """Longest deadline of a read: how long slots are kept after a lease on them expired."""
    max_lease_s: float = 600.0
    """Longer leases and puts are cut to this."""
    sweep_s: float = 0.2
    """How often overdue puts and leases are ended."""
    report_s: float = 1.0
    """How often load and counters are reported to the conductor."""
    heartbeat_s: float = 1.0
    """How often an event stream without news says so."""
    max_copies: int = 2
    """Copies from other pool nodes that run at a time; others wait."""

    def __post_init__(self) -> None:
        if not self.node_id or not self.listen:
            raise PoolConfigError("a pool node needs a node_id and a listen target")
        for name in ("operation_s", "max_lease_s", "sweep_s", "report_s", "heartbeat_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise PoolConfigError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        if self.max_copies < 1:
            raise PoolConfigError(f"max_copies must be at least 1, not {self.max_copies}")
        if self.arena_bytes < _MIN_ARENA_NBYTES:
            raise PoolConfigError(f"arena_bytes must be at least {_MIN_ARENA_NBYTES}, not {self.arena_bytes}")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.arena_bytes > memory:
            raise PoolConfigError(f"arena_bytes is {self.arena_bytes}, but this machine has {memory} bytes of memory")

        if not all(0 < share <= 1 for share in self.quotas.values()):
            raise PoolConfigError(f"quotas must be shares above 0 and at most 1, not {sorted(self.quotas.values())}")
        self._check_ssd()

    @property
    def ssd_folder(self) -> Path | None:
        """The node's own folder; it is made where it is missing, `ssd_dir` is not."""
        return None if self.ssd_dir is None else self.ssd_dir / self.node_id

    @property
    def limits(self) -> PoolLimits:
        """What the policy needs of this."""
        return PoolLimits(
            arena_nbytes=self.arena_bytes,
            slab_nbytes=_slab_nbytes(self.arena_bytes),
            operation_ns=int(self.operation_s * 1e9),
            max_lease_ns=int(self.max_lease_s * 1e9),
            policy=self.policy,
            quotas=self.quotas,
            ssd_nbytes=self.ssd_bytes // _PAGE_NBYTES * _PAGE_NBYTES,
            ssd_slab_nbytes=_slab_nbytes(self.ssd_bytes),
        )

    def _check_ssd(self) -> None:
        if (self.ssd_dir is None) != (self.ssd_bytes == 0):
            raise PoolConfigError(f"ssd_dir is {self.ssd_dir} and ssd_bytes is {self.ssd_bytes}: one needs the other")
        if self.ssd_bytes and self.ssd_bytes < _MIN_SSD_NBYTES:
            raise PoolConfigError(f"ssd_bytes must be at least {_MIN_SSD_NBYTES}, not {self.ssd_bytes}")
        if self.ssd_depth < 1:
            raise PoolConfigError(f"ssd_depth must be at least 1, not {self.ssd_depth}")
        if self.ssd_dir is not None and (self.node_id in (".", "..") or "/" in self.node_id):
            raise PoolConfigError(f"node_id {self.node_id!r} cannot name the node's folder in {self.ssd_dir}")


def _slab_nbytes(nbytes: int) -> int:
    """Unit of a tier in which sizes of slots get their share: a 64th of it, at most 1 MiB, whole pages."""
    return max(min(nbytes // 64, _MAX_SLAB_NBYTES) // _PAGE_NBYTES * _PAGE_NBYTES, _PAGE_NBYTES)
