"""One conductor as a front door reaches it: a channel, and on it the stream that all requests' calls go over.

Calls that come together go in one message, and so do their answers. The stream is opened for the first call, and again
when it broke and there are further ones.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from moonpool_proto.v1 import conductor_pb2, conductor_pb2_grpc
from rpc.control import ControlError, Refused, Unavailable, call, end_if_cancelled, open_channel
from rpc.control import control_error as as_control_error
from rpc.versions import own_software

_log = logging.getLogger(__name__)
_WHAT: Final = "Conductor.Schedule"
_CALLS_PER_MESSAGE: Final = 64
_MESSAGE_NBYTES: Final = 1 << 20  # from which on no further call is added to a message
_AT_ONCE: Final = 16  # answers for which askers are woken before the event loop comes round again
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.5

Schedule = grpc.aio.StreamStreamCall[conductor_pb2.FrontendCalls, conductor_pb2.ConductorAnswers]


@dataclass(eq=False)
class _Call:
    request: conductor_pb2.ScheduleRequest | conductor_pb2.CompleteRequest
    waits: bool  # for a conductor that is away, until its asker gives up
    answer: "asyncio.Future[conductor_pb2.ConductorAnswer]"
    number: int = 0  # once it is sent


class Line:
    """A channel and a stream to the conductor at `target`; `close` in any case."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.failed_s: float | None = None  # when it last failed a call; None since it answered
        self._channel = open_channel(target)
        self.stub: conductor_pb2_grpc.ConductorAsyncStub = conductor_pb2_grpc.ConductorStub(self._channel)
        self._queue: deque[_Call] = deque()  # not sent yet
        self._has_calls = asyncio.Event()
        self._sent: dict[int, _Call] = {}
        self._number = 0
        self._task: asyncio.Task[None] | None = None

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, *, waits: bool, deadline_s: float | None
    ) -> conductor_pb2.ScheduleReply:
        """Ask for a place; `deadline_s` is a duration. `waits`: for a conductor that is away.

        Raises Unavailable, DeadlineExceeded, Refused.
        """
        return (await self._ask(request, waits=waits, deadline_s=deadline_s)).schedule

    async def complete(self, request: conductor_pb2.CompleteRequest, *, deadline_s: float | None) -> None:
        """Say what became of a request, to a conductor that may be away now. Raises as `schedule` does."""
        await self._ask(request, waits=True, deadline_s=deadline_s)

    async def close(self) -> None:
        """End the stream and the channel; running calls fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        trouble = self._unavailable("closed by the front door")
        self._fail([*self._sent.values(), *self._queue], trouble)
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
        asked = _Call(request, waits, asyncio.get_running_loop().create_future())
        self._queue.append(asked)
        self._has_calls.set()
        try:
            answer = await call(asked.answer, what=_WHAT, target=self.target, deadline_s=deadline_s)
        finally:
            self._sent.pop(asked.number, None)
        if answer.WhichOneof("answer") == "refused":
            raise Refused(answer.refused, what=_WHAT, target=self.target, code="INVALID_ARGUMENT")
        return answer

    async def _run(self) -> None:
        pause_s = 0.0
        while True:
            await self._has_calls.wait()
            stream = self.stub.Schedule()
            was_open = asyncio.Event()
            try:
                trouble = await self._converse(stream, was_open)
            except Exception as error:
                _log.exception("the calls to %s broke", self.target)
                trouble = self._unavailable(repr(error))
            end_if_cancelled()
            self._fail(self._sent.values(), trouble)  # whatever became of them
            self._sent.clear()
            if not was_open.is_set():
                self._fail([each for each in self._queue if not each.waits], trouble)
            self._queue = deque(each for each in self._queue if not each.answer.done())
            self._has_calls.set() if self._queue else self._has_calls.clear()
            pause_s = 0.0 if was_open.is_set() else min(2 * pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            if pause_s and self._queue:
                await self._pause(pause_s)

    async def _pause(self, seconds: float) -> None:
        """Not longer than until the next call."""
        self._has_calls.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._has_calls.wait()
        except TimeoutError:
            self._has_calls.set()

    async def _converse(self, stream: Schedule, was_open: asyncio.Event) -> ControlError:
        """Send calls and take answers until the stream ends; the reason it did."""
        writer: asyncio.Task[None] | None = None
        try:
            async for message in stream:
                if writer is None:
                    was_open.set()
                    writer = asyncio.create_task(self._write(stream), name=f"writer of calls to {self.target}")
                for number, answer in enumerate(message.answers, 1):
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)
                    asked = self._sent.pop(answer.number, None)
                    if asked is not None and not asked.answer.done():
                        asked.answer.set_result(answer)
            return self._unavailable("the conductor ended the stream")
        except grpc.aio.AioRpcError as error:
            reason = as_control_error(error, what=_WHAT, target=self.target)
            return reason if isinstance(reason, Unavailable) else self._unavailable(reason.reason)
        finally:
            stream.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, stream: Schedule) -> None:
        is_first = True
        while True:
            await self._has_calls.wait()
            self._has_calls.clear()
            while self._queue:
                message = self._next_message()
                if not message.calls:
                    continue
                if is_first:
                    is_first = False
                    message.software.CopyFrom(own_software())
                try:
                    await stream.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader sees the same end and reports it

    def _next_message(self) -> conductor_pb2.FrontendCalls:
        """What is queued, as far as it fits; calls that were given up are left out."""
        message, nbytes = conductor_pb2.FrontendCalls(), 0
        while self._queue and len(message.calls) < _CALLS_PER_MESSAGE and nbytes < _MESSAGE_NBYTES:
            asked = self._queue.popleft()
            if asked.answer.done():
                continue
            self._number = asked.number = self._number + 1
            self._sent[asked.number] = asked
            request = asked.request
            if isinstance(request, conductor_pb2.ScheduleRequest):
                nbytes += len(request.chain)
                message.calls.add(number=self._number, schedule=request)
            else:
                message.calls.add(number=self._number, complete=request)
        return message

    @staticmethod
    def _fail(calls: Iterable[_Call], trouble: ControlError) -> None:
        for each in calls:
            if not each.answer.done():
                each.answer.set_exception(trouble)

    def _unavailable(self, reason: str) -> Unavailable:
        return Unavailable(reason, what=_WHAT, target=self.target, code="UNAVAILABLE")
