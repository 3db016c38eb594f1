"""RPCs to show and change the record of objectives, and construction of the keeper from the configuration."""

from dataclasses import asdict
from typing import Any, NoReturn

import grpc

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.errors import ConductorConfigError, ConductorError, ObjectivesError, SharedStoreError, SloConflict
from conductor.persistence import SharedStoreConnection
from conductor.policy.admission_evaluation import preview
from conductor.policy.objectives import SloRecord, configured_record, digest, record_text
from conductor.slo import (
    FileVersions,
    MemoryVersions,
    ObjectivesChange,
    RedisVersions,
    SloKeeper,
    SloKeeperSetup,
    SloVersion,
    VersionStore,
)
from moonpool_proto.v1 import conductor_pb2


def slo_keeper(config: ConductorConfig, contact: SharedStoreConnection, core: Core) -> SloKeeper:
    """Create the keeper, with versions in Redis, otherwise in a folder, otherwise in memory.

    Raises ConductorConfigError if the folder cannot be used.
    """
    files, slo_dir = None, config.slo.slo_dir
    if slo_dir is not None:
        try:
            files = FileVersions(slo_dir, config.shared_store.cluster_name)
        except OSError as error:
            raise ConductorConfigError(f"slo_dir {str(slo_dir)!r} cannot be used: {error}") from error
    store: VersionStore = files or MemoryVersions()
    if contact.store is not None:
        store = RedisVersions(contact.store)
    setup = SloKeeperSetup(
        configured=configured_record(config.policy) if config.objectives is None else config.objectives,
        is_forced=config.slo.slo_force,
        node_id=config.node.node_id,
        incarnation=contact.incarnation,
        every_s=config.shared_store.shared_refresh_s,
        ttl_s=config.shared_store.shared_ttl_s,
    )
    return SloKeeper(core, store, setup, copy=files if contact.store is not None else None)


Context = grpc.aio.ServicerContext[Any, Any]


class SloCalls:
    """ShowSlo and ChangeSlo of one conductor."""

    def __init__(self, keeper: SloKeeper, core: Core) -> None:
        self.keeper = keeper
        self._core = core
        self._policy = core.policy

    async def show(self, request: conductor_pb2.ShowSloRequest, context: Context) -> conductor_pb2.ShowSloReply:
        """Return the record in force.

        If the store is unreachable, acknowledgements are missing and `trouble` contains the reason.
        """
        keeper, trouble = self.keeper, self.keeper.trouble
        try:
            acknowledged = await keeper.acknowledged()
        except SharedStoreError as error:
            acknowledged, trouble = [], trouble or str(error)
        newest_first = list(reversed(keeper.history))
        return conductor_pb2.ShowSloReply(
            current=_message(newest_first[0]) if newest_first else self._configured(),
            history=[_message(version) for version in newest_first[: request.history]],
            acknowledged=[
                conductor_pb2.SloAcknowledgement(
                    node_id=each.node_id, incarnation=each.incarnation, version=each.version, digest=each.digest
                )
                for each in acknowledged
            ],
            kept=keeper.where,
            trouble=trouble,
            drift=keeper.drift,
            unmeetable=keeper.unmeetable,
        )

    async def change(self, request: conductor_pb2.ChangeSloRequest, context: Context) -> conductor_pb2.ChangeSloReply:
        """Create a new version, or return what it would change."""
        change = ObjectivesChange(
            author=request.author,
            reason=request.reason,
            content=request.content,
            rollback_to=request.rollback_to,
            expect_version=request.expect_version if request.HasField("expect_version") else None,
            is_trial=request.trial,
            is_forced=request.force,
            peer=_peer(context),
        )
        try:
            changed = await self.keeper.change(change)
        except (ObjectivesError, SloConflict, SharedStoreError) as error:
            await _abort(context, error)
        return conductor_pb2.ChangeSloReply(
            version=_message(changed.version),
            differences=changed.differences,
            warnings=changed.warnings,
            notes=self._policy.longest_prompts(changed.record),
            preview=self._preview(changed.record) if change.is_trial else None,
        )

    def _preview(self, record: SloRecord) -> conductor_pb2.SloPreview:
        found = preview(self._core.now_ns(), self._policy.history, record, self._policy.config)
        return conductor_pb2.SloPreview(
            rows=[conductor_pb2.SloPreviewRow(**asdict(row)) for row in found.rows],
            judged=found.judged,
            span_s=found.span_s,
            forgotten=found.forgotten,
            admission=found.admission,
            mode=found.mode,
        )

    def _configured(self) -> conductor_pb2.SloVersion:
        text = record_text(self._policy.slo.record)
        return conductor_pb2.SloVersion(content=text, digest=digest(text), origin="configuration")


def _message(version: SloVersion) -> conductor_pb2.SloVersion:
    return conductor_pb2.SloVersion(
        version=version.version,
        content=version.content,
        author=version.author,
        reason=version.reason,
        at_s=version.at_s,
        origin=version.origin,
        peer=version.peer,
        digest=version.digest,
    )


def _peer(context: Context) -> str:
    """Return the common name in the caller's certificate if it has one, else its address."""
    names = context.auth_context().get("x509_common_name") or ()
    return next((name.decode("utf-8", "replace") for name in names), context.peer())


async def _abort(context: Context, error: ConductorError) -> NoReturn:
    code = grpc.StatusCode.ABORTED  # for an unreachable store; UNAVAILABLE would mean the conductor
    if isinstance(error, ObjectivesError):
        code = grpc.StatusCode.INVALID_ARGUMENT
    elif isinstance(error, SloConflict):
        code = grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, str(error))
