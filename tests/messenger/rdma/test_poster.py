"""The thread that rings in others' stead."""

import threading

from messenger.rdma.poster import Poster


def test_it_rings_on_a_thread_of_its_own_until_it_is_closed() -> None:
    rings: list[str] = []
    rang = threading.Event()

    def ring() -> None:
        rings.append(threading.current_thread().name)
        rang.set()

    poster = Poster(ring, "poster")
    poster.wake()
    assert rang.wait(30)
    poster.close()
    poster.wake()
    assert rings == ["poster"]
    assert "poster" not in {thread.name for thread in threading.enumerate()}


def test_one_that_was_never_woken_begins_no_thread() -> None:
    before = threading.active_count()
    poster = Poster(lambda: None, "poster")
    poster.close()
    poster.wake()
    assert threading.active_count() == before
