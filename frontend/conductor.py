"""The front door's view of the conductors: calls with deadlines, repeated elsewhere or later while one is away.

Any conductor places any request. A front door asks one of them, which its name chooses, as long as it answers.
"""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from frontend.errors import GenerationFailed, RequestDeadline
from frontend.line import Line
from moonpool_proto.v1 import conductor_pb2
from rpc.control import ControlDeadlineExceeded, ControlError, Refused, Unavailable, call
from telemetry import logs

if TYPE_CHECKING:
    from moonpool_proto.v1.conductor_pb2_grpc import ConductorAsyncStub

_log = logging.getLogger(__name__)
_CALL_S: Final = 5.0  # one try of one call
_ONE_OF_SEVERAL_S: Final = 2.0  # the same, where somebody else can be asked instead
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_COMPLETE_S: Final = 15.0  # a restarted conductor takes seconds; its ledger outlives a lost Complete anyway
_RETRY_S: Final = 0.5  # that the next attempt waits for a conductor to know the end of the last one
_MOST_TENANTS: Final = 1000  # told with each look at the cluster
_STAY_AWAY_S: Final = 5.0  # from a conductor that failed, before it is asked again by choice
_ELSEWHERE_REASONS: Final = frozenset({"no_nodes", "unknown_model"})  # a conductor cut off from the nodes says so, too

T = TypeVar("T")


class ConductorClient:
    """One line to each conductor."""

    def __init__(self, targets: Sequence[str], *, asked_by: str, tenants: Sequence[str] = ()) -> None:
        """Front doors of different names `asked_by` prefer different conductors, and tell the `tenants` they know."""
        first = zlib.crc32(asked_by.encode()) % len(targets)
        ordered = [*targets[first:], *targets[:first]]
        self._lines = [Line(target) for target in ordered]  # the preferred one first
        self._asked_by = asked_by
        self.know_tenants(tenants)
        self._telling: set[asyncio.Task[None]] = set()

    def know_tenants(self, tenants: Sequence[str]) -> None:
        """Those to tell from now on, with each look at the cluster."""
        known = list(tenants) if len(tenants) <= _MOST_TENANTS else []
        self._cluster = conductor_pb2.ClusterRequest(frontend_id=self._asked_by if known else "", tenants=known)

    @property
    def target(self) -> str:
        """Of the conductor that is asked now."""
        return self._by_choice()[0].target

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, *, deadline_s: float
    ) -> tuple[conductor_pb2.Placement | conductor_pb2.Rejection, Line]:
        """Ask for a place until a conductor answers: its answer, and who to tell what became of the request.

        Raises RequestDeadline at `deadline_s` (the monotonic clock).
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            refusal: tuple[conductor_pb2.Rejection, Line] | None = None
            trouble: ControlError | None = None
            for line in self._by_choice():
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    break
                try:
                    limit_s = min(left_s, self._patience_s)
                    reply = await _answer(
                        line,
                        line.schedule(request, waits=self._is_only, deadline_s=limit_s),
                        is_patient=limit_s >= self._patience_s,
                    )
                except Refused as error:
                    raise GenerationFailed(
                        f"the conductor refused the request: {error}", code="schedule_refused"
                    ) from error
                except (Unavailable, ControlDeadlineExceeded) as error:
                    _log.warning("conductor away, trying again: %s", error)
                    trouble = error
                    if isinstance(error, ControlDeadlineExceeded) and not self._is_only:
                        # It may have placed the attempt, which goes elsewhere now.
                        self._tell(_void(request), [line])
                    continue
                if reply.WhichOneof("result") != "rejection":
                    return reply.placement, line
                if reply.rejection.reason not in _ELSEWHERE_REASONS:
                    return reply.rejection, line
                refusal = refusal or (reply.rejection, line)
            if refusal is not None:
                return refusal
            if monotonic() + pause_s >= deadline_s:
                text = trouble or "it came before any conductor could be asked"
                raise RequestDeadline(f"no placement before the request's deadline: {text}") from trouble
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def complete(self, request: conductor_pb2.CompleteRequest, line: Line | None) -> None:
        """The last word on a request or an attempt, to the conductor that placed it; None: to all, for any may have.

        Given up with a warning when one stays away: what it held is gone with it, and the others go by what workers
        hold. Where somebody else can place the next attempt, that does not wait long for the last one's end to be told.
        """
        lines = self._lines if line is None else [line]
        if request.outcome == "retry" and not self._is_only:
            await asyncio.wait(self._tell(request, lines), timeout=_RETRY_S)
        else:
            await asyncio.gather(*(_complete(request, each) for each in lines))

    async def cluster(self, *, deadline_s: float) -> conductor_pb2.ClusterReply:
        """The cluster's state as the first conductor that answers sees it; `deadline_s` is a duration of each try.

        Raises ControlError.
        """
        trouble: ControlError | None = None
        for line in self._by_choice():
            try:
                asked = line.stub.Cluster(self._cluster)
                return await _answer(
                    line, call(asked, what="Conductor.Cluster", target=line.target, deadline_s=deadline_s)
                )
            except (Unavailable, ControlDeadlineExceeded) as error:
                trouble = trouble or error
        assert trouble is not None  # there is one line at least
        raise trouble

    @property
    def targets(self) -> list[str]:
        """Of all conductors, the preferred one first."""
        return [line.target for line in self._lines]

    async def ask(
        self, what: str, make: "Callable[[ConductorAsyncStub], Awaitable[T]]", *, target: str, deadline_s: float
    ) -> T:
        """What this one conductor answers. Raises ControlError, which says nothing about who is asked for places."""
        line = next(line for line in self._lines if line.target == target)
        return await call(make(line.stub), what=f"Conductor.{what}", target=target, deadline_s=deadline_s)

    async def act(self, what: str, make: "Callable[[ConductorAsyncStub], Awaitable[T]]", *, deadline_s: float) -> T:
        """What the first conductor that can be reached answers: a call that changes something, made once. One that does
        not answer in time may have done it, and no other is asked. Raises ControlError."""
        trouble: ControlError | None = None
        for line in self._by_choice():
            try:
                return await self.ask(what, make, target=line.target, deadline_s=deadline_s)
            except Unavailable as error:
                trouble = trouble or error
        assert trouble is not None  # there is one line at least
        raise trouble

    async def close(self) -> None:
        """Close the lines; running calls fail."""
        for telling in self._telling:
            telling.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        for line in self._lines:
            await line.close()

    @property
    def _is_only(self) -> bool:
        return len(self._lines) == 1

    @property
    def _patience_s(self) -> float:
        return _CALL_S if self._is_only else _ONE_OF_SEVERAL_S

    def _by_choice(self) -> list[Line]:
        """Those that answer, the preferred one first; then those that failed of late, the one longest ago first."""
        now_s = monotonic()

        def rank(line: Line) -> tuple[float, int]:
            failed_s = line.failed_s
            away = failed_s is not None and now_s < failed_s + _STAY_AWAY_S
            return (failed_s or 0.0) if away else -1.0, self._lines.index(line)

        return sorted(self._lines, key=rank)

    def _tell(self, request: conductor_pb2.CompleteRequest, lines: Sequence[Line]) -> list[asyncio.Task[None]]:
        """Complete, in the background."""
        telling = [asyncio.create_task(_complete(request, line)) for line in lines]
        for each in telling:
            self._telling.add(each)
            each.add_done_callback(self._telling.discard)
        return telling


def _void(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.CompleteRequest:
    return conductor_pb2.CompleteRequest(request_id=request.request_id, attempt=request.attempt, outcome="retry")


async def _complete(request: conductor_pb2.CompleteRequest, line: Line) -> None:
    logs.attempt(request.request_id, request.attempt)
    try:
        await line.complete(request, deadline_s=_COMPLETE_S)
    except ControlError as error:
        _log.warning("outcome %s not delivered: %s", request.outcome, error)


async def _answer(line: Line, asking: Awaitable[T], *, is_patient: bool = True) -> T:
    """`is_patient`: a conductor that does not answer in time has failed; else its asker had no time."""
    if line.failed_s is not None:
        line.failed_s = monotonic()  # one asker finds out whether it is back: others do not wait for it, too
    try:
        reply = await asking
    except (Unavailable, ControlDeadlineExceeded) as error:
        if is_patient or isinstance(error, Unavailable):
            line.failed_s = monotonic()
        raise
    line.failed_s = None
    return reply
