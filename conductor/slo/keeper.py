"""One conductor's standing with the record of objectives: goes by the newest version, says so, and makes new ones.

Precedence: what is stored goes before what the configuration says, which gives the first version only, unless it is to
be forced. While the store cannot be reached, the last version known holds, and none can be made. A store that has lost
versions, or went back to earlier ones, is given them again by whoever knows them.
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
    """What the configuration says, and about whom."""

    configured: SloRecord
    is_forced: bool  # it becomes a new version at each start that finds another
    node_id: str
    incarnation: int
    every_s: float  # between two looks at the store
    ttl_s: float  # how long an acknowledgement holds


class SloKeeper:
    """Applies versions to the policy as events, so that a replayed log knows them, too."""

    def __init__(
        self,
        core: Core,
        store: VersionStore,
        settings: SloKeeperSetup,
        *,
        copy: FileVersions | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`copy`: where what the store holds is kept as well, for a start while it is away."""
        self._core = core
        self._store = store
        self._settings = settings
        self._copy = copy
        self._clock = clock
        self._history: list[SloVersion] = []  # as known here, oldest first; [] until the store has answered
        self._copied_version: SloVersion | None = None
        self._is_compared = False  # with what the configuration says
        self._drift: list[str] = []
        self._trouble = ""
        self._uncopied = ""  # why there is no copy
        self._unmeetable: frozenset[str] = frozenset()
        self._turn = asyncio.Lock()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.front_doors = KnownTenants()

    async def start(self) -> None:
        """Go by what there is, then follow. Raises SharedStoreRefused: a store that can never be this conductor's."""
        try:
            async with self._turn:
                await self._round()
        except SharedStoreUnavailable as error:
            self._failed(error)
            if not self._history:  # else it told what there is, and only took nothing in
                await self._begin_alone()
        self._task = asyncio.create_task(self._follow(), name="objectives")

    async def close(self) -> None:
        """End; nobody waits for this conductor any more."""
        self._closing = True
        await cancel_and_wait(self._task)
        try:
            await self._store.withdraw(self._settings.node_id)
        except SharedStoreError as error:
            log.info("this conductor's acknowledgement of objectives stays until it expires: %s", error)

    async def change(self, wanted: ObjectivesChange) -> ObjectivesChangeResult:
        """Make a new version, for all conductors; this one goes by it at once.

        Raises ObjectivesError for what cannot be, SloConflict if somebody was faster, SharedStoreError.
        """
        wanted.check()
        async with self._turn:
            await self._round()
            last = self._history[-1]
            if wanted.expect_version not in (None, last.version):
                raise SloConflict(f"version {wanted.expect_version} was expected, and there is {last.told}")
            before, record = record_from_text(last.content), wanted.record(self._history)
            changes = differences(before, record)
            strangers = wanted.strangers(before, record, self.front_doors, self._core.policy.models())
            warnings = [*strangers, *self._core.policy.unmeetable(record)]
            if wanted.is_trial or not changes:
                return ObjectivesChangeResult(last, record, changes, warnings)
            origin = f"rollback to {wanted.rollback_to}" if wanted.rollback_to else "admin"
            made = self._next(last, record_text(record), wanted.author, wanted.reason, origin, wanted.peer)
            if not await self._store.put([made], after=last.version):
                raise SloConflict(f"{last.told} was followed by another just now: look at it, and try again")
            self._go_by([*self._history, made])
            try:
                await self._settle()
            except SharedStoreError as error:  # the version is there: to say so can wait for the next look
                self._failed(error)
            return ObjectivesChangeResult(made, record, changes, warnings)

    async def acknowledged(self) -> list[Acknowledgement]:
        """By every conductor that lives. Raises SharedStoreError."""
        return await self._store.acknowledged()

    @property
    def history(self) -> Sequence[SloVersion]:
        """The last versions, oldest first; [] while the store has never answered: what is configured is in force."""
        return self._history

    @property
    def drift(self) -> list[str]:
        """In what the configuration, if it says anything, differs from the version in force."""
        return self._drift

    @property
    def trouble(self) -> str:
        """Why the store cannot be used now; "" when it can."""
        return self._trouble

    @property
    def where(self) -> str:
        """Where versions are kept."""
        return self._store.where if self._store.outlives else f"{self._store.where}: they are lost when it ends"

    @property
    def unmeetable(self) -> list[str]:
        """What no node can meet, as of the last look."""
        return sorted(self._unmeetable)

    def watch(self) -> None:
        """Look for what no node can meet; told in the log when it changes: costs are learnt, nodes come and go."""
        found = frozenset(self._core.policy.unmeetable(self._core.policy.slo.record))
        for text in sorted(found - self._unmeetable):
            log.warning("nothing can meet an objective: %s", text)
        for text in sorted(self._unmeetable - found):
            log.info("this is so no longer: %s", text)
        self._unmeetable = found

    def state(self) -> dict[str, Any]:
        """For export."""
        return {
            "version": self._core.policy.slo.version,
            "kept": self.where,
            "trouble": self._trouble,
            "drift": self.drift,
            "unmeetable": self.unmeetable,
        }

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """The same as numbers, and how often requests met their objectives."""
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
                log.warning("objectives can be changed again: %s answers", self._store.where)
                self._trouble = ""

    async def _round(self) -> None:
        """Adopt what is newer in the store, give back what is missing there, acknowledge."""
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
        """The store has none, or not all: it gets what is known here. Returns what it has then, whoever gave it."""
        after = stored[-1].version if stored else 0
        known = self._history or (await self._copied() if not stored else [])
        if known:
            last = known[-1]
            log.warning("%s had lost what came after version %d: it gets %s", self._store.where, after, last.told)
        first = self._next(
            None, record_text(self._settings.configured), "configuration", "first version", "configuration"
        )
        await self._store.put(known or [first], after=after)
        stored = await self._store.history()
        if not stored:
            raise SharedStoreUnavailable(f"{self._store.where} keeps nothing that is written there")
        return list(stored)

    async def _compare(self) -> None:
        """Once, with what the configuration says: where that is to be in force, until it is."""
        drift, last = self.drift, self._history[-1]
        if drift and self._settings.is_forced:
            configured = record_text(self._settings.configured)
            made = self._next(last, configured, "configuration", "forced by --slo-force", "configuration")
            if not await self._store.put([made], after=last.version):
                return
            self._go_by([*self._history, made])
        elif drift:
            log.warning(
                "the configured objectives are not in force: %s is, which differs in %s; `moonpool slo set` makes a "
                "new version, --slo-force has the configuration do so at each start",
                last.told,
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
        changes = "; ".join(differences(before, now)) or "as before"
        log.info("objectives: %s is in force: %s", last.told, changes)
        self.watch()

    async def _settle(self) -> None:
        """Say which version this conductor goes by, and keep a copy."""
        last, settings = self._history[-1], self._settings
        mine = Acknowledgement(settings.node_id, settings.incarnation, last.version, last.digest)
        await self._store.acknowledge(mine, settings.ttl_s)
        if self._copy is not None and self._copied_version != last:
            try:
                await self._copy.keep(self._history)
                self._copied_version, self._uncopied = last, ""
            except SharedStoreError as error:  # tried again at each look, and told once
                if str(error) != self._uncopied:
                    log.warning("no copy of the objectives is kept here: %s", error)
                    self._uncopied = str(error)

    async def _begin_alone(self) -> None:
        """Go by the copy, or by the configuration, until the store answers."""
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
            log.warning("the copy of the objectives that was kept here is of no use: %s", error)
            return []

    def _next(
        self, last: SloVersion | None, content: str, author: str, reason: str, origin: str, peer: str = ""
    ) -> SloVersion:
        number = last.version + 1 if last is not None else 1
        return SloVersion(number, content, author, reason, self._clock(), origin, peer)

    def _failed(self, error: SharedStoreError) -> None:
        if str(error) != self._trouble:
            log.warning("objectives stay as they are, and cannot be changed: %s", error)
            self._trouble = str(error)
