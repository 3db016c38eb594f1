"""One task per request: attempts in any order, cancels at any time, and no job is over before its cleanup is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from moonpool_proto.v1.worker_pb2 import Failure, Submit
from worker.errors import RequestFailed, RequestRefused
from worker.jobs import RequestJobs
from worker.request import Request


class Book:
    """Jobs, and what they said."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.over: list[int] = []
        self.jobs = RequestJobs(lambda _, failure: self.failures.append(failure), lambda r: self.over.append(r.attempt))


def request(attempt: int = 0, timeout_s: float = 60) -> Request:
    submit = Submit(request_id="r", attempt=attempt, frontend_id="front", timeout_s=timeout_s)
    submit.prompt_ids, submit.chain_seed = np.zeros(3, dtype="<i4").tobytes(), bytes(16)
    submit.sampling.max_tokens = 4
    submit.sampling.top_p = 1.0
    return Request.from_proto(submit, vocab_size=8, max_model_len=64, block_tokens=8)


class Work:
    """Waits until cancelled, then cleans up for as long as `may_end` is unset."""

    def __init__(self) -> None:
        self.began, self.cleaning, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        try:
            self.began.set()
            await asyncio.Event().wait()
        finally:
            self.cleaning.set()
            while not self.may_end.is_set():
                try:
                    await self.may_end.wait()
                except asyncio.CancelledError:
                    continue
            self.ended = True


async def test_a_job_cancelled_before_its_first_step_leaves_no_trace() -> None:
    book, work = Book(), Work()
    job = book.jobs.run(request(), work.run())
    book.jobs.cancel("r", 0)
    await asyncio.wait([job])
    assert (len(book.jobs), book.over, work.began.is_set()) == (0, [0], False)


async def test_a_job_cancelled_twice_is_not_over_before_its_cleanup() -> None:
    book, work = Book(), Work()
    job = book.jobs.run(request(), work.run())
    await work.began.wait()
    book.jobs.cancel("r", 0)
    await work.cleaning.wait()
    book.jobs.cancel("r", 0)
    ending = asyncio.ensure_future(book.jobs.cancel_all())
    await asyncio.sleep(0)
    work.may_end.set()
    await ending
    assert (job.done(), work.ended, len(book.jobs)) == (True, True, 0)


@pytest.mark.parametrize(("attempt", "keep_kv", "kept"), [(0, True, True), (1, True, False), (0, False, False)])
async def test_only_a_cancel_that_keeps_this_attempts_kv_leaves_the_job_its_end(
    attempt: int, keep_kv: bool, kept: bool
) -> None:
    book, asked, one = Book(), asyncio.Event(), request()

    async def work() -> None:
        with book.jobs.ended_by(one, lambda _: asked.set()):
            await asked.wait()

    job = book.jobs.run(one, work())
    await asyncio.sleep(0)
    book.jobs.cancel("r", attempt, keep_kv=keep_kv)
    await asyncio.wait([job])
    assert (asked.is_set(), len(book.jobs)) == (kept, 0)
    with pytest.raises(RequestRefused, match="after attempt"):
        book.jobs.run(request(0), Work().run())


async def test_a_cancel_that_keeps_a_later_attempts_kv_does_not_end_the_earlier_one_instead() -> None:
    book, asked, first, second = Book(), asyncio.Event(), Work(), Work()

    async def work() -> None:
        with book.jobs.ended_by(one, lambda _: asked.set()):
            await first.run()

    one = request(0)
    book.jobs.run(one, work())
    await first.began.wait()
    book.jobs.run(request(1), second.run())
    await first.cleaning.wait()
    book.jobs.cancel("r", 1, keep_kv=True)
    first.may_end.set()
    second.may_end.set()
    await asyncio.sleep(0)
    await book.jobs.wait_idle(10)
    assert (asked.is_set(), second.began.is_set(), len(book.jobs)) == (False, False, 0)


async def test_a_later_attempt_begins_when_the_earlier_one_has_cleaned_up() -> None:
    book, first, second = Book(), Work(), Work()
    book.jobs.run(request(0), first.run())
    await first.began.wait()
    book.jobs.run(request(1), second.run())
    await first.cleaning.wait()
    assert not second.began.is_set()
    first.may_end.set()
    await second.began.wait()
    assert first.ended
    second.may_end.set()
    await book.jobs.cancel_all()
    assert book.over == [0, 1]


@pytest.mark.parametrize("late", [0, 1])
async def test_an_attempt_that_comes_late_is_refused_and_the_newer_one_goes_on(late: int) -> None:
    book, newer = Book(), Work()
    book.jobs.run(request(1), newer.run())
    await newer.began.wait()
    with pytest.raises(RequestRefused, match=f"attempt {late} of request r"):
        book.jobs.run(request(late), Work().run())
    assert not newer.cleaning.is_set()
    newer.may_end.set()
    await book.jobs.cancel_all()


async def test_a_cancel_that_overtakes_its_attempt_refuses_it_and_no_later_one() -> None:
    book, work = Book(), Work()
    book.jobs.cancel("r", 3)
    book.jobs.cancel("r", 1)
    with pytest.raises(RequestRefused, match="after attempt 3"):
        book.jobs.run(request(3), Work().run())
    book.jobs.run(request(4), work.run())
    await work.began.wait()
    work.may_end.set()
    await book.jobs.cancel_all()


async def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("make", "code", "retryable"),
    [
        (lambda: raising(RequestRefused("too_long", "no")), "too_long", False),
        (lambda: raising(RequestFailed("engine", "broken")), "engine", True),
        (lambda: raising(RuntimeError("planted")), "internal", True),
        (lambda: asyncio.Event().wait(), "deadline", False),
    ],
)
async def test_failures_are_told_by_name(make: Callable[[], object], code: str, retryable: bool) -> None:
    book = Book()
    job = book.jobs.run(request(timeout_s=0.05), make())  # type: ignore[arg-type]
    await asyncio.wait([job])
    assert [(f.code, f.retryable) for f in book.failures] == [(code, retryable)]
    assert len(book.jobs) == 0
