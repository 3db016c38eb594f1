"""Completions are futures to everybody who knows the standard ones, whenever and however they look."""

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref

import pytest

from messenger.completion import Completion


def settle_soon(completion: Completion[int], result: int) -> threading.Thread:
    thread = threading.Thread(target=completion.settle, args=(result, None))
    thread.start()
    return thread


def test_results_and_failures_come_to_whoever_waits() -> None:
    completion: Completion[int] = Completion()
    assert completion.running()
    assert not completion.done()
    got: list[int] = []
    waiters = [threading.Thread(target=lambda: got.append(completion.result(60))) for _ in range(4)]
    waiters += [threading.Thread(target=lambda: got.append(completion.result())) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    completion.settle(5, None)
    for waiter in waiters:
        waiter.join()
    assert got == [5] * 8
    assert completion.done()
    assert completion.exception() is None
    failed: Completion[int] = Completion()
    failed.settle(None, ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        failed.result()
    assert isinstance(failed.exception(0.0), ValueError)


def test_waiting_ends_at_its_time_limit_and_may_begin_again() -> None:
    completion: Completion[int] = Completion()
    for wait in (completion.result, completion.exception):
        with pytest.raises(TimeoutError):
            wait(0.01)
        with pytest.raises(concurrent.futures.TimeoutError):
            wait(-1)
    thread = settle_soon(completion, 3)
    assert completion.result(60) == 3
    thread.join()


def test_callbacks_run_once_before_and_after_the_end_and_a_failing_one_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    completion: Completion[int] = Completion()
    calls: list[int] = []

    def fail(_: object) -> None:
        raise RuntimeError("broken callback")

    completion.add_done_callback(fail)
    completion.add_done_callback(lambda future: calls.append(future.result()))
    completion.settle(1, None)
    completion.add_done_callback(fail)
    completion.add_done_callback(lambda future: calls.append(future.result()))
    assert calls == [1, 1]
    assert caplog.text.count("RuntimeError: broken callback") == 2


def test_the_standard_library_waits_for_them() -> None:
    completions: list[Completion[int]] = [Completion() for _ in range(20)]
    threads: list[threading.Thread] = []

    def settle() -> None:
        for n, completion in enumerate(completions):
            if n % 2:
                completion.settle(n, None)
            else:
                completion.settle(None, ValueError(n))

    thread = threading.Thread(target=settle)
    threads.append(thread)
    waiting = concurrent.futures.as_completed(completions, 60)
    thread.start()
    assert set(waiting) == set(completions)
    done, pending = concurrent.futures.wait(completions, 60, concurrent.futures.FIRST_EXCEPTION)
    assert done == set(completions)
    assert not pending
    thread.join()
    left: Completion[int] = Completion()
    done, pending = concurrent.futures.wait([*completions[:2], left], 0.01)
    assert pending == {left}
    assert "pending" in repr(left) or "running" in repr(left)


def test_asyncio_waits_for_them() -> None:
    async def run() -> list[object]:
        completions: list[Completion[int]] = [Completion() for _ in range(10)]
        waiting = asyncio.gather(*(asyncio.wrap_future(one) for one in completions), return_exceptions=True)
        await asyncio.sleep(0)
        for n, completion in enumerate(completions):
            settle_soon(completion, n).join()
        return await waiting

    assert asyncio.run(run()) == list(range(10))


def test_an_end_is_never_missed_however_it_races_with_whoever_begins_to_look() -> None:
    end_s = time.monotonic() + 0.5
    rounds = 0
    while time.monotonic() < end_s or rounds < 50:
        completion: Completion[int] = Completion()
        called = threading.Event()
        thread = settle_soon(completion, rounds)
        if rounds % 3 == 0:
            assert completion.result(60) == rounds
        elif rounds % 3 == 1:
            completion.add_done_callback(lambda _, called=called: called.set())  # type: ignore[misc]
            assert called.wait(60)
        else:
            assert concurrent.futures.wait([completion], 60).not_done == set()
        thread.join()
        rounds += 1


def test_a_failure_does_not_keep_its_completion_alive() -> None:
    completion: Completion[int] = Completion()
    completion.settle(None, ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        completion.result()
    gone = weakref.ref(completion)
    del completion
    gc.collect()
    assert gone() is None
