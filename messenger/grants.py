"""The owner's table of regions and grants: the rights of peers, accesses in progress, and the fence of a revoke.

Fence: every access by a peer happens in this process between entering and leaving it (on shm, too, the owner itself
copies what a peer writes). `revoke` first makes later accesses fail, then waits for those under way; after a grace
period it cuts their connections, which ends them. A peer's hardware touches memory only through windows, which revoke
closes. When revoke returns, nothing can change memory under the key, whatever state the peer is in.

Lock: `_changed` guards the tables, each grant's `movers` and `windows`, the grant page and the slots of compiled loops.
It is notified when an access ends. Accesses of compiled loops take no lock: see `messenger.native.grant_slots` for
their protocol with revoke.

Lifetime of a grant:

    grant   -> _grants, and shown in slots and page: accesses may enter
    revoke  -> _leaving, hidden from slots and page: no access enters; those inside (movers) leave or are cut
            -> windows closed, without the lock
            -> forgotten; a second revoke of the same key waits until then, too
"""

import secrets
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from messenger.link import Cuttable
from messenger.memory import (
    AnyRegion,
    GpuMemory,
    GpuRegion,
    Region,
    RemoteKey,
    SharedMemory,
    UnitSection,
    unreachable_gpu_error,
)
from messenger.shm.grant_page import GrantPage
from messenger.slices import Rows, within
from rpc.errors import InvalidArgument

if TYPE_CHECKING:
    from messenger.native.grant_slots import GrantSlots


class AccessDenied(Exception):
    """A peer's access is refused; the message is sent to the peer."""


class AccessWindow(Protocol):
    """Opening through which a peer's hardware can touch memory."""

    @property
    def is_closed(self) -> bool: ...
    def close(self) -> None:
        """Close the window: when this returns, no access passes. Idempotent; does not wait for the peer."""


@dataclass(eq=False)
class _Grant:
    """A key, its region, the accesses in progress (`movers`) and the open windows."""

    number: int
    key: RemoteKey
    region: AnyRegion
    movers: list[Cuttable] = field(default_factory=list)
    windows: list[AccessWindow] = field(default_factory=list)


class Access:
    """One transfer inside the fence, as a context manager that leaves it."""

    def __init__(self, table: "GrantTable", grant: _Grant, mover: Cuttable) -> None:
        self.region = grant.region
        self.key = grant.key
        self._table = table
        self._grant = grant
        self._mover = mover

    def keep(self, window: AccessWindow) -> None:
        """Register a window to be closed when the key is revoked."""
        self._table._keep(self._grant, window)

    def writing(self, rows: Rows) -> AbstractContextManager[None]:
        """Return a context manager around a write to rows [n, 2], after which their units have no digests."""
        units = self.region.units if isinstance(self.region, Region) else None
        return nullcontext() if units is None else units.spoiling(rows)

    def __enter__(self) -> "Access":
        return self

    def __exit__(self, *_: object) -> None:
        self._table._leave(self._grant, self._mover)


class GrantTable:
    """Regions and grants of one messenger. Safe to use from any thread; see the module's map of locks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._regions: dict[int, AnyRegion] = {}
        self._grants: dict[int, _Grant] = {}
        self._leaving: list[_Grant] = []
        self._next_region_id = 1
        self._next_number = 1
        self._slots: GrantSlots | None = None
        self._page: GrantPage | None = None

    def slots(self) -> "GrantSlots":
        """Return the grants' table for compiled loops, kept up to date from now on; imports numba."""
        from messenger.native.grant_slots import GrantSlots

        with self._changed:
            if self._slots is None:
                self._slots = GrantSlots()
                for grant in self._grants.values():
                    self._place(grant)
            return self._slots

    def page(self) -> GrantPage:
        """Return the grant page for readers of this host, kept up to date until `close`."""
        with self._changed:
            if self._page is None:
                self._page = GrantPage("messenger")
                for grant in self._grants.values():
                    self._show(grant)
            return self._page

    def close(self) -> None:
        """Withdraw all grants from the grant page."""
        with self._changed:
            if self._page is not None:
                self._page.close()

    def register(self, memory: SharedMemory, units: Sequence[UnitSection] = ()) -> Region:
        """Register host memory, with digests of its units if it has any."""
        array, digests = memory.array, None
        if units:
            from messenger.native.unit_digests import UnitDigests

            digests = UnitDigests(units, memory.nbytes)
        with self._changed:
            region = Region(self._take_region_id(), memory, array, digests)
            self._regions[region.region_id] = region
        return region

    def register_gpu(self, memory: GpuMemory) -> GpuRegion:
        """Register GPU memory."""
        with self._changed:
            region = GpuRegion(self._take_region_id(), memory)
            self._regions[region.region_id] = region
        return region

    def deregister(self, region: AnyRegion, grace_s: float) -> None:
        """Revoke the region's grants and remove it. Unknown regions are ignored."""
        with self._changed:
            self._regions.pop(region.region_id, None)
            keys = [grant.key for grant in self._grants.values() if grant.region is region]
        for key in keys:
            self.revoke(key, grace_s)

    def grant(self, region: AnyRegion, offset: int, nbytes: int, *, read: bool, write: bool) -> RemoteKey:
        """Return a new key for bytes [offset, offset + nbytes) of the region. Raises InvalidArgument."""
        if not (read or write):
            raise InvalidArgument("a grant must have a right: read, write or both")
        if offset < 0 or nbytes <= 0 or offset + nbytes > region.nbytes:
            raise InvalidArgument(f"window [{offset}, {offset + nbytes}) is not in a region of {region.nbytes} bytes")
        with self._changed:
            self.require(region)
            token = secrets.randbits(64)
            while token in self._grants:
                token = secrets.randbits(64)
            key = RemoteKey(region.region_id, token, offset, nbytes, read, write)
            grant = self._grants[token] = _Grant(self._next_number, key, region)
            self._next_number += 1
            self._place(grant)
            self._show(grant)
        return key

    def revoke(self, key: RemoteKey, grace_s: float) -> None:
        """Revoke the key; returns when nothing under it can touch memory, also if it is being revoked already."""
        with self._changed:
            grant = self._grants.pop(key.token, None)
            if grant is not None:
                self._leaving.append(grant)
                if self._slots is not None:
                    self._slots.remove(grant.number, key.token)
                if self._page is not None and not self._page.closed:
                    self._page.withdraw(grant.key)
            else:
                grant = next((one for one in self._leaving if one.key.token == key.token), None)
            if grant is None:
                return
            if self._movers(grant):
                self._wait_for_movers(grant, grace_s)
        # No window can be opened any more: that is done inside an access.
        for window in grant.windows:
            window.close()
        with self._changed:
            if grant in self._leaving:
                self._leaving.remove(grant)

    def enter(
        self, region_id: int, token: int, rows: Rows, *, write: bool, mover: Cuttable, reaches_gpus: bool = False
    ) -> Access:
        """Begin an access to rows, int64 [n, 2] of (offset, nbytes). Cutting `mover` ends it. Raises AccessDenied."""
        with self._changed:
            grant = self._find(region_id, token)
            key = grant.key
            if not (key.write if write else key.read):
                raise AccessDenied(f"the key does not give the right to {'write' if write else 'read'}")
            if not within(rows[:, 0], rows[:, 1], key.offset, key.offset + key.nbytes):
                raise AccessDenied(f"out of bounds: the key's window is [{key.offset}, {key.offset + key.nbytes})")
            if not reaches_gpus and isinstance(grant.region, GpuRegion):
                raise AccessDenied(unreachable_gpu_error(grant.region))
            grant.movers.append(mover)
        return Access(self, grant, mover)

    def expose(self, region_id: int, token: int, *, mover: Cuttable) -> Access:
        """Begin an access that opens a window for a peer's hardware. Raises AccessDenied.

        Nothing records what is written through a window, so that units have no digests any more.
        """
        with self._changed:
            grant = self._find(region_id, token)
            if isinstance(grant.region, Region) and grant.region.units is not None and grant.key.write:
                grant.region.units.distrust()
            grant.movers.append(mover)
        return Access(self, grant, mover)

    def left(self) -> None:
        """Wake waiting revokes, because a compiled loop has left its access."""
        with self._changed:
            self._changed.notify_all()

    def require(self, region: AnyRegion) -> None:
        """Raise InvalidArgument unless the region is registered here."""
        # Without the lock: a single look-up, on the path of every operation.
        if self._regions.get(region.region_id) is not region:
            raise InvalidArgument(f"region {region.region_id} is not registered with this messenger")

    def counts(self) -> tuple[int, int]:
        """Return the numbers of regions and grants that are open."""
        with self._changed:
            return len(self._regions), len(self._grants)

    def problems(self) -> list[str]:
        """Describe the accesses in progress; empty at rest."""
        with self._changed:
            grants = [*self._grants.values(), *self._leaving]
            moving = [(len(self._movers(grant)), grant.key.region_id) for grant in grants]
        return [f"{count} transfers in progress in region {region_id}" for count, region_id in moving if count]

    def _take_region_id(self) -> int:
        number = self._next_region_id
        self._next_region_id += 1
        return number

    def _place(self, grant: _Grant) -> None:
        """Show the grant to compiled loops; grants of GPU memory are hidden from them, and thus left to Python."""
        if self._slots is not None and isinstance(grant.region, Region):
            self._slots.place(grant.number, grant.key, grant.region)

    def _show(self, grant: _Grant) -> None:
        """Show the grant to readers of this host."""
        if self._page is not None and not self._page.closed and isinstance(grant.region, Region):
            self._page.show(grant.key)

    def _movers(self, grant: _Grant) -> list[Cuttable]:
        """Return the movers whose accesses are in progress. With the lock held."""
        return grant.movers + (self._slots.movers_inside(grant.number) if self._slots is not None else [])

    def _wait_for_movers(self, grant: _Grant, grace_s: float) -> None:
        """Wait until no access is in progress, cutting connections after the grace period. With the lock held."""
        slots = self._slots
        if slots is not None:
            slots.wait(1)
        try:
            if not self._changed.wait_for(lambda: not self._movers(grant), grace_s):
                for mover in self._movers(grant):
                    mover.cut()
                self._changed.wait_for(lambda: not self._movers(grant))
        finally:
            if slots is not None:
                slots.wait(-1)

    def _find(self, region_id: int, token: int) -> _Grant:
        grant = self._grants.get(token)
        if grant is None or grant.key.region_id != region_id:
            raise AccessDenied(f"the key for region {region_id} is unknown or revoked: ask the owner for a new one")
        return grant

    def _keep(self, grant: _Grant, window: AccessWindow) -> None:
        with self._changed:
            grant.windows = [one for one in grant.windows if not one.is_closed]
            grant.windows.append(window)

    def _leave(self, grant: _Grant, mover: Cuttable) -> None:
        with self._changed:
            grant.movers.remove(mover)
            self._changed.notify_all()
