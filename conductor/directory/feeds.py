"""Event streams of nodes that hold blocks, pool nodes and workers: follows each node's events, reconnects indefinitely,
and updates the directory.
"""

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from conductor.directory.directory import Directory, DirectoryState, Position
from kvpool.errors import AddressError
from kvpool.events import PoolEvents
from moonpool_proto.v1 import conductor_pb2, pool_pb2, pool_pb2_grpc
from rpc.control import Unavailable, call, open_channel
from rpc.errors import ControlError
from rpc.waiting import Backoff

_MAX_WAIT_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockSource:
    """A kind of node that reports which blocks it holds."""

    what: str  # for messages
    call: str  # name of the streaming call
    stub: Callable[[grpc.aio.Channel], Any]  # client of the service that has the call `Events`


POOL_NODES: Final = BlockSource("pool node", "Pool.Events", pool_pb2_grpc.PoolStub)
WORKERS: Final = BlockSource("worker", "OwnBlocks.Events", pool_pb2_grpc.OwnBlocksStub)


async def follow_events(
    source: BlockSource,
    target: str,
    on_events: Callable[[PoolEvents], bool],
    position: Callable[[], Position],
    *,
    on_lost: Callable[[str, str], None] | None = None,
    silence_s: float = 5.0,
) -> None:
    """Call `on_events` with every message of the node at `target`, until cancelled.

    Each stream starts after `position()`, with a snapshot if that is (0, 0) or the node cannot continue from there. If
    `on_events` returns False (the message does not follow the last one) or raises AddressError, a new stream is opened.
    `on_lost(reason, kind)` is called when a stream is "broken" (also without any message or heartbeat for `silence_s`),
    "refused" or "malformed"; until the next message the directory's part of the node may be stale.
    """
    last_reason = ""
    backoff = Backoff(most_s=_MAX_WAIT_S)

    def taken(events: PoolEvents) -> bool:
        fits = on_events(events)
        if fits:
            backoff.succeeded()
        return fits

    while True:
        channel = open_channel(target)
        try:
            reason, kind = await _follow(source, channel, target, taken, position, silence_s)
        except ControlError as error:
            reason, kind = str(error), "broken"
        finally:
            await channel.close()
        if on_lost is not None:
            on_lost(reason, kind)
        if reason != last_reason:
            _log.warning("events of the %s at %s are interrupted: %s", source.what, target, reason)
            last_reason = reason
        await asyncio.sleep(backoff.failed())


async def _follow(
    source: BlockSource,
    channel: grpc.aio.Channel,
    target: str,
    on_events: Callable[[PoolEvents], bool],
    position: Callable[[], Position],
    silence_s: float,
) -> tuple[str, str]:
    """Follow one stream until it ends. Return (reason, kind)."""
    begin = position()
    stream = source.stub(channel).Events(pool_pb2.EventsRequest(incarnation=begin.incarnation, after_seq=begin.seq))
    try:
        while True:
            message = await call(stream.read(), what=source.call, target=target, deadline_s=silence_s)
            if not isinstance(message, pool_pb2.PoolEvents):
                raise Unavailable("the stream ended", what=source.call, target=target, code="UNAVAILABLE")
            known = position()
            try:
                events = PoolEvents.from_proto(message)
                if not on_events(events):
                    received = f"event {events.incarnation:x}/{events.first_seq}"
                    return (
                        f"{received} does not follow {known.incarnation:x}/{known.seq}, or its checksum differs",
                        "refused",
                    )
            except AddressError as error:
                return f"malformed event: {error}", "malformed"
    finally:
        stream.cancel()


log = logging.getLogger(__name__)
_UPKEEP_S = 0.05
_AGAIN_S = 1.0  # pause after an internal error


@dataclass(frozen=True)
class _Feed:
    target: str
    task: "asyncio.Task[None]"


class DirectoryUpdater:
    """Updater of one directory, with one feed per node that joined here or is known to be in the cluster.

    Feeds start with `open`, after the directory's initial contents are restored.
    """

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self.directory = Directory()
        self._joined: dict[str, str] = {}  # targets by node id
        self._expected: dict[str, dict[str, str]] = {}  # targets by node id, by source
        self._feeds: dict[str, _Feed] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._opened = asyncio.Event()
        self._upkeep: asyncio.Task[None] | None = None
        self._breaks: Counter[str] = Counter()  # streams that ended, by kind

    def open(self) -> None:
        """Start the feeds and the removal of lost nodes' blocks."""
        self._upkeep = asyncio.create_task(self._clear_up(), name="directory upkeep")
        self._upkeep.add_done_callback(_log_failure)
        self._opened.set()

    def join(self, node_id: str, target: str) -> None:
        """Follow a node that joined, possibly at a new address."""
        self._joined[node_id] = target
        self._settle(node_id)

    def leave(self, node_id: str) -> None:
        """Note that the node's stream to this conductor ended."""
        self._joined.pop(node_id, None)
        self._settle(node_id)

    def expect(self, source: str, targets: Mapping[str, str]) -> None:
        """Set the targets of the nodes that `source` lists: they joined elsewhere or are expected to join."""
        before = self._expected.get(source, {})
        self._expected[source] = dict(targets)
        for node_id in sorted(before.keys() | targets.keys() | set(self.directory.nodes)):
            self._settle(node_id)

    def targets(self) -> dict[str, str]:
        """Return the address of each followed node."""
        return {node_id: feed.target for node_id, feed in self._feeds.items()}

    def state(self) -> dict[str, Any]:
        """Return state and number of blocks per node."""
        return {node_id: self._state_of(node_id) for node_id in sorted(self._feeds)}

    def followed(self) -> list[str]:
        """Return the ids of the followed nodes, sorted."""
        return sorted(self._feeds)

    @property
    def breaks(self) -> Counter[str]:
        """Streams that ended, by kind."""
        return self._breaks

    async def close(self) -> None:
        """End all feeds."""
        for node_id in list(self._feeds):
            self._end(node_id)
        if self._upkeep is not None:
            self._upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep
        while self._ending:
            await asyncio.wait(self._ending)

    def _settle(self, node_id: str) -> None:
        """Follow the node at its current address, or drop it if no source lists it."""
        sources = [self._joined, *self._expected.values()]
        target = next((targets[node_id] for targets in sources if node_id in targets), None)
        feed = self._feeds.get(node_id)
        if target is not None and feed is not None and feed.target == target:
            return
        self._end(node_id)
        if target is None:
            self.directory.drop_node(node_id)
            return
        task = asyncio.create_task(self._follow(node_id, target), name=f"directory feed of {node_id}")
        task.add_done_callback(_log_failure)
        self._feeds[node_id] = _Feed(target, task)

    async def _follow(self, node_id: str, target: str) -> None:
        await self._opened.wait()
        while True:
            try:
                await follow_events(
                    self._source,
                    target,
                    functools.partial(self.directory.apply, node_id),
                    functools.partial(self.directory.position, node_id),
                    on_lost=functools.partial(self._lost, node_id),
                )
            except Exception:
                log.exception("events of %s %s could not be applied; requesting a snapshot", self._source.what, node_id)
                # The last message may be applied in part.
                self._lost(node_id, "", "malformed")
            await asyncio.sleep(_AGAIN_S)

    def _lost(self, node_id: str, reason: str, kind: str) -> None:
        self._breaks[kind] += 1
        self.directory.mark_degraded(node_id, malformed=kind == "malformed")

    def _end(self, node_id: str) -> None:
        feed = self._feeds.pop(node_id, None)
        if feed is not None:
            feed.task.cancel()
            self.directory.mark_degraded(node_id)
            self._ending.add(feed.task)
            feed.task.add_done_callback(self._ending.discard)

    def _state_of(self, node_id: str) -> dict[str, Any]:
        in_dram, on_ssd = self.directory.blocks_by_tier(node_id)
        state = self.directory.state(node_id).value
        return {"state": state, "blocks": in_dram + on_ssd, "ssd_blocks": on_ssd, "joined": node_id in self._joined}

    async def _clear_up(self) -> None:
        more = False
        while True:
            await asyncio.sleep(0 if more else _UPKEEP_S)
            more = self.directory.purge()


def directory_samples(pools: DirectoryUpdater, workers: DirectoryUpdater) -> Iterator[conductor_pb2.Sample]:
    """Yield the states of both directories, and the counters of all event streams, as metrics."""
    for updater, exact, blocks in (
        (pools, "directory_exact", "directory_blocks"),
        (workers, "worker_directory_exact", "worker_directory_blocks"),
    ):
        directory = updater.directory
        for node_id in updater.followed():
            yield sample(exact, directory.state(node_id) is DirectoryState.EXACT, node=node_id)
            in_dram, on_ssd = directory.blocks_by_tier(node_id)
            if updater is pools:
                yield sample(blocks, in_dram, node=node_id, tier="dram")
                yield sample(blocks, on_ssd, node=node_id, tier="ssd")
            else:
                yield sample(blocks, in_dram, node=node_id)
            yield sample("directory_mismatches_total", directory.mismatches[node_id], node=node_id)
    for reason, count in sorted((pools.directory.snapshots + workers.directory.snapshots).items()):
        yield sample("directory_snapshots_total", count, reason=reason)
    for reason, count in sorted((pools.directory.resyncs + workers.directory.resyncs).items()):
        yield sample("directory_resyncs_total", count, reason=reason)
    for reason, count in sorted((pools.breaks + workers.breaks).items()):
        yield sample("directory_breaks_total", count, reason=reason)


def sample(name: str, value: float, **labels: str) -> conductor_pb2.Sample:
    """Return one metric sample of the conductor; the help texts are in `telemetry.conductor`."""
    made = conductor_pb2.Sample(name=name, value=float(value))
    own = made.labels
    for label, of in labels.items():  # one by one: a whole mapping is converted by protobuf in Python
        own[label] = of
    return made


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        log.error("%s has stopped", task.get_name(), exc_info=task.exception())
