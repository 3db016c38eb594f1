"""One conductor's copy of the record of objectives: adopts the newest version, acknowledges it, and creates new ones.

The stored version overrides the configuration, which provides only the first version unless it is forced. While the
store is unreachable, the last known version stays in force and no new one can be created. If the store has lost
versions, a conductor that knows them writes them again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conductor.core import Core
from conductor.errors import SharedStoreError, SharedStoreUnavailable, SloConflict
from conductor.policy.events import ObjectivesChanged
from conductor.policy.objectives import SloRecord, record_from_text, record_text
from conductor.slo.change import KnownTenants, ObjectivesChange, ObjectivesChangeResult, differences
from conductor.slo.stores import FileVersions
from conductor.slo.versions import KEPT, Acknowledgement, SloVersion, VersionStore
from moonpool_proto.v1 import conductor_pb2
from rpc.waiting import cancel_and_wait

__all__ = ["SloKeeper", "SloKeeperSetup"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SloKeeperSetup:
    """Settings of the keeper, from the conductor's configuration."""

    configured: SloRecord
    is_forced: bool  # at each start, create a new version if the configured record is not in force
    node_id: str
    incarnation: int
    every_s: float  # polling interval of the store
    ttl_s: float  # lifetime of an acknowledgement


class SloKeeper:
    """Keeper of the objectives. Applies versions to the policy as events, so that replays include them."""

    def __init__(
        self,
        core: Core,
        store: VersionStore,
        settings: SloKeeperSetup,
        *,
        copy: FileVersions | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`copy`: local copy of the stored versions, for starts while the store is unreachable."""
        self._core = core
        self._store = store
        self._settings = settings
        self._copy = copy
        self._clock = clock
        self._history: list[SloVersion] = []  # known versions, oldest first; [] until the store has been read
        self._copied_version: SloVersion | None = None
        self._is_compared = False  # with the configuration
        self._drift: list[str] = []
        self._trouble = ""
        self._uncopied = ""  # why the local copy could not be written
        self._unmeetable: frozenset[str] = frozenset()
        self._turn = asyncio.Lock()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.known_tenants = KnownTenants()

    async def start(self) -> None:
        """Apply the current version and poll the store. Raises SharedStoreRefused if it is permanently unusable."""
        try:
            async with self._turn:
                await self._round()
        except SharedStoreUnavailable as error:
            self._failed(error)
            if not self._history:  # otherwise it was readable and only a write failed
                await self._begin_alone()
        self._task = asyncio.create_task(self._follow(), name="objectives")

    async def close(self) -> None:
        """Stop, and withdraw the acknowledgement so that no conductor waits for this one."""
        self._closing = True
        await cancel_and_wait(self._task)
        try:
            await self._store.withdraw(self._settings.node_id)
        except SharedStoreError as error:
            log.info("this conductor's acknowledgement of objectives remains until it expires: %s", error)

    async def change(self, wanted: ObjectivesChange) -> ObjectivesChangeResult:
        """Create a new version for all conductors and apply it here.

        Raises ObjectivesError for an invalid record, SloConflict after a concurrent change, SharedStoreError.
        """
        wanted.check()
        async with self._turn:
            await self._round()
            last = self._history[-1]
            if wanted.expect_version not in (None, last.version):
                raise SloConflict(f"expected version {wanted.expect_version}, but {last.description} is in force")
            before, record = record_from_text(last.content), wanted.record(self._history)
            changes = differences(before, record)
            strangers = wanted.strangers(before, record, self.known_tenants, self._core.policy.models())
            warnings = [*strangers, *self._core.policy.unmeetable(record)]
            if wanted.is_trial or not changes:
                return ObjectivesChangeResult(last, record, changes, warnings)
            origin = f"rollback to {wanted.rollback_to}" if wanted.rollback_to else "admin"
            made = self._next(last, record_text(record), wanted.author, wanted.reason, origin, wanted.peer)
            if not await self._store.put([made], after=last.version):
                raise SloConflict(f"{last.description} was replaced by a concurrent change; review it and try again")
            self._go_by([*self._history, made])
            try:
                await self._settle()
            except SharedStoreError as error:  # the version is stored; the next poll acknowledges it
                self._failed(error)
            return ObjectivesChangeResult(made, record, changes, warnings)

    async def acknowledged(self) -> list[Acknowledgement]:
        """Return the acknowledgements of all live conductors. Raises SharedStoreError."""
        return await self._store.acknowledged()

    @property
    def history(self) -> Sequence[SloVersion]:
        """Last versions, oldest first; [] until the store has been read, with the configuration in force."""
        return self._history

    @property
    def drift(self) -> list[str]:
        """Fields in which the configured objectives, if any, differ from the version in force."""
        return self._drift

    @property
    def trouble(self) -> str:
        """Reason why the store is currently unusable; "" if it is usable."""
        return self._trouble

    @property
    def where(self) -> str:
        """Location of the versions."""
        return self._store.where if self._store.outlives else f"{self._store.where}; lost when it exits"

    @property
    def unmeetable(self) -> list[str]:
        """Objectives that no node can meet, as of the last check."""
        return sorted(self._unmeetable)

    def watch(self) -> None:
        """Check which objectives no node can meet, and log changes; due to learned costs and node changes."""
        found = frozenset(self._core.policy.unmeetable(self._core.policy.slo.record))
        for text in sorted(found - self._unmeetable):
            log.warning("no node can meet an objective: %s", text)
        for text in sorted(self._unmeetable - found):
            log.info("resolved: %s", text)
        self._unmeetable = found

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "version": self._core.policy.slo.version,
            "kept": self.where,
            "trouble": self._trouble,
            "drift": self.drift,
            "unmeetable": self.unmeetable,
        }

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """Yield the state and the attainment of objectives as metrics."""
        yield conductor_pb2.Sample(name="slo_version", value=self._core.policy.slo.version)
        yield conductor_pb2.Sample(name="slo_unmeetable", value=len(self._unmeetable))
        yield conductor_pb2.Sample(name="slo_drift", value=len(self.drift))
        attainment = self._core.policy.attainment
        for name, rows in (
            ("slo_requests_total", attainment.by_class()),
            ("slo_tenant_requests_total", attainment.by_tenant()),
        ):
            for labels, count in rows:
                yield conductor_pb2.Sample(name=name, labels=labels, value=count)

    async def _follow(self) -> None:
        while not self._closing:
            await asyncio.sleep(self._settings.every_s)
            self.watch()
            try:
                async with self._turn:
                    await self._round()
            except SharedStoreError as error:
                self._failed(error)
                continue
            if self._trouble:
                log.warning("objectives can be changed again: %s is usable", self._store.where)
                self._trouble = ""

    async def _round(self) -> None:
        """Adopt newer versions from the store, restore missing ones there, and acknowledge."""
        stored = await self._store.history()
        mine = self._history[-1].version if self._history else 0
        if not stored or stored[-1].version < mine:
            stored = await self._give(stored)
        if stored[-1].version >= mine and stored[-1:] != self._history[-1:]:
            self._go_by(stored)
        if not self._is_compared:
            await self._compare()
        await self._settle()

    async def _give(self, stored: Sequence[SloVersion]) -> list[SloVersion]:
        """Write the known versions to a store that lost some or all of them. Return the versions stored afterwards."""
        after = stored[-1].version if stored else 0
        known = self._history or (await self._copied() if not stored else [])
        if known:
            last = known[-1]
            log.warning("%s lost the versions after %d; restoring up to %s", self._store.where, after, last.description)
        first = self._next(
            None, record_text(self._settings.configured), "configuration", "first version", "configuration"
        )
        await self._store.put(known or [first], after=after)
        stored = await self._store.history()
        if not stored:
            raise SharedStoreUnavailable(f"{self._store.where} does not keep written versions")
        return list(stored)

    async def _compare(self) -> None:
        """Compare with the configuration once; if forced, create a new version from it, retrying until it succeeds."""
        drift, last = self.drift, self._history[-1]
        if drift and self._settings.is_forced:
            configured = record_text(self._settings.configured)
            made = self._next(last, configured, "configuration", "forced by --slo-force", "configuration")
            if not await self._store.put([made], after=last.version):
                return
            self._go_by([*self._history, made])
        elif drift:
            log.warning(
                "the configured objectives are not in force: %s applies, which differs in %s; `moonpool slo set` "
                "creates a new version, and --slo-force does so from the configuration at each start",
                last.description,
                "; ".join(drift),
            )
        self._is_compared = True

    def _go_by(self, versions: Sequence[SloVersion]) -> None:
        before = self._core.policy.slo.record
        self._history = list(versions)[-KEPT:]
        last = self._history[-1]
        self._core.handle(ObjectivesChanged(last.version, last.content))
        now, configured = self._core.policy.slo.record, self._settings.configured
        self._drift = [] if configured == SloRecord() else differences(now, configured)
        changes = "; ".join(differences(before, now)) or "unchanged"
        log.info("objectives: %s is in force: %s", last.description, changes)
        self.watch()

    async def _settle(self) -> None:
        """Acknowledge the version in force and write the local copy."""
        last, settings = self._history[-1], self._settings
        mine = Acknowledgement(settings.node_id, settings.incarnation, last.version, last.digest)
        await self._store.acknowledge(mine, settings.ttl_s)
        if self._copy is not None and self._copied_version != last:
            try:
                await self._copy.keep(self._history)
                self._copied_version, self._uncopied = last, ""
            except SharedStoreError as error:  # retried at each poll, logged once
                if str(error) != self._uncopied:
                    log.warning("cannot write the local copy of the objectives: %s", error)
                    self._uncopied = str(error)

    async def _begin_alone(self) -> None:
        """Apply the local copy, or the configuration, until the store can be read."""
        known = await self._copied()
        if known:
            self._go_by(known)
        else:
            self._core.handle(ObjectivesChanged(0, record_text(self._settings.configured)))

    async def _copied(self) -> list[SloVersion]:
        if self._copy is None:
            return []
        try:
            return await self._copy.history()
        except SharedStoreError as error:
            log.warning("the local copy of the objectives is unusable: %s", error)
            return []

    def _next(
        self, last: SloVersion | None, content: str, author: str, reason: str, origin: str, peer: str = ""
    ) -> SloVersion:
        number = last.version + 1 if last is not None else 1
        return SloVersion(number, content, author, reason, self._clock(), origin, peer)

    def _failed(self, error: SharedStoreError) -> None:
        if str(error) != self._trouble:
            log.warning("the objectives in force cannot be changed now: %s", error)
            self._trouble = str(error)
