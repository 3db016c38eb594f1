"""One task per request on a node. A later attempt takes an earlier one's place, and never the other way round.

Messages about a request come by several ways (the frontend's stream, a prefill node's calls), so any two of them may
overtake each other: a cancel is remembered, for what it cancels may not have come yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from moonpool_proto.v1.worker_pb2 import Failure
from telemetry import logs
from worker.errors import RequestFailed, RequestRefused
from worker.request import Request
from worker.shielded_wait import shielded

log = logging.getLogger(__name__)

MAX_CANCELS = 8192

Work = Coroutine[Any, Any, None]
Job = asyncio.Task[None]
OnFailure = Callable[[Request, Failure], None]


class RequestJobs:
    """Lives on the event loop. `on_failure(request, failure)` and `on_over(request)` are called as each job ends."""

    def __init__(self, on_failure: OnFailure, on_over: Callable[[Request], None]) -> None:
        self._on_failure = on_failure
        self._on_over = on_over
        self._jobs: dict[str, tuple[Request, Job]] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()  # the highest attempt cancelled, by request
        self._endings: dict[tuple[str, int], Callable[[int], None]] = {}  # by request and attempt
        self._limits: dict[tuple[str, int], asyncio.Timeout] = {}  # of endless ones

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, request: Request, work: Work, *, on_failure: OnFailure | None = None) -> Job:
        """Run a request's coroutine; its failure is reported, to `on_failure` if given; its end frees its name.

        An earlier attempt that still runs here is cancelled, and `work` begins once that one has given everything
        back. Raises RequestRefused when this attempt was cancelled, or a later one came, before it.
        """
        previous = self._jobs.get(request.request_id)
        newest = max(self._cancelled.get(request.request_id, -1), previous[0].attempt if previous else -1)
        if request.attempt <= newest:
            work.close()
            raise RequestRefused(
                "superseded", f"attempt {request.attempt} of request {request.request_id} comes after attempt {newest}"
            )
        told = on_failure or self._on_failure
        task = asyncio.ensure_future(self._run(request, work, previous[1] if previous else None, told))
        self._jobs[request.request_id] = (request, task)
        # A callback, since a task that is cancelled before its first step runs no line of its own.
        task.add_done_callback(lambda _: self._over(request, work))
        return task

    def cancel(self, request_id: str, attempt: int, *, keep_kv: bool = False, kept_tokens: int = 0) -> None:
        """Cancel this attempt of a request, or an earlier one, whether it runs here or is still to come.

        With `keep_kv` the attempt has come to a good end: a job inside `ended_by` is told by that, and how many of the
        answer's tokens are worth keeping (0: not known).
        """
        self._cancelled[request_id] = max(attempt, self._cancelled.pop(request_id, attempt))
        if len(self._cancelled) > MAX_CANCELS:
            self._cancelled.popitem(last=False)
        job = self._jobs.get(request_id)
        if job is None or job[0].attempt > attempt:
            return
        end = self._endings.get((request_id, attempt)) if keep_kv and job[0].attempt == attempt else None
        if end is not None:
            end(kept_tokens)
        else:
            job[1].cancel()

    @contextlib.contextmanager
    def ended_by(self, request: Request, end: Callable[[int], None]) -> Iterator[None]:
        """For a job that has KV to keep: a cancel that keeps it calls `end(kept_tokens)`, and the job finishes by
        itself."""
        key = request.request_id, request.attempt
        self._endings[key] = end
        try:
            yield
        finally:
            del self._endings[key]

    def renew(self, request: Request) -> None:
        """An endless request has a token: it has so long again for the next one."""
        limit = self._limits.get(request.key)
        if limit is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + request.idle_s)

    async def cancel_frontend(self, frontend_id: str) -> None:
        """A frontend is gone: nobody waits for its requests. Returns when they have given everything back."""
        orphans = [task for request, task in self._jobs.values() if request.frontend_id == frontend_id]
        if orphans:
            log.warning("frontend %s is gone; cancelling its %d requests", frontend_id, len(orphans))
        await _cancelled(orphans)

    async def cancel_all(self) -> None:
        """Cancel every job; returns when all have given everything back."""
        while self._jobs:
            await _cancelled([task for _, task in self._jobs.values()])

    async def wait_idle(self, grace_s: float) -> None:
        """Wait until the jobs at hand are done, at most `grace_s`."""
        tasks = [task for _, task in self._jobs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)

    async def _run(self, request: Request, work: Work, previous: Job | None, told: OnFailure) -> None:
        with logs.request(request.request_id, request.attempt):
            outcome = "cancelled"
            try:
                outcome = await self._outcome(request, work, previous, told)
            finally:
                seconds = round(time.monotonic() - request.submitted, 4)
                said = {"outcome": outcome, "prompt_tokens": len(request.prompt), "seconds": seconds}
                log.info("request over here", extra=said)

    async def _outcome(self, request: Request, work: Work, previous: Job | None, told: OnFailure) -> str:
        try:
            if previous is not None:
                await _cancelled([previous])
            async with asyncio.timeout(max(0.001, request.time_left_s)) as limit:
                if request.idle_s:
                    self._limits[request.key] = limit
                await work
            return "finished"
        except RequestRefused as error:
            _fail(told, request, error.code, str(error), retryable=False)
        except RequestFailed as error:
            _fail(told, request, error.code, str(error), retryable=True, suspect=error.suspect_node_id)
        except TimeoutError:
            _fail(told, request, "deadline", "the request's deadline has passed", retryable=False)
        except asyncio.CancelledError:
            return "cancelled"
        except Exception as error:
            log.exception("request failed")
            _fail(told, request, "internal", f"{type(error).__name__}: {error}", retryable=True)
        return "failed"

    def _over(self, request: Request, work: Work) -> None:
        work.close()  # not begun, if the job was cancelled early
        self._limits.pop(request.key, None)
        job = self._jobs.get(request.request_id)
        if job is not None and job[0] is request:
            del self._jobs[request.request_id]
        self._on_over(request)


def _fail(told: OnFailure, request: Request, code: str, message: str, *, retryable: bool, suspect: str = "") -> None:
    log.warning("request failed (%s): %s", code, message)
    failure = Failure(
        request_id=request.request_id,
        attempt=request.attempt,
        code=code,
        message=message,
        retryable=retryable,
        suspect_node_id=suspect,
    )
    told(request, failure)


async def _cancelled(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.cancel()
    if jobs:
        await shielded(asyncio.ensure_future(asyncio.wait(jobs)))
