"""An owner that lies: its connection ends, each operation ends in time, no thread dies, and what comes next is done."""

import fcntl
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messenger import (
    Endpoint,
    PeerLost,
    RemoteAccessError,
    RemoteKey,
    TransferCancelled,
    TransferDeadlineExceeded,
    TransferError,
)
from messenger.config import boot_id
from messenger.frames import (
    Ack,
    ConnectionReject,
    Fabric,
    Goodbye,
    Hello,
    KeyInfo,
    Message,
    Notify,
    Offer,
    Read,
    Refused,
    Welcome,
    Write,
    encode,
)
from messenger.memory import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK
from messenger.shm.grant_page import PAGE_ID, PAGE_NBYTES, GrantPage
from messenger.sockets import SocketLink

pytestmark = pytest.mark.transports("tcp", "shm")

NBYTES = 1 << 16
KEY = RemoteKey(7, 1234, 0, NBYTES, True, True)

Serve = Callable[[SocketLink], None]


class Liar:
    """A real socket that greets as an owner does, and then treats each connection as `serve` has it."""

    def __init__(self, transport: str, folder: Path) -> None:
        if transport == "shm":
            path = str(folder / "liar.sock")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen()
            self.endpoint = Endpoint("liar", 1, boot_id(), "", 0, path)
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.endpoint = Endpoint("liar", 1, boot_id(), "127.0.0.1", self._listener.getsockname()[1], "")
        self.serve: Serve = honest
        self._links: set[SocketLink] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def becomes(self, serve: Serve) -> None:
        """Connections that were made before end: the caller makes them again, and uses those for what follows."""
        self.serve = serve
        for link in list(self._links):
            link.cut()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for link in list(self._links):
            link.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            link = SocketLink(sock, "a caller")
            self._links.add(link)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._talk, args=(link, self.serve)))
            self._threads[-1].start()

    def _talk(self, link: SocketLink, serve: Serve) -> None:
        try:
            assert isinstance(link.receive(), Hello)
            link.send(Welcome("liar", 1))
            serve(link)
        except OSError:
            pass
        finally:
            link.cut()
            self._links.discard(link)
            link.close()


def honest(link: SocketLink) -> None:
    """Does nothing that is asked for, and says that it did. (What is offered by shm stays unmapped.)"""
    is_tcp = not link.is_unix
    while not isinstance(message := link.receive(), Goodbye):
        if isinstance(message, Offer):
            os.close(link.take_fd())
            continue
        assert isinstance(message, Write | Read | Notify)
        nbytes = 0 if isinstance(message, Notify) else message.nbytes
        if is_tcp and isinstance(message, Write):
            link.drain(nbytes)
        served = isinstance(message, Read)
        if served and not is_tcp:
            link.send(Refused(message.seq, "nothing is shared here"))
        else:
            link.send(Ack(message.seq, nbytes), [memoryview(bytes(nbytes))] if served else ())


def hold(link: SocketLink) -> None:
    """Read nothing more until the caller leaves."""
    while not link.peer_is_gone():
        threading.Event().wait(0.005)


@pytest.fixture
def liar(nothing_left_behind: None, transport: str, tmp_path: Path) -> Iterator[Liar]:
    one = Liar(transport, tmp_path)
    yield one
    one.close()


@pytest.fixture
def caller(liar: Liar, make_node: Any) -> Any:
    node = make_node("a", 8 << 20)
    yield node
    node.messenger.close()


@pytest.mark.transports("tcp")
def test_a_write_is_not_done_before_it_was_sent_whatever_its_owner_says(caller: Any, liar: Liar) -> None:
    """Its local memory would be taken for free, and is still to be read."""

    def lie(link: SocketLink) -> None:
        message = link.receive()
        assert isinstance(message, Write)
        if liar.serve is not lie:
            return  # the caller had connected again before the lies ended, and comes once more
        link.send(Ack(message.seq, message.nbytes))
        hold(link)

    liar.serve = lie
    peer = caller.messenger.connect(liar.endpoint)
    for _ in range(3):
        with pytest.raises(TransferDeadlineExceeded):
            peer.write(KEY, caller.region, [[0, 0, 8 << 20]], deadline_s=0.3).result(30)
    liar.becomes(honest)
    assert peer.write(KEY, caller.region, [[0, 0, 8 << 20]]).result().nbytes == 8 << 20


@pytest.mark.transports("tcp")
def test_a_write_that_is_answered_too_early_is_done_as_soon_as_it_was_sent(caller: Any, liar: Liar) -> None:
    told, go_on = threading.Event(), threading.Event()

    def answer_too_early(link: SocketLink) -> None:
        message = link.receive()
        assert isinstance(message, Write)
        link.send(Ack(message.seq, message.nbytes))
        told.set()
        go_on.wait(60)
        link.drain(message.nbytes)
        honest(link)

    liar.serve = answer_too_early
    peer = caller.messenger.connect(liar.endpoint)
    writes = [peer.write(KEY, caller.region, [[0, 0, 8 << 20]]) for _ in range(2)]
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.extend(write.result().nbytes for write in writes))
    waiter.start()
    assert told.wait(60)
    assert not any(write.done() for write in writes)
    go_on.set()
    waiter.join(60)
    assert results == [8 << 20] * 2


@pytest.mark.transports("tcp")
@pytest.mark.parametrize("nbytes", [NBYTES, 8 << 20])
def test_ctrl_c_ends_the_main_threads_wait_for_an_owner_that_stands_still_in_the_middle_of_a_payload(
    caller: Any, liar: Liar, wait_until: Callable[..., None], nbytes: int
) -> None:
    def send_half(link: SocketLink) -> None:
        while isinstance(message := link.receive(), Read):
            link.send(Ack(message.seq, message.nbytes), [memoryview(b"\1" * (max(message.nbytes // 2, 1)))])
        hold(link)

    def interrupt() -> None:
        wait_until(lambda: caller.array[nbytes // 2 - 1] and peer._streams[1]._receiver._helper, "it receives", 60)
        os.kill(os.getpid(), signal.SIGINT)

    liar.serve = send_half
    peer = caller.messenger.connect(liar.endpoint)
    interrupting = threading.Thread(target=interrupt)
    peer.read(KEY, caller.region, [[0, 0, 1]]).result()
    interrupting.start()
    read = peer.read(RemoteKey(7, 1, 0, nbytes, True, True), caller.region, [[0, 0, nbytes]], deadline_s=60)
    with pytest.raises(KeyboardInterrupt):
        read.result()
    assert not read.done()
    interrupting.join()
    liar.becomes(honest)
    assert read.result().nbytes == nbytes
    assert not caller.array[:nbytes].any()


def test_answers_that_come_in_one_go_each_end_their_own_request(caller: Any, liar: Liar) -> None:
    def answer_in_one_go(link: SocketLink) -> None:
        asked: list[Notify] = []
        while len(asked) < 5:
            message = link.receive()
            assert isinstance(message, Notify)
            asked.append(message)
        answers = [Ack(one.seq, 0) if one.tag == b"good" else Refused(one.seq, "not this one") for one in asked]
        link._sock.sendall(b"".join(map(encode, answers)))
        honest(link)

    liar.serve = answer_in_one_go
    peer = caller.messenger.connect(liar.endpoint)
    futures = [peer.notify(tag, b"") for tag in (b"good", b"good", b"bad", b"good", b"bad")]
    errors = [future.exception() for future in futures]
    assert [isinstance(error, RemoteAccessError) for error in errors] == [False, False, True, False, True]
    assert errors[0] is errors[1] is errors[3] is None
    assert peer.notify(b"more", b"").result() is None


def test_a_request_over_which_each_connection_breaks_is_given_up_and_holds_up_no_other(caller: Any, liar: Liar) -> None:
    asked: list[Message] = []

    def leave_at_a_notify(link: SocketLink) -> None:
        while isinstance(message := link.receive(), Notify):
            if message.tag == b"bad":
                asked.append(message)
                return
            link.send(Ack(message.seq, 0))

    liar.serve = leave_at_a_notify
    peer = caller.messenger.connect(liar.endpoint)
    futures = [peer.notify(tag, b"", deadline_s=600) for tag in (b"good", b"bad", b"behind")]
    assert futures[0].result(60) is None
    with pytest.raises(PeerLost, match="4 connections in a row broke over it"):
        futures[1].result(60)
    assert futures[2].result(60) is None
    assert len(asked) == 5, "over the first connection something was answered"


def test_connections_cut_for_operations_that_end_early_are_not_held_against_what_they_carried(
    caller: Any, liar: Liar
) -> None:
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def answer_late(link: SocketLink) -> None:
        both = link.receive(), link.receive()
        asked.release()
        while not may_answer.wait(0.005) and not link.peer_is_gone():
            pass
        for message in both:
            assert isinstance(message, Notify)
            link.send(Ack(message.seq, 0))
        honest(link)

    liar.serve = answer_late
    peer = caller.messenger.connect(liar.endpoint)
    patient = peer.notify(b"patient", b"", deadline_s=600)
    for number in range(8):
        hasty = peer.notify(b"hasty", b"%d" % number, deadline_s=600)
        assert asked.acquire(timeout=60)
        assert hasty.cancel()
        assert isinstance(hasty.exception(60), TransferCancelled)
    last = peer.notify(b"last", b"", deadline_s=600)
    may_answer.set()
    assert patient.result(60) is None
    assert last.result(60) is None


def memfd(nbytes: int, *, sealed: bool) -> int:
    fd = os.memfd_create("lie", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    return fd


def say(link: SocketLink, lie: Message | bytes, asked: Message | None, page: GrantPage | None) -> None:
    """An answer whose number is -1 has that of the request; a page of the right size shows the key."""
    if isinstance(lie, Ack | Refused) and lie.seq == -1 and isinstance(asked, Write | Read | Notify):
        lie = lie._replace(seq=asked.seq)
    if isinstance(lie, bytes):
        link._sock.sendall(lie)
    elif page is not None and lie == Offer(PAGE_ID, PAGE_NBYTES):
        link.send(lie, fd=page.memory.fd)
    elif isinstance(lie, Offer) and link.is_unix and 0 < lie.nbytes <= 1 << 30:
        fd = memfd(lie.nbytes, sealed=lie.nbytes % 3 > 0)
        try:
            link.send(lie, fd=fd)
        finally:  # the caller may have gone
            os.close(fd)
    else:
        link.send(lie)


numbers = st.one_of(st.integers(-3, 6), st.sampled_from([KEY.region_id, NBYTES, 1 << 40, -(1 << 63), (1 << 63) - 1]))
small = st.binary(max_size=64)
lies = st.one_of(
    small,
    st.builds(Ack, numbers, numbers),
    st.builds(Ack, st.just(-1), st.sampled_from([0, 100, NBYTES, 1 << 62])),
    st.builds(Refused, st.one_of(st.just(-1), numbers), st.text(max_size=20)),
    st.builds(Offer, st.sampled_from([PAGE_ID, 7, 8]), st.sampled_from([0, 100, PAGE_NBYTES, NBYTES, 1 << 62])),
    st.builds(Welcome, st.just("liar"), st.integers(0, 3)),
    st.builds(ConnectionReject, st.sampled_from(["restarted", "full", "?"]), st.text(max_size=20)),
    st.builds(Notify, numbers, small, small),
    st.builds(Read, numbers, numbers, st.integers(0, 99), numbers, small),
    st.builds(Fabric, small),
    st.builds(
        KeyInfo,
        numbers,
        st.integers(0, 9),
        numbers,
        st.integers(0, 9),
        numbers,
        numbers,
        st.booleans(),
        st.booleans(),
        small,
        st.text(max_size=9),
    ),
    st.just(Goodbye()),
)
"""Frames that an owner sends, frames that it never does, and no frames."""


@pytest.fixture
def page(transport: str) -> Iterator[GrantPage | None]:
    """Data that an owner exposes to its callers over shm."""
    if transport != "shm":
        yield None
        return
    one = GrantPage("liar")
    one.show(KEY)
    yield one
    one.close()


def test_no_lie_ends_a_thread_or_holds_up_what_comes_after(
    caller: Any, liar: Liar, page: GrantPage | None, caplog: pytest.LogCaptureFixture, fewer: Callable[[int], int]
) -> None:
    peer = caller.messenger.connect(liar.endpoint)

    @settings(max_examples=fewer(60), deadline=None)
    @given(told=st.lists(st.tuples(st.booleans(), lies), min_size=1, max_size=6), reads_all=st.booleans())
    def check(told: Sequence[tuple[bool, Message | bytes]], reads_all: bool) -> None:
        def lie(link: SocketLink) -> None:
            asked: Message | None = None
            for after_request, one in told:
                if after_request:
                    asked = link.receive()
                    if reads_all and isinstance(asked, Write) and not link.is_unix:
                        link.drain(asked.nbytes)
                say(link, one, asked, page)

        liar.serve = lie
        caplog.clear()
        futures = [
            peer.write(KEY, caller.region, [[0, 0, 100]], deadline_s=5.0),
            peer.read(KEY, caller.region, [[200, 0, 100]], deadline_s=5.0),
            peer.notify(b"t", b"", deadline_s=5.0),
            peer.write_notify(KEY, caller.region, [[0, 0, NBYTES]], b"t", b"", deadline_s=5.0),
            peer.read(KEY, caller.region, [[NBYTES, 0, NBYTES]], deadline_s=5.0),
        ]
        for future in futures:
            error = future.exception(60)
            assert error is None or isinstance(error, TransferError)
        liar.becomes(honest)
        peer.write_notify(KEY, caller.region, [[0, 0, NBYTES]], b"t", b"").result(60)
        assert caller.messenger.validate() == []
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []

    check()
