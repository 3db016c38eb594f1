"""One opened device: limits, protection domain, shared receive queue and registrations.

Locks: `_lock` guards registrations, shares and users, and is held while memory is registered, which may take long;
`_posting` guards the shared receive queue alone, so that connections never wait for a registration.

Lifetime: a device is freed by `close`, or, if connections still have shares then, when the last one leaves.
"""

import contextlib
import errno
import itertools
import logging
import resource
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from messenger.counters import Counters
from messenger.errors import RdmaUnavailable
from messenger.memory import AnyRegion, GpuRegion
from messenger.rdma.memory import SHARE
from messenger.rdma.policy.credits import InboxFull, InboxShares
from messenger.rdma.registered import Registered
from messenger.rdma.verbs import abi

_RECEIVES = 8192
_CHAIN = 64
_IN_USE: set["Device"] = set()
"""Devices not closed yet, kept alive: the garbage collector frees in any order, which crashes libibverbs."""
REGION_ACCESS = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_MW_BIND


@dataclass(frozen=True)
class DeviceLimits:
    max_sge: int
    max_qp_wr: int
    max_cqe: int
    max_reads: int


class Device:
    """An opened device, until `close`. Safe for any thread."""

    def __init__(self, name: str, counters: Counters, silence_s: float) -> None:
        """Open the device. A connection drops a lane of it after `silence_s` without a completion.

        Raises RdmaUnavailable.
        """
        from pyverbs.device import Context
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsError

        self.name = name
        self.silence_s = silence_s
        self._counters = counters
        self._lock = threading.Lock()
        self._posting = threading.Lock()
        self._registered: dict[int, Registered] = {}
        try:
            self.context: Any = Context(name=name)
            attributes = self.context.query_device()
            if not attributes.device_cap_flags & abi.CAN_WINDOW_2:
                raise RdmaUnavailable(f"{name} has no memory windows of type 2, which are needed to revoke keys")
            self.limits = DeviceLimits(
                max_sge=min(attributes.max_sge, 30),
                max_qp_wr=attributes.max_qp_wr,
                max_cqe=attributes.max_cqe,
                max_reads=max(1, min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom, 16)),
            )
            self.pd: Any = PD(self.context)
            self._receives = min(_RECEIVES, attributes.max_srq_wr) // _CHAIN * _CHAIN
            self.srq: Any = self._shared_receive_queue()
        except PyverbsError as error:
            raise RdmaUnavailable(f"cannot use {name}: {error}{_memlock_hint(error)}") from error
        self._shares = InboxShares(self._receives, SHARE)
        self._users: dict[int, object] = {}
        _IN_USE.add(self)
        self._next_connection = 0
        self._is_closing = False

    def port_mtu(self, port: int) -> int:
        """Return the greatest path MTU of a port, in bytes."""
        return 128 << int(self.context.query_port(port).active_mtu)

    def join(self, user: object) -> int:
        """Allocate a share of the receive requests to a new connection. Returns the connection's number.

        `user` is kept alive until `leave`. Raises OSError if all shares are in use.
        """
        with self._lock:
            if self._is_closing:
                raise OSError(errno.ESHUTDOWN, f"{self.name} was closed")
            self._next_connection += 1
            try:
                self._shares.join(self._next_connection)
            except InboxFull as error:
                raise OSError(errno.ENOBUFS, str(error)) from error
            self._users[self._next_connection] = user
            return self._next_connection

    def leave(self, connection: int) -> None:
        """Release the share of a connection whose queue pairs are destroyed."""
        with self._lock:
            self._shares.leave(connection)
            self._users.pop(connection, None)
            self._close_if_unused()

    def receive_again(self, count: int) -> None:
        """Post `count` receive requests, as many as were used."""
        with self._posting:
            for _ in range(count):
                self.srq.post_recv(self._receive)

    def register(self, region: AnyRegion) -> Registered:
        """Return the region's registration, created at its first use; for GPU memory, the one passed to `keep`.

        It does not grant access to peers, which use windows. It is kept until the region is deregistered or gone, and
        as long as it is referenced. Raises OSError.
        """
        with self._lock:
            registered = self._registered.get(region.region_id)
            if registered is None:
                if isinstance(region, GpuRegion):
                    raise OSError(errno.ENOENT, f"region {region.region_id} is not registered with {self.name}")
                started_s = time.monotonic()
                region.memory.try_commit(0, region.nbytes)  # before pinning: pinned pages cannot be joined
                mr = self.register_memory(region.address, region.nbytes, REGION_ACCESS)
                registered = self._registered[region.region_id] = Registered(mr, region.address)
                # For registrations made after `deregister`, by operations that were in flight then. The callback takes
                # no lock, because the garbage collector may run on a thread that holds it.
                weakref.finalize(region, self._registered.pop, region.region_id, None).atexit = False
                self._count(region, time.monotonic() - started_s)
            return registered

    def keep(self, region: GpuRegion, registered: Registered, took_s: float) -> None:
        """Store the registration of GPU memory, which took `took_s` seconds."""
        with self._lock:
            self._registered[region.region_id] = registered
            self._count(region, took_s)

    def settle(self, region: AnyRegion) -> None:
        """Run `Registered.settle`. Raises GpuMemoryUnsupported, or OSError if the region is unknown."""
        if isinstance(region, GpuRegion):
            self.register(region).settle()

    def _count(self, region: AnyRegion, took_s: float) -> None:
        self._counters.add("rdma_registrations")
        self._counters.add("rdma_registered_bytes", region.nbytes)
        self._counters.add("rdma_registration_us", int(took_s * 1e6))

    def deregister(self, region: AnyRegion) -> None:
        """Drop the registration. The memory is unpinned when no operation refers to it any more."""
        with self._lock:
            self._registered.pop(region.region_id, None)

    def register_memory(self, address: int, nbytes: int, access: int) -> Any:
        """Pin memory of this process. Raises OSError."""
        from pyverbs.mr import MR

        with self.naming(f"a registration of {nbytes} bytes"):
            return MR(self.pd, nbytes, access, address=address)

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Convert errors of pyverbs into OSErrors that name the resource `what`."""
        from pyverbs.pyverbs_error import PyverbsError

        try:
            yield
        except PyverbsError as error:
            code = getattr(error, "error_code", 0) or errno.EIO
            raise OSError(code, f"{self.name} cannot provide {what}: {error}{_memlock_hint(error)}") from error

    def close(self) -> None:
        """Close now or, since a handler that runs on a connection may close the messenger, with the last connection."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._is_closing or self._shares.num_members:
            return
        for registered in list(self._registered.values()):
            registered.close()
        self._registered.clear()
        self.srq.close()
        self._receive.close()
        self.pd.close()
        self.context.close()
        _IN_USE.discard(self)

    def _shared_receive_queue(self) -> Any:
        from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
        from pyverbs.wr import SGE, RecvWR

        srq = SRQ(self.pd, SrqInitAttr(SrqAttr(max_wr=self._receives, max_sge=1)))
        # Frames arrive by writes into the inboxes: receive requests only report them and have no memory.
        place = [SGE(0, 0, 0)]
        self._receive = RecvWR(wr_id=abi.RECEIVE_ID, num_sge=1, sg=place)
        chain = [RecvWR(wr_id=abi.RECEIVE_ID, num_sge=1, sg=place) for _ in range(_CHAIN)]
        for request, following in itertools.pairwise(chain):
            request.next_wr = following
        for _ in range(self._receives // _CHAIN):
            srq.post_recv(chain[0])
        for request in chain:
            request.close()
        return srq


def require_pyverbs() -> None:
    """Raise RdmaUnavailable, naming what to install, if pyverbs is missing."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        import pyverbs.device  # noqa: F401
    except ImportError as error:
        raise RdmaUnavailable(
            f"rdma needs pyverbs, which cannot be imported ({error}): install python3-pyverbs of the distribution, for "
            "the Python that runs Moonpool, or rdma-core's sources from PyPI (pyverbs)"
        ) from error
    finally:
        # Undo: importing pyverbs configures the process's logging.
        root.handlers[:] = handlers
        root.setLevel(level)


def _memlock_hint(error: Exception) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if getattr(error, "error_code", 0) != errno.ENOMEM or soft == resource.RLIM_INFINITY:
        return ""
    return (
        f"; this process may lock {soft >> 10} KiB of memory: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, "
        "or the container's memlock)"
    )
