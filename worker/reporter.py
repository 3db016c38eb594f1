"""Reports of a node to all conductors: one stream to each, reopened whenever it ends.

All conductors get the same reports, since any of them may place a request here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from moonpool_proto.v1.conductor_pb2 import (
    DecodeSample,
    Node,
    NodeCommand,
    NodeReport,
    Phase,
    PrefillSample,
    Progress,
    TransferSample,
)
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import check_target, control_error, end_if_cancelled, open_channel, outgoing
from rpc.versions import named
from rpc.waiting import Backoff
from worker.errors import StartupError

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
COALESCE_S = 0.02  # from an event to its report; between two reports at least, if requests are accepted
MAX_SAMPLES = 256
FIRST_DECODES = 64
DECODE_EVERY_S = 0.25
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)


class JoinStream:
    """Stream of reports to the conductor at `target`; collects events between two reports. Lives on the event loop."""

    def __init__(
        self, node: Node, target: str, fill: Callable[[NodeReport], None], on_command: Callable[[NodeCommand], None]
    ) -> None:
        """`fill(report)` adds the current load, held requests and counters. Commands other than `accepted` are passed
        to `on_command`. Raises InvalidArgument if `target` is malformed.
        """
        check_target(target)
        self.target = target
        self._node = node
        self._announced: Node | None = None  # description sent on the open stream
        self._fill = fill
        self._on_command = on_command
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()
        self._sent_s = -math.inf  # when the last report was sent
        self._pending = NodeReport()
        self._streams = 0  # number of streams begun
        self._streaming = False  # a stream is open: events are collected
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=1024)  # (seconds, batch, context), not reported yet
        self._num_decodes = 0  # number reported on the open stream
        self._reported_s = 0.0
        self.last_refusal = self._last_trouble = ""
        self.has_joined = False  # at any time
        self.joined = asyncio.Event()
        self.refused = asyncio.Event()

    @property
    def is_kept_out(self) -> bool:
        """True if the conductor has refused this node and never accepted it."""
        return self.refused.is_set() and not self.has_joined

    def announce(self, node: Node) -> None:
        """Replace the node's description, for example after a role switch; it is sent at once."""
        self._node = node
        self.hurry()

    def hurry(self) -> None:
        """Send a report soon, with the events that occur together."""
        self._news.set()

    def request_accepted(self) -> None:
        """Send a report now, unless the last one was just sent."""
        self._urgent.set()
        self._news.set()

    def progress(self, request_id: str, attempt: int, phase: Phase.ValueType) -> None:
        """Report a phase of a request."""
        if not self._streaming:  # not collected: the next stream begins with all held requests
            return
        self._pending.progress.append(Progress(request_id=request_id, attempt=attempt, phase=phase))
        self._news.set()

    def prefill(self, new_tokens: int, reused_tokens: int, seconds: float) -> None:
        """Report one prefill sample."""
        if len(self._pending.prefills) < MAX_SAMPLES:
            self._pending.prefills.append(
                PrefillSample(new_tokens=new_tokens, reused_tokens=reused_tokens, seconds=seconds)
            )

    def decode(self, batch: int, context_tokens: int, seconds: float) -> None:
        """Report one decode step as a sample.

        The first steps are all reported; later ones as one median per quarter of a second, since the conductor could
        not process every step of a thousand nodes.
        """
        self._steps.append((seconds, batch, context_tokens))
        now_s = time.monotonic()
        if self._num_decodes >= FIRST_DECODES and now_s < self._reported_s + DECODE_EVERY_S:
            return
        usual_s, usual_batch, usual_context = sorted(self._steps)[len(self._steps) // 2]
        self._steps.clear()
        self._reported_s = now_s
        self._num_decodes += 1
        if len(self._pending.decodes) < MAX_SAMPLES:
            sample = DecodeSample(batch=usual_batch, context_tokens=usual_context, seconds=usual_s)
            self._pending.decodes.append(sample)

    def transfer(self, path: str, nbytes: int, seconds: float) -> None:
        """Report one transfer sample."""
        if len(self._pending.transfers) < MAX_SAMPLES:
            self._pending.transfers.append(TransferSample(bytes=nbytes, seconds=seconds, path=path))

    async def run(self) -> None:
        """Join the conductor, and again whenever the stream ends, until cancelled."""
        backoff = Backoff()
        while True:
            channel = open_channel(self.target)
            try:
                reports = outgoing(self._reports(), what="Conductor.Join", target=self.target)
                call = ConductorStub(channel).Join(reports)
                async for command in call:
                    if command.HasField("accepted"):
                        log.info("joined conductor at %s, %s", self.target, named(command.accepted.software))
                        self.has_joined = True
                        self.joined.set()
                        self.last_refusal = self._last_trouble = ""
                        backoff.succeeded()
                    else:
                        self._on_command(command)
            except grpc.aio.AioRpcError as error:
                refused = error.code() in _REFUSALS
                if refused and error.details() != self.last_refusal:
                    self.last_refusal = error.details() or ""
                    log.error("conductor at %s refused this node: %s", self.target, self.last_refusal)
                    self.refused.set()
                trouble = control_error(error, what="Conductor.Join", target=self.target).reason
                if not refused and trouble != self._last_trouble:
                    self._last_trouble = trouble
                    log.warning("not joined to the conductor at %s, retrying: %s", self.target, trouble)
            except Exception:
                log.exception("reporting to the conductor at %s failed", self.target)
            finally:
                self.joined.clear()
                self._streaming = False
                await channel.close()
            end_if_cancelled()
            await asyncio.sleep(backoff.failed())

    async def _reports(self) -> AsyncIterator[NodeReport]:
        self._streams += 1
        number = self._streams
        self._pending = NodeReport()  # the conductor learns missed events from `held`
        self._streaming = True
        first = NodeReport(node=self._node)
        self._announced = self._node
        self._num_decodes = 0
        self._fill(first)
        yield first
        while True:
            try:
                await asyncio.wait_for(self._news.wait(), REPORT_EVERY_S)
                await self._collect()
            except TimeoutError:
                pass
            if (
                number != self._streams
            ):  # gRPC may still iterate after a broken stream: the events belong to its successor
                return
            self._news.clear()
            self._urgent.clear()
            self._sent_s = time.monotonic()
            report, self._pending = self._pending, NodeReport()
            if self._announced is not self._node:
                self._announced = self._node
                report.node.CopyFrom(self._node)
            self._fill(report)
            yield report

    async def _collect(self) -> None:
        """Wait until the report is due: one report for events that occur together, the next after COALESCE_S."""
        if not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), COALESCE_S)
        if self._urgent.is_set():
            await asyncio.sleep(self._sent_s + COALESCE_S - time.monotonic())


class ConductorReporter:
    """One stream per conductor; an unreachable conductor does not delay the others."""

    def __init__(
        self,
        node: Node,
        conductor_targets: Sequence[str],
        fill: Callable[[NodeReport], None],
        on_command: Callable[[NodeCommand], None],
    ) -> None:
        """`fill(report)` adds the current load, held requests and counters. Any conductor may send commands."""
        self._streams = [JoinStream(node, target, fill, on_command) for target in conductor_targets]

    def announce(self, node: Node) -> None:
        """Send the node's new description to all conductors."""
        for stream in self._streams:
            stream.announce(node)

    def hurry(self) -> None:
        """Send reports now."""
        for stream in self._streams:
            stream.hurry()

    def request_accepted(self) -> None:
        """Report a new request at once, since only the conductor that placed it has seen it."""
        if len(self._streams) > 1:
            for stream in self._streams:
                stream.request_accepted()

    def progress(self, request_id: str, attempt: int, phase: Phase.ValueType) -> None:
        """Report a phase of a request."""
        for stream in self._streams:
            stream.progress(request_id, attempt, phase)

    def prefill(self, new_tokens: int, reused_tokens: int, seconds: float) -> None:
        """Report one prefill sample."""
        for stream in self._streams:
            stream.prefill(new_tokens, reused_tokens, seconds)

    def decode(self, batch: int, context_tokens: int, seconds: float) -> None:
        """Report one decode step."""
        for stream in self._streams:
            stream.decode(batch, context_tokens, seconds)

    def transfer(self, path: str, nbytes: int, seconds: float) -> None:
        """Report one transfer sample."""
        for stream in self._streams:
            stream.transfer(path, nbytes, seconds)

    async def run(self) -> None:
        """Join all conductors, and again whenever a stream ends, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run(), name=f"reports to {stream.target}")

    async def first_join(self) -> None:
        """Wait until one conductor has accepted this node. Raises StartupError if all of them refuse it."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(event.wait()) for each in self._streams for event in (each.joined, each.refused)
        ]
        try:
            pending = set(waits)
            while pending and not any(stream.has_joined for stream in self._streams):
                if all(stream.is_kept_out for stream in self._streams):
                    refusals = (
                        f"the conductor at {each.target} refused this node: {each.last_refusal}"
                        for each in self._streams
                    )
                    raise StartupError("; ".join(refusals))
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
