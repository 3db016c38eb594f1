"""Configuration of one pool node."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.errors import PoolConfigError
from kvpool.policy import PoolLimits
from messenger import MessengerConfig
from settings.kvpool import PoolSettings
from settings.node import HostSettings, ListenSettings, NodeSettings

_MAX_SLAB_NBYTES = 1 << 20
_PAGE_NBYTES = 4096


@dataclass(frozen=True)
class PoolNodeConfig:
    """Configuration of one pool node. Raises PoolConfigError."""

    node: NodeSettings
    """Identity, with the node id."""
    listen: ListenSettings
    """Address of the gRPC server."""
    host: HostSettings = field(default_factory=HostSettings)
    """Id of the host, and the address that others dial."""
    conductor_targets: tuple[str, ...] = ()
    """gRPC targets of all conductors to join; empty: none."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    """Memory, SSD and eviction."""
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
    """How often an idle event stream sends a heartbeat."""
    max_incoming_copies: int = 2
    """Copies from other pool nodes that run at a time; others wait."""
    files_root: Path = Path("/")
    """Folder with the proc and sys from which an elastic pool reads memory and its pressure."""

    def __post_init__(self) -> None:
        if not self.node_id or not self.listen.listen:
            raise PoolConfigError("a pool node needs a node_id and a listen target")
        for name in ("operation_s", "max_lease_s", "sweep_s", "report_s", "heartbeat_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise PoolConfigError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        if self.max_incoming_copies < 1:
            raise PoolConfigError(f"max_incoming_copies must be at least 1, got {self.max_incoming_copies}")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.pool.pool_bytes > memory:
            raise PoolConfigError(
                f"pool_bytes is {self.pool.pool_bytes}, but this machine has {memory} bytes of memory"
            )
        ssd_dir = self.pool.pool_ssd_dir
        if ssd_dir is not None and (self.node_id in (".", "..") or "/" in self.node_id):
            raise PoolConfigError(f"node_id {self.node_id!r} cannot name the node's folder in {ssd_dir}")

    @property
    def node_id(self) -> str:
        """Name in the cluster."""
        return self.node.node_id

    @property
    def ssd_folder(self) -> Path | None:
        """The node's own folder below `pool_ssd_dir`, created if missing; None without an SSD tier."""
        ssd_dir = self.pool.pool_ssd_dir
        return None if ssd_dir is None else ssd_dir / self.node_id

    @property
    def limits(self) -> PoolLimits:
        """The limits that the policy needs."""
        return PoolLimits(
            arena_nbytes=self.pool.pool_bytes,
            slab_nbytes=_slab_nbytes(self.pool.pool_bytes),
            least_nbytes=self.pool.pool_min_bytes if self.pool.is_elastic else None,
            operation_ns=int(self.operation_s * 1e9),
            max_lease_ns=int(self.max_lease_s * 1e9),
            policy=self.pool.pool_policy,
            quotas=self.pool.quotas,
            retained_share=self.pool.pool_retained_share,
            retained_tenant_share=self.pool.pool_retained_tenant_share,
            ssd_nbytes=self.pool.ssd_bytes // _PAGE_NBYTES * _PAGE_NBYTES,
            ssd_slab_nbytes=_slab_nbytes(self.pool.ssd_bytes),
        )


def _slab_nbytes(nbytes: int) -> int:
    """Return the slab unit of a tier of `nbytes`: a 64th of it in whole pages, at least 4 KiB and at most 1 MiB."""
    return max(min(nbytes // 64, _MAX_SLAB_NBYTES) // _PAGE_NBYTES * _PAGE_NBYTES, _PAGE_NBYTES)
