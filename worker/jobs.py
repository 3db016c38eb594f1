"""One task per request on a node. A later attempt replaces an earlier one, never the other way round.

Messages about a request arrive on several channels (the stream of the frontend, calls of prefill nodes) and may
overtake each other, so cancels are remembered: the attempt that a cancel names may not have arrived yet.
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
    """The running jobs of all requests, one task each. Lives on the event loop.

    Calls `on_failure(request, failure)` when a job fails and `on_over(request)` when it ends.
    """

    def __init__(self, on_failure: OnFailure, on_over: Callable[[Request], None]) -> None:
        self._on_failure = on_failure
        self._on_over = on_over
        self._jobs: dict[str, tuple[Request, Job]] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()  # the highest attempt cancelled, by request
        self._endings: dict[tuple[str, int], Callable[[int], None]] = {}  # by request and attempt
        self._limits: dict[tuple[str, int], asyncio.Timeout] = {}  # of endless requests

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, request: Request, work: Work, *, on_failure: OnFailure | None = None) -> Job:
        """Run a request's coroutine as its job until it ends; a failure is reported to `on_failure`.

        An earlier attempt that still runs here is cancelled, and `work` begins once that attempt has released
        everything. Raises RequestRefused if this attempt was cancelled before, or a later attempt arrived first.
        """
        previous = self._jobs.get(request.request_id)
        newest = max(self._cancelled.get(request.request_id, -1), previous[0].attempt if previous else -1)
        if request.attempt <= newest:
            work.close()
            raise RequestRefused(
                "superseded",
                f"attempt {request.attempt} of request {request.request_id} arrived after attempt {newest}",
            )
        report = on_failure or self._on_failure
        task = asyncio.ensure_future(self._run(request, work, previous[1] if previous else None, report))
        self._jobs[request.request_id] = (request, task)
        # A callback, because a task that is cancelled before its first step never runs its own code.
        task.add_done_callback(lambda _: self._over(request, work))
        return task

    def cancel(self, request_id: str, attempt: int, *, keep_kv: bool = False, kept_tokens: int = 0) -> None:
        """Cancel this and earlier attempts of a request, whether they run here or are still to arrive.

        With `keep_kv` the answer is complete: a job inside `ended_by` then finishes by itself and receives
        `kept_tokens`, the number of the answer's tokens to save (0: unknown).
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
        """Let a cancel with `keep_kv` call `end(kept_tokens)` instead of cancelling the job; used by jobs with KV to
        save.
        """
        key = request.request_id, request.attempt
        self._endings[key] = end
        try:
            yield
        finally:
            del self._endings[key]

    def renew(self, request: Request) -> None:
        """Extend the deadline of an endless request that has generated a token by its idle time."""
        limit = self._limits.get(request.key)
        if limit is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + request.idle_s)

    async def cancel_frontend(self, frontend_id: str) -> None:
        """Cancel all requests of a frontend that is gone. Returns when they have released everything."""
        orphans = [task for request, task in self._jobs.values() if request.frontend_id == frontend_id]
        if orphans:
            log.warning("frontend %s is gone; cancelling its %d requests", frontend_id, len(orphans))
        await _cancelled(orphans)

    async def cancel_all(self) -> None:
        """Cancel every job. Returns when all have released everything."""
        while self._jobs:
            await _cancelled([task for _, task in self._jobs.values()])

    async def wait_idle(self, grace_s: float) -> None:
        """Wait for the present jobs to end, at most `grace_s`."""
        tasks = [task for _, task in self._jobs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)

    async def _run(self, request: Request, work: Work, previous: Job | None, report: OnFailure) -> None:
        with logs.request(request.request_id, request.attempt):
            outcome = "cancelled"
            try:
                outcome = await self._outcome(request, work, previous, report)
            finally:
                seconds = round(time.monotonic() - request.submitted, 4)
                fields = {"outcome": outcome, "prompt_tokens": len(request.prompt), "seconds": seconds}
                log.info("request over here", extra=fields)

    async def _outcome(self, request: Request, work: Work, previous: Job | None, report: OnFailure) -> str:
        try:
            if previous is not None:
                await _cancelled([previous])
            async with asyncio.timeout(max(0.001, request.time_left_s)) as limit:
                if request.idle_s:
                    self._limits[request.key] = limit
                await work
            return "finished"
        except RequestRefused as error:
            _fail(report, request, error.code, str(error), retryable=False)
        except RequestFailed as error:
            _fail(report, request, error.code, str(error), retryable=True, suspect=error.suspect_node_id)
        except TimeoutError:
            _fail(report, request, "deadline", "the request's deadline has passed", retryable=False)
        except asyncio.CancelledError:
            return "cancelled"
        except Exception as error:
            log.exception("request failed")
            _fail(report, request, "internal", f"{type(error).__name__}: {error}", retryable=True)
        return "failed"

    def _over(self, request: Request, work: Work) -> None:
        work.close()  # not started yet if the job was cancelled early
        self._limits.pop(request.key, None)
        job = self._jobs.get(request.request_id)
        if job is not None and job[0] is request:
            del self._jobs[request.request_id]
        self._on_over(request)


def _fail(report: OnFailure, request: Request, code: str, message: str, *, retryable: bool, suspect: str = "") -> None:
    log.warning("request failed (%s): %s", code, message)
    failure = Failure(
        request_id=request.request_id,
        attempt=request.attempt,
        code=code,
        message=message,
        retryable=retryable,
        suspect_node_id=suspect,
    )
    report(request, failure)


async def _cancelled(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.cancel()
    if jobs:
        await shielded(asyncio.ensure_future(asyncio.wait(jobs)))
