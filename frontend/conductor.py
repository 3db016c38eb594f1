"""Calls to the conductors: one multiplexed stream to each, and the client that chooses among them.

Everything runs on one event loop, so there are no locks. A call is in `ConductorStream._queue` until it is written,
then in `_sent` until its answer arrives or its caller gives up. When the stream breaks, calls in `_sent` fail; calls in
`_queue` fail unless they wait for an unreachable conductor. Outcomes are owed: they are sent again, in order, until the
conductor has answered, whether or not their callers still wait. A conductor that stood still would otherwise keep what
it placed before. For a placement whose answer was lost, an outcome is owed, too.
"""

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
import grpc.aio

from frontend.errors import GenerationFailed, RequestDeadline
from moonpool_proto.v1 import conductor_pb2, conductor_pb2_grpc
from rpc.control import (
    CallRefused,
    ControlDeadlineExceeded,
    ControlError,
    Unavailable,
    call,
    end_if_cancelled,
    open_channel,
)
from rpc.control import control_error as as_control_error
from rpc.versions import own_software
from telemetry import logs

if TYPE_CHECKING:
    from moonpool_proto.v1.conductor_pb2_grpc import ConductorAsyncStub

_log = logging.getLogger(__name__)


_WHAT: Final = "Conductor.Schedule"
_CALLS_PER_MESSAGE: Final = 64
_MESSAGE_NBYTES: Final = 1 << 20  # a message of this size gets no further call
_MOST_OWED: Final = 4096  # outcomes kept for an unreachable conductor
_ANSWERS_PER_ITERATION: Final = 16  # callers that are woken in one iteration of the event loop
_FIRST_RECONNECT_PAUSE_S: Final = 0.05
_LONGEST_RECONNECT_PAUSE_S: Final = 0.5

ScheduleStreamCall = grpc.aio.StreamStreamCall[conductor_pb2.FrontendCalls, conductor_pb2.ConductorAnswers]


@dataclass(eq=False)
class _Call:
    request: conductor_pb2.ScheduleRequest | conductor_pb2.CompleteRequest
    waits: bool  # stays queued while the conductor is unreachable, until its caller gives up
    answer: "asyncio.Future[conductor_pb2.ConductorAnswer]"
    number: int = 0  # set when it is sent

    @property
    def is_owed(self) -> bool:
        """True for the outcome of a request."""
        return isinstance(self.request, conductor_pb2.CompleteRequest)

    @property
    def is_open(self) -> bool:
        """True if it must be sent although it was not answered so far."""
        return self.is_owed or not self.answer.done()


class ConductorStream:
    """gRPC channel and multiplexed call stream to the conductor at `target`. Always call `close`.

    Concurrent calls share a message, and so do their answers. The stream is opened for the first call, and again as
    soon as it broke: the conductor releases the requests of a frontend whose stream does not come back.
    """

    def __init__(self, target: str, frontend_id: str = "", incarnation: int = 0) -> None:
        self.target = target
        self._frontend = frontend_id, incarnation
        self.failed_s: float | None = None  # time of the last failed call; None after an answer
        self._channel = open_channel(target)
        self.stub: conductor_pb2_grpc.ConductorAsyncStub = conductor_pb2_grpc.ConductorStub(self._channel)
        self._queue: deque[_Call] = deque()  # not sent yet
        self._has_calls = asyncio.Event()
        self._sent: dict[int, _Call] = {}
        self._number = 0
        self._is_refused = False  # the conductor ended the last stream with an error: it would do so again
        self._task: asyncio.Task[None] | None = None

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, *, waits: bool, deadline_s: float | None
    ) -> conductor_pb2.ScheduleReply:
        """Ask for a placement within `deadline_s` seconds. With `waits` the call stays queued while the stream is down.

        Raises Unavailable, ControlDeadlineExceeded or Refused.
        """
        return (await self._ask(request, waits=waits, deadline_s=deadline_s)).schedule

    async def complete(self, request: conductor_pb2.CompleteRequest, *, deadline_s: float | None) -> None:
        """Report the outcome of a request; waits for an unreachable conductor. Raises the same errors as `schedule`."""
        await self._ask(request, waits=True, deadline_s=deadline_s)

    async def close(self) -> None:
        """Close the stream and the channel; running calls fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        failure = self._unavailable("closed by the frontend")
        self._fail([*self._sent.values(), *self._queue], failure)
        self._sent.clear()
        self._queue.clear()
        await self._channel.close()

    async def _ask(
        self,
        request: conductor_pb2.ScheduleRequest | conductor_pb2.CompleteRequest,
        *,
        waits: bool,
        deadline_s: float | None,
    ) -> conductor_pb2.ConductorAnswer:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"calls to {self.target}")
        pending = _Call(request, waits, asyncio.get_running_loop().create_future())
        self._queue.append(pending)
        self._has_calls.set()
        try:
            answer = await call(pending.answer, what=_WHAT, target=self.target, deadline_s=deadline_s)
        finally:
            if not pending.is_owed:
                self._sent.pop(pending.number, None)
        if answer.WhichOneof("answer") == "refused":
            raise CallRefused(answer.refused, what=_WHAT, target=self.target, code="INVALID_ARGUMENT")
        return answer

    async def _run(self) -> None:
        pause_s = 0.0
        await self._has_calls.wait()
        while True:
            stream = self.stub.Schedule()
            self._is_refused = False
            was_open = asyncio.Event()
            try:
                failure = await self._exchange(stream, was_open)
            except Exception as error:
                _log.exception("the calls to %s broke", self.target)
                failure = self._unavailable(repr(error))
            end_if_cancelled()
            owed = self._owed_after_break(failure)
            if not was_open.is_set():
                self._fail([each for each in self._queue if not each.waits], failure)
            self._queue = deque(each for each in (*owed, *self._queue) if each.is_open)
            if self._is_refused:
                self._queue = deque(each for each in self._queue if not each.answer.done())
            self._drop_oldest()
            self._has_calls.set() if self._queue else self._has_calls.clear()
            if was_open.is_set() and self._queue and not self._is_refused:
                pause_s = 0.0
            elif self._is_refused and not self._queue:
                await self._has_calls.wait()
            else:
                pause_s = min(2 * pause_s or _FIRST_RECONNECT_PAUSE_S, _LONGEST_RECONNECT_PAUSE_S)
                await self._pause(pause_s)

    def _owed_after_break(self, failure: ControlError) -> list[_Call]:
        """Fail the placements that were sent and not answered; return the outcomes that are owed, in order.

        The conductor may have carried out those placements, which nobody will use.
        """
        owed: list[_Call] = []
        for each in self._sent.values():
            request = each.request
            if isinstance(request, conductor_pb2.ScheduleRequest):
                self._fail([each], failure)
                owed.append(_Call(retry_outcome(request), waits=True, answer=_abandoned()))
            else:
                owed.append(each)
        self._sent.clear()
        return owed

    def _drop_oldest(self) -> None:
        """Keep the number of owed outcomes within its bound."""
        owed = [each for each in self._queue if each.is_owed]
        if dropped := set(owed[:-_MOST_OWED]):
            _log.warning("%d outcomes for %s are dropped: it cannot be reached", len(dropped), self.target)
            self._queue = deque(each for each in self._queue if each not in dropped)
            self._fail(dropped, self._unavailable("too many outcomes are waiting for it"))

    async def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the next call arrives."""
        self._has_calls.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._has_calls.wait()
        except TimeoutError:
            self._has_calls.set()

    async def _exchange(self, stream: ScheduleStreamCall, was_open: asyncio.Event) -> ControlError:
        """Send calls and receive answers until the stream ends; return the reason for the end."""
        writer: asyncio.Task[None] | None = None
        try:
            async for message in stream:
                if writer is None:
                    was_open.set()
                    writer = asyncio.create_task(self._write(stream), name=f"writer of calls to {self.target}")
                for number, answer in enumerate(message.answers, 1):
                    if number % _ANSWERS_PER_ITERATION == 0:
                        await asyncio.sleep(0)
                    pending = self._sent.pop(answer.number, None)
                    if pending is not None and not pending.answer.done():
                        pending.answer.set_result(answer)
            return self._unavailable("the conductor ended the stream")
        except grpc.aio.AioRpcError as error:
            reason = as_control_error(error, what=_WHAT, target=self.target)
            self._is_refused = not isinstance(reason, Unavailable)
            return reason if isinstance(reason, Unavailable) else self._unavailable(reason.reason)
        finally:
            stream.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, stream: ScheduleStreamCall) -> None:
        frontend_id, incarnation = self._frontend
        message = conductor_pb2.FrontendCalls(software=own_software(), frontend_id=frontend_id, incarnation=incarnation)
        try:
            await stream.write(message)
            while True:
                await self._has_calls.wait()
                self._has_calls.clear()
                while self._queue:
                    message = self._next_message()
                    if message.calls:
                        await stream.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader detects the same end and reports it

    def _next_message(self) -> conductor_pb2.FrontendCalls:
        """Return a message with the queued calls that fit; skip placements whose callers gave up."""
        message, nbytes = conductor_pb2.FrontendCalls(), 0
        while self._queue and len(message.calls) < _CALLS_PER_MESSAGE and nbytes < _MESSAGE_NBYTES:
            pending = self._queue.popleft()
            if not pending.is_open:
                continue
            self._number = pending.number = self._number + 1
            self._sent[pending.number] = pending
            request = pending.request
            if isinstance(request, conductor_pb2.ScheduleRequest):
                nbytes += len(request.chain)
                message.calls.add(number=self._number, schedule=request)
            else:
                message.calls.add(number=self._number, complete=request)
        return message

    @staticmethod
    def _fail(calls: Iterable[_Call], failure: ControlError) -> None:
        for each in calls:
            if not each.answer.done():
                each.answer.set_exception(failure)

    def _unavailable(self, reason: str) -> Unavailable:
        return Unavailable(reason, what=_WHAT, target=self.target, code="UNAVAILABLE")


def retry_outcome(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.CompleteRequest:
    """Return the outcome of an attempt whose placement is not used."""
    return conductor_pb2.CompleteRequest(request_id=request.request_id, attempt=request.attempt, outcome="retry")


def _abandoned() -> "asyncio.Future[conductor_pb2.ConductorAnswer]":
    """Return the answer of a call for which nobody waits."""
    answer: asyncio.Future[conductor_pb2.ConductorAnswer] = asyncio.get_running_loop().create_future()
    answer.cancel()
    return answer


_CALL_S: Final = 5.0  # timeout of one call if there is one conductor
_ONE_OF_SEVERAL_S: Final = 2.0  # timeout if another conductor can be asked instead
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_COMPLETE_S: Final = 15.0  # longest wait for the answer: a conductor takes seconds to restart
_RETRY_S: Final = 0.5  # the next attempt waits this long for delivery of the last attempt's end
_MAX_TENANTS: Final = 1000  # maximum number sent with each Cluster call
_AVOID_S: Final = 5.0  # a conductor that failed is not preferred for this long
# A conductor without connection to the nodes also rejects with these reasons: another one is asked.
_ELSEWHERE_REASONS: Final = frozenset({"no_nodes", "unknown_model"})

T = TypeVar("T")


class ConductorClient:
    """Client of all conductors: one stream to each, with deadlines, retries and failover.

    Any conductor can place any request. The frontend's name determines the conductor that it prefers; it uses that one
    as long as it answers.
    """

    def __init__(
        self, targets: Sequence[str], *, asked_by: str, tenants: Sequence[str] = (), incarnation: int = 0
    ) -> None:
        """`asked_by` is the frontend's name: different frontends prefer different conductors.

        `incarnation` is that of its process, and `tenants` are reported with each Cluster call.
        """
        first = zlib.crc32(asked_by.encode()) % len(targets)
        ordered = [*targets[first:], *targets[:first]]
        # The preferred one first.
        self._streams = [ConductorStream(target, asked_by, incarnation) for target in ordered]
        self._asked_by = asked_by
        self.set_tenants(tenants)
        self._background: set[asyncio.Task[None]] = set()

    def set_tenants(self, tenants: Sequence[str]) -> None:
        """Replace the tenants that are reported with each Cluster call."""
        known = list(tenants) if len(tenants) <= _MAX_TENANTS else []
        self._cluster = conductor_pb2.ClusterRequest(frontend_id=self._asked_by if known else "", tenants=known)

    @property
    def target(self) -> str:
        """Target of the conductor that the next call goes to."""
        return self._by_preference()[0].target

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, *, deadline_s: float
    ) -> tuple[conductor_pb2.Placement | conductor_pb2.Rejection, ConductorStream]:
        """Ask for a placement until a conductor answers.

        Returns the answer and the stream to the conductor that must receive the request's outcome. Raises
        GenerationFailed if the conductor refuses the call and RequestDeadline at `deadline_s` (monotonic clock).
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            refusal: tuple[conductor_pb2.Rejection, ConductorStream] | None = None
            failure: ControlError | None = None
            for stream in self._by_preference():
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    break
                try:
                    limit_s = min(left_s, self._timeout_s)
                    reply = await _tracked(
                        stream,
                        stream.schedule(request, waits=self._is_single, deadline_s=limit_s),
                        is_patient=limit_s >= self._timeout_s,
                    )
                except CallRefused as error:
                    raise GenerationFailed(
                        f"the conductor refused the request: {error}", code="schedule_refused"
                    ) from error
                except (Unavailable, ControlDeadlineExceeded) as error:
                    _log.warning("conductor unreachable, trying again: %s", error)
                    failure = error
                    if isinstance(error, ControlDeadlineExceeded) and not self._is_single:
                        # It may have placed the attempt, which another conductor places now.
                        self._complete_in_background(retry_outcome(request), [stream])
                    continue
                if reply.WhichOneof("result") != "rejection":
                    return reply.placement, stream
                if reply.rejection.reason not in _ELSEWHERE_REASONS:
                    return reply.rejection, stream
                refusal = refusal or (reply.rejection, stream)
            if refusal is not None:
                return refusal
            if monotonic() + pause_s >= deadline_s:
                text = failure or "no conductor could be reached in time"
                raise RequestDeadline(f"no placement before the request's deadline: {text}") from failure
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def complete(self, request: conductor_pb2.CompleteRequest, stream: ConductorStream | None) -> None:
        """Report the outcome of a request or attempt to the conductor that placed it.

        Without a stream the outcome is sent to all conductors, because any may have placed the attempt. If a conductor
        stays unreachable, the caller waits no longer, and the outcome is sent once the conductor can be reached again.
        If another conductor can place the next attempt, that one waits only briefly for this report.
        """
        streams = self._streams if stream is None else [stream]
        if request.outcome == "retry" and not self._is_single:
            await asyncio.wait(self._complete_in_background(request, streams), timeout=_RETRY_S)
        else:
            await asyncio.gather(*(_complete(request, each) for each in streams))

    async def cluster(self, *, deadline_s: float) -> conductor_pb2.ClusterReply:
        """Return the cluster's state as seen by the first conductor that answers; `deadline_s` is a duration per call.

        Raises ControlError.
        """
        return await self._first_answer("Cluster", lambda stub: stub.Cluster(self._cluster), deadline_s)

    async def preview(self, request: conductor_pb2.ScheduleRequest, *, deadline_s: float) -> conductor_pb2.PreviewReply:
        """Return the first answering conductor's judgement of a request that it does not place; as `cluster`."""
        return await self._first_answer("Preview", lambda stub: stub.Preview(request), deadline_s)

    async def _first_answer(
        self, what: str, make: "Callable[[ConductorAsyncStub], Awaitable[T]]", deadline_s: float
    ) -> T:
        failure: ControlError | None = None
        for stream in self._by_preference():
            try:
                pending = call(make(stream.stub), what=f"Conductor.{what}", target=stream.target, deadline_s=deadline_s)
                return await _tracked(stream, pending)
            except (Unavailable, ControlDeadlineExceeded) as error:
                failure = failure or error
        assert failure is not None  # there is at least one stream
        raise failure

    @property
    def targets(self) -> list[str]:
        """Targets of all conductors, the preferred one first."""
        return [stream.target for stream in self._streams]

    async def ask(
        self, what: str, make: "Callable[[ConductorAsyncStub], Awaitable[T]]", *, target: str, deadline_s: float
    ) -> T:
        """Call the conductor at `target` and return its answer.

        Raises ControlError. A failure does not change which conductor is preferred for placements.
        """
        stream = next(stream for stream in self._streams if stream.target == target)
        return await call(make(stream.stub), what=f"Conductor.{what}", target=target, deadline_s=deadline_s)

    async def act(self, what: str, make: "Callable[[ConductorAsyncStub], Awaitable[T]]", *, deadline_s: float) -> T:
        """Send a call that changes state to the first conductor that can be reached, and return its answer.

        A conductor that does not answer in time may have carried it out, so no other one is asked. Raises ControlError.
        """
        failure: ControlError | None = None
        for stream in self._by_preference():
            try:
                return await self.ask(what, make, target=stream.target, deadline_s=deadline_s)
            except Unavailable as error:
                failure = failure or error
        assert failure is not None  # there is at least one stream
        raise failure

    async def close(self) -> None:
        """Close all streams; running calls fail."""
        for tasks in self._background:
            tasks.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for stream in self._streams:
            await stream.close()

    @property
    def _is_single(self) -> bool:
        return len(self._streams) == 1

    @property
    def _timeout_s(self) -> float:
        return _CALL_S if self._is_single else _ONE_OF_SEVERAL_S

    def _by_preference(self) -> list[ConductorStream]:
        """Return streams to conductors that answer, the preferred one first, then to those that failed lately, oldest
        first.
        """
        now_s = monotonic()

        def rank(stream: ConductorStream) -> tuple[float, int]:
            failed_s = stream.failed_s
            away = failed_s is not None and now_s < failed_s + _AVOID_S
            return (failed_s or 0.0) if away else -1.0, self._streams.index(stream)

        return sorted(self._streams, key=rank)

    def _complete_in_background(
        self, request: conductor_pb2.CompleteRequest, streams: Sequence[ConductorStream]
    ) -> list[asyncio.Task[None]]:
        """Send the outcome in background tasks."""
        tasks = [asyncio.create_task(_complete(request, stream)) for stream in streams]
        for each in tasks:
            self._background.add(each)
            each.add_done_callback(self._background.discard)
        return tasks


async def _complete(request: conductor_pb2.CompleteRequest, stream: ConductorStream) -> None:
    logs.attempt(request.request_id, request.attempt)
    try:
        await stream.complete(request, deadline_s=_COMPLETE_S)
    except ControlError as error:
        _log.warning("outcome %s not delivered so far: %s", request.outcome, error)


async def _tracked(stream: ConductorStream, asking: Awaitable[T], *, is_patient: bool = True) -> T:
    """Await a call and record whether the conductor answered.

    `is_patient`: a timeout means that the conductor failed; otherwise the caller's own deadline was too short.
    """
    if stream.failed_s is not None:
        stream.failed_s = monotonic()  # one caller probes it after the pause; the others do not wait for it
    try:
        reply = await asking
    except (Unavailable, ControlDeadlineExceeded) as error:
        if is_patient or isinstance(error, Unavailable):
            stream.failed_s = monotonic()
        raise
    stream.failed_s = None
    return reply
