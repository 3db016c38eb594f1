"""Token streams to the frontends: one multiplexed gRPC stream per (frontend, worker).

A message holds the tokens of one engine step, or of all steps that ended while the message before it was written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from moonpool_proto.v1.worker_pb2 import Failure, Timing, WorkerMessage
from worker.engine_loop import GeneratedToken

log = logging.getLogger(__name__)

MAX_BUFFERED_MESSAGES = 4096
MAX_JOINED_MESSAGES = 64
FIRST_WIRE_WITH_HANDOFF = 2  # some versions of wire 1 support it as well, but cannot be distinguished

T = TypeVar("T")


class FrontendStream:
    """One attached frontend. `closed` is set when it is gone or too slow.

    `knows_handoff` is false for versions that would misread a hand-off's timing as that of a first token.
    """

    def __init__(self, frontend_id: str, incarnation: int, *, knows_handoff: bool = True) -> None:
        self.frontend_id = frontend_id
        self.incarnation = incarnation
        self.knows_handoff = knows_handoff
        self.closed = asyncio.Event()
        self._queue: deque[WorkerMessage] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of `messages`, while the queue is empty

    def send(self, message: WorkerMessage) -> None:
        """Queue a message. A frontend that does not read is disconnected, which bounds the buffer."""
        if self.closed.is_set():
            return
        if len(self._queue) >= MAX_BUFFERED_MESSAGES:
            log.error("frontend %s does not read its token stream; closing it", self.frontend_id)
            self.close()
            return
        self._queue.append(message)
        self._wake()

    def close(self) -> None:
        """End the stream. Idempotent."""
        self.closed.set()
        self._wake()

    async def messages(self) -> AsyncIterator[WorkerMessage]:
        """Yield the queued messages until the stream is closed; those that have queued up meanwhile as one."""
        while not self.closed.is_set():
            if not self._queue:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
                continue
            message = self._queue.popleft()
            for _ in range(min(len(self._queue), MAX_JOINED_MESSAGES - 1)):
                message.MergeFrom(self._queue.popleft())  # appends its tokens and failures
            yield message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenStreams:
    """All attached frontends. Lives on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, FrontendStream] = {}

    def attach(self, frontend_id: str, incarnation: int, *, knows_handoff: bool = True) -> FrontendStream:
        """Register a frontend's new stream, which replaces its old one."""
        old = self._streams.get(frontend_id)
        if old is not None:
            old.close()
        stream = FrontendStream(frontend_id, incarnation, knows_handoff=knows_handoff)
        self._streams[frontend_id] = stream
        return stream

    def detach(self, stream: FrontendStream) -> bool:
        """Unregister a stream. Returns True if its frontend is gone, False if a new stream has replaced it."""
        stream.close()
        if self._streams.get(stream.frontend_id) is not stream:
            return False
        del self._streams[stream.frontend_id]
        return True

    def is_attached(self, frontend_id: str) -> bool:
        return frontend_id in self._streams

    def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()

    def __len__(self) -> int:
        return len(self._streams)

    def send_tokens(self, tokens: Iterable[GeneratedToken], timing: dict[str, Timing]) -> None:
        """Send one step's tokens; `timing` by request id accompanies an attempt's first token."""
        by_frontend: dict[str, WorkerMessage] = {}
        for generated in tokens:
            request = generated.sequence.request
            batch = by_frontend.get(request.frontend_id)
            if batch is None:
                batch = by_frontend[request.frontend_id] = WorkerMessage()
            message = batch.tokens.add(
                request_id=request.request_id,
                attempt=request.attempt,
                index=generated.index,
                token_id=generated.token,
                finish=generated.finish,
            )
            if generated.logprobs is not None:
                message.logprobs.CopyFrom(generated.logprobs)
            scores = generated.sequence.prompt_scores
            if scores is not None and generated.index == 0:
                message.prompt_logprobs.CopyFrom(scores.to_proto())
            times = timing.get(request.request_id)
            if times is not None and (not times.HasField("handoff") or self._knows_handoff(request.frontend_id)):
                message.timing.CopyFrom(times)
        for frontend_id, batch in by_frontend.items():
            stream = self._streams.get(frontend_id)
            if stream is not None:
                stream.send(batch)

    def _knows_handoff(self, frontend_id: str) -> bool:
        stream = self._streams.get(frontend_id)
        return stream is not None and stream.knows_handoff

    def send_failure(self, frontend_id: str, failure: Failure) -> None:
        stream = self._streams.get(frontend_id)
        if stream is not None:
            stream.send(WorkerMessage(failures=[failure]))


async def first_message(messages: AsyncIterator[T]) -> T | None:
    """Return the first message of a stream; None if it ended before."""
    async for message in messages:
        return message
    return None
