"""A worker's stream to one conductor: joins, tells what happened since the last report, joins again for ever.

Keeps a node joined to every conductor, and tells all of them the same: any of them may place a request here.
"""

from __future__ import annotations

import asyncio
import logging
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
COALESCE_S = 0.02
MAX_SAMPLES = 256
FIRST_DECODES = 64
DECODE_EVERY_S = 0.25
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)


class JoinStream:
    """Collects what happened between two reports to the conductor at `target` and sends it; lives on the event loop."""

    def __init__(
        self, node: Node, target: str, fill: Callable[[NodeReport], None], on_command: Callable[[NodeCommand], None]
    ) -> None:
        """`fill(report)` adds the current load, held requests and counters. Commands but `accepted` go to
        `on_command`. Raises InvalidArgument for what is no target."""
        check_target(target)
        self.target = target
        self._node = node
        self._announced: Node | None = None  # on the stream that is open now
        self._fill = fill
        self._on_command = on_command
        self._news = asyncio.Event()
        self._pending = NodeReport()
        self._streams = 0  # begun so far
        self._streaming = False  # what happens now can be told
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=1024)  # seconds, batch, context: not told yet
        self._num_decodes = 0  # told on the stream that is open now
        self._told_s = 0.0
        self.last_refusal = self._last_trouble = ""
        self.has_joined = False  # at any time
        self.joined = asyncio.Event()
        self.refused = asyncio.Event()

    @property
    def is_kept_out(self) -> bool:
        """The conductor has refused this node, and never taken it in."""
        return self.refused.is_set() and not self.has_joined

    def announce(self, node: Node) -> None:
        """The node is another one than before, in its role; said with the next report, which comes at once."""
        self._node = node
        self.hurry()

    def hurry(self) -> None:
        """Report now."""
        self._news.set()

    def progress(self, request_id: str, attempt: int, phase: Phase.ValueType) -> None:
        if not self._streaming:  # kept for nobody: the next stream begins with all that is held
            return
        self._pending.progress.append(Progress(request_id=request_id, attempt=attempt, phase=phase))
        self._news.set()

    def prefill(self, new_tokens: int, reused_tokens: int, seconds: float) -> None:
        if len(self._pending.prefills) < MAX_SAMPLES:
            self._pending.prefills.append(
                PrefillSample(new_tokens=new_tokens, reused_tokens=reused_tokens, seconds=seconds)
            )

    def decode(self, batch: int, context_tokens: int, seconds: float) -> None:
        """One step. Each of the first ones is told; later, of those of a quarter of a second the one that took neither
        long nor short: a thousand nodes' steps are more than a conductor should learn from."""
        self._steps.append((seconds, batch, context_tokens))
        now_s = time.monotonic()
        if self._num_decodes >= FIRST_DECODES and now_s < self._told_s + DECODE_EVERY_S:
            return
        usual_s, usual_batch, usual_context = sorted(self._steps)[len(self._steps) // 2]
        self._steps.clear()
        self._told_s = now_s
        self._num_decodes += 1
        if len(self._pending.decodes) < MAX_SAMPLES:
            sample = DecodeSample(batch=usual_batch, context_tokens=usual_context, seconds=usual_s)
            self._pending.decodes.append(sample)

    def transfer(self, path: str, nbytes: int, seconds: float) -> None:
        if len(self._pending.transfers) < MAX_SAMPLES:
            self._pending.transfers.append(TransferSample(bytes=nbytes, seconds=seconds, path=path))

    async def run(self) -> None:
        """Join, and join again whenever the stream ends, until cancelled."""
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
                    log.warning("not joined to the conductor at %s, trying on: %s", self.target, trouble)
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
        self._pending = NodeReport()  # what the conductor missed is in `held`
        self._streaming = True
        first = NodeReport(node=self._node)
        self._announced = self._node
        self._num_decodes = 0
        self._fill(first)
        yield first
        while True:
            try:
                await asyncio.wait_for(self._news.wait(), REPORT_EVERY_S)
                await asyncio.sleep(COALESCE_S)  # one report for what happens together
            except TimeoutError:
                pass
            if number != self._streams:  # gRPC asks on after a broken stream: the news are its successor's
                return
            self._news.clear()
            report, self._pending = self._pending, NodeReport()
            if self._announced is not self._node:
                self._announced = self._node
                report.node.CopyFrom(self._node)
            self._fill(report)
            yield report


class ConductorReporter:
    """One stream per conductor; a conductor that is away keeps none of the others waiting."""

    def __init__(
        self,
        node: Node,
        conductor_targets: Sequence[str],
        fill: Callable[[NodeReport], None],
        on_command: Callable[[NodeCommand], None],
    ) -> None:
        """`fill(report)` adds the current load, held requests and counters. Any conductor may give a command."""
        self._streams = [JoinStream(node, target, fill, on_command) for target in conductor_targets]

    def announce(self, node: Node) -> None:
        """Tell all conductors what the node is from now on."""
        for stream in self._streams:
            stream.announce(node)

    def hurry(self) -> None:
        """Report now."""
        for stream in self._streams:
            stream.hurry()

    def took(self) -> None:
        """A request was taken in, of which only the conductor that placed it knows: the others learn of it now."""
        if len(self._streams) > 1:
            self.hurry()

    def progress(self, request_id: str, attempt: int, phase: Phase.ValueType) -> None:
        for stream in self._streams:
            stream.progress(request_id, attempt, phase)

    def prefill(self, new_tokens: int, reused_tokens: int, seconds: float) -> None:
        for stream in self._streams:
            stream.prefill(new_tokens, reused_tokens, seconds)

    def decode(self, batch: int, context_tokens: int, seconds: float) -> None:
        for stream in self._streams:
            stream.decode(batch, context_tokens, seconds)

    def transfer(self, path: str, nbytes: int, seconds: float) -> None:
        for stream in self._streams:
            stream.transfer(path, nbytes, seconds)

    async def run(self) -> None:
        """Join all, and join again whenever a stream ends, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run(), name=f"reports to {stream.target}")

    async def first_join(self) -> None:
        """Wait until one conductor has taken this node in. Raises StartupError when every one of them refuses it."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(event.wait()) for each in self._streams for event in (each.joined, each.refused)
        ]
        try:
            pending = set(waits)
            while pending and not any(stream.has_joined for stream in self._streams):
                if all(stream.is_kept_out for stream in self._streams):
                    told = (
                        f"the conductor at {each.target} refused this node: {each.last_refusal}"
                        for each in self._streams
                    )
                    raise StartupError("; ".join(told))
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
