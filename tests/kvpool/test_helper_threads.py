"""Work shared with helper threads: it is over when `finish` returns, and helpers that come late leave it alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.helper_threads import HelperThreads


def test_finish_waits_for_a_helper_in_the_middle_of_a_piece() -> None:
    helpers, begun, released = HelperThreads(1, "helper"), threading.Event(), threading.Event()
    ended: list[str] = []

    def run() -> None:
        if threading.current_thread().name == "helper-0":
            begun.set()
            released.wait()
            ended.append("helper")
        else:
            begun.wait()

    with ThreadPoolExecutor(1) as caller:
        finished = caller.submit(helpers.share(run, 1).finish)
        begun.wait()
        assert not finished.done()
        released.set()
        finished.result()
    assert ended == ["helper"]
    helpers.stop()


def test_work_does_not_wait_for_a_busy_helper_which_then_skips_it() -> None:
    helpers, begun, released = HelperThreads(1, "helper"), threading.Event(), threading.Event()
    callers: list[str] = []

    def block() -> None:
        begun.set()
        released.wait()

    busy = helpers.share(block, 1)
    begun.wait()
    helpers.share(lambda: callers.append(threading.current_thread().name), 1).finish()
    released.set()
    busy.finish()
    helpers.stop()
    assert callers == [threading.current_thread().name]


def test_an_error_of_the_caller_is_raised_after_the_helpers_have_ended() -> None:
    helpers, begun, ended = HelperThreads(2, "helper"), threading.Event(), threading.Event()

    def run() -> None:
        if threading.current_thread().name.startswith("helper"):
            begun.set()
            ended.set()
        else:
            begun.wait()
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        helpers.share(run, 2).finish()
    assert ended.is_set()
    helpers.stop()
