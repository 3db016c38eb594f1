"""In which order a caller is answered, whether adapters say so or the owner, on a link that is played."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from messenger.errors import ProtocolError
from messenger.frames import PREFIX, Ack, Frame, KeyInfo, Message, Read, Refused, Write, decode_body, decode_prefix
from messenger.memory import RemoteKey
from messenger.operation import Kind, Notification, Operation, Part, Transfer
from messenger.priority import Priority
from messenger.rdma.connection_io import Movement
from messenger.rdma.requester import RdmaRequester
from messenger.rdma.responder import _extent
from messenger.slices import Slices

KEY = RemoteKey(7, 5, 0, 4096, True, True)
ACCESS = KeyInfo(7, 5, 0, 1 << 20, 0, 4096, True, True, np.array([9], "<u4").tobytes(), "", False)


class Link:
    """Sent frames, and frames to receive."""

    address = "played"
    generation = 0

    def __init__(self) -> None:
        device = SimpleNamespace(register=lambda _: SimpleNamespace(lkey=1, first_address=0), settle=lambda _: None)
        self.lanes = [SimpleNamespace(device=device)]
        self.moved: list[tuple[Movement | None, Message | None]] = []
        self.arriving: list[Message] = []
        self.finished: list[Movement] = []

    def has_room(self) -> bool:
        return True

    def move(self, movement: Movement | None, frame: Frame | None) -> bool:
        self.moved.append((movement, None if frame is None else said(frame)))
        return True

    def receive_unless(self, is_over: Callable[[], bool]) -> Message | None:
        if self.arriving:
            return self.arriving.pop(0)
        assert is_over(), "it waits for ever"
        return None

    def try_receive(self) -> Message | None:
        return self.arriving.pop(0) if self.arriving else None

    def finish(self, movement: Movement) -> None:
        if movement.left_nbytes:
            movement.left_nbytes = 0
            self.finished.append(movement)

    def wake(self) -> None: ...


def said(frame: Frame) -> Message:
    kind, _ = decode_prefix(frame[: PREFIX.size])
    return decode_body(kind, frame[PREFIX.size :])


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def requester(link: Link) -> RdmaRequester:
    made = RdmaRequester(link, lambda _: None)  # type: ignore[arg-type]
    made._accesses[KEY.region_id, KEY.token] = ACCESS
    return made


def part(seq: int, kind: Kind = Kind.WRITE, *, tag: bytes | None = None, offset: int = 0) -> Part:
    operation = Operation(seq, kind, Priority.NORMAL, 10, 1, 0.0, 60.0, None)
    region: Any = SimpleNamespace(region_id=1)
    note = None if tag is None else Notification(tag, b"")
    transfer = None if kind is Kind.NOTIFY else Transfer(KEY, region, Slices(10, [(0, offset, 10)], None))
    made = Part(operation, transfer, note)
    made.seq = seq
    return made


@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.READ])
def test_what_an_adapter_moves_is_answered_by_it_and_the_owner_is_not_told(
    requester: RdmaRequester, link: Link, kind: Kind
) -> None:
    one = part(1, kind)
    requester.begin(one)
    ((movement, frame),) = link.moved
    assert movement is not None
    assert frame is None
    assert requester.try_receive() is None
    movement.left_nbytes = 0
    answer = requester.receive(kind is Kind.READ)
    assert answer == Ack(1, 10)
    assert requester.accept(one, answer)
    assert requester.try_receive() is None


def test_the_owner_is_told_of_what_carries_a_notification_and_of_memory_with_which_it_has_to_do_something(
    requester: RdmaRequester, link: Link
) -> None:
    requester.begin(part(1, tag=b"t"))
    requester._accesses[KEY.region_id, KEY.token] = ACCESS._replace(settles=True)
    requester.begin(part(2))
    assert [(movement is not None, type(frame)) for movement, frame in link.moved] == [(True, Write)] * 2


@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.READ])
def test_what_the_key_does_not_allow_is_not_moved_but_put_to_the_owner(
    requester: RdmaRequester, link: Link, kind: Kind
) -> None:
    beyond = part(1, kind, offset=4090)
    requester.begin(beyond)
    ((movement, frame),) = link.moved
    assert movement is None
    assert isinstance(frame, Read if kind is Kind.READ else Write)
    link.arriving = [Refused(1, "out of bounds")]
    assert requester.receive(False) == Refused(1, "out of bounds")
    requester.refused(beyond)
    assert (KEY.region_id, KEY.token) not in requester._accesses


def test_a_write_that_an_earlier_connection_is_known_to_have_done_is_not_moved_again(
    requester: RdmaRequester, link: Link
) -> None:
    requester._accesses[KEY.region_id, KEY.token] = ACCESS._replace(last_seq=2)
    for seq in (2, 3):
        requester.begin(part(seq))
    (known, frame), (unknown, none) = link.moved
    assert known is None
    assert isinstance(frame, Write)
    assert frame.source_id == 0
    assert unknown is not None
    assert none is None


def test_an_owners_answer_waits_for_what_was_moved_before_its_request(requester: RdmaRequester, link: Link) -> None:
    parts = [part(1), part(2, tag=b"t"), part(3), part(4, Kind.NOTIFY, tag=b"u")]
    for one in parts:
        requester.begin(one)
    movements = [movement for movement, frame in link.moved if frame is None]
    link.arriving = [Ack(2, 10), Ack(4, 0)]
    answers = []
    for one in parts:
        answer = requester.receive(False)
        assert isinstance(answer, Ack)
        requester.accept(one, answer)
        answers.append(answer.seq)
    assert answers == [1, 2, 3, 4]
    assert [movement for movement in link.finished if movement in movements] == movements


def test_answers_that_are_there_are_taken_together(requester: RdmaRequester, link: Link) -> None:
    parts = [part(seq) for seq in (1, 2, 3)]
    for one in parts:
        requester.begin(one)
    for movement, _ in link.moved[:2]:
        assert movement is not None
        movement.left_nbytes = 0
    requester.accept(parts[0], Ack(1, 10))
    assert requester.try_receive() == Ack(2, 10)
    requester.accept(parts[1], Ack(2, 10))
    assert requester.try_receive() is None


def test_what_is_no_answer_waits_for_nothing(requester: RdmaRequester, link: Link) -> None:
    requester.begin(part(1))
    link.arriving = [ACCESS]
    assert requester.receive(False) == ACCESS


def test_an_answer_to_what_was_not_sent_is_found_out(requester: RdmaRequester, link: Link) -> None:
    link.arriving = [Ack(1, 10)]
    assert requester.receive(False) == Ack(1, 10)
    with pytest.raises(ProtocolError, match="not sent"):
        requester.accept(part(1), Ack(1, 10))


def test_an_owner_that_allows_a_read_of_which_nothing_was_read_is_found_out(
    requester: RdmaRequester, link: Link
) -> None:
    beyond = part(1, Kind.READ, offset=4090)
    requester.begin(beyond)
    with pytest.raises(ProtocolError, match="nothing was read"):
        requester.accept(beyond, Ack(1, 10))


def test_a_last_part_that_moves_nothing_is_put_to_the_owner_as_moved_in_an_extent_that_it_accepts(
    requester: RdmaRequester, link: Link
) -> None:
    last = part(1, tag=b"t")
    assert last.transfer is not None
    last.transfer, last.nbytes = last.transfer._replace(slices=Slices(0, [(0, 100, 0)], None)), 0
    requester.begin(last)
    ((movement, frame),) = link.moved
    assert movement is None
    assert isinstance(frame, Write)
    assert (frame.nbytes, frame.notify, frame.source_id) == (0, True, 1)
    assert _extent(frame).tolist() == [[100, 1]]
    link.arriving = [Ack(1, 0)]
    assert requester.accept(last, requester.receive(False))  # type: ignore[arg-type]
