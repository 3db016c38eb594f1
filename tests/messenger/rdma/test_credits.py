"""Credits for a peer's inbox: never more frames than places, and never a deadlock, by a state machine of two sides."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from messenger.rdma.policy.credits import (
    LEAST_SHARE,
    WIRE_BITS,
    InboxFull,
    InboxShares,
    ReceiveCredits,
    SendCredits,
    unwrapped,
)
from rpc.errors import InvalidArgument


def test_all_credits_but_the_last_are_for_frames() -> None:
    credits = SendCredits(4)
    assert [credits.try_take() for _ in range(4)] == [True, True, True, False]
    assert credits.available == 0
    assert [credits.try_take_last() for _ in range(2)] == [True, False]


def test_a_limit_gives_new_credits_and_says_so_once() -> None:
    credits = SendCredits(4)
    while credits.try_take():
        pass
    assert credits.apply_limit(4) is False
    assert credits.apply_limit(6) is True
    assert credits.apply_limit(7) is False
    assert credits.available == 3


def test_an_older_limit_that_comes_late_takes_nothing_away() -> None:
    credits = SendCredits(8)
    for _ in range(6):
        credits.try_take()
    credits.apply_limit(12)
    credits.apply_limit(9)
    assert credits.available == 5


def test_a_limit_beyond_the_share_is_refused() -> None:
    credits = SendCredits(4)
    credits.try_take()
    with pytest.raises(InvalidArgument, match="share is 4"):
        credits.apply_limit(6)


def test_a_peer_that_sends_without_credit_is_found() -> None:
    credits = ReceiveCredits(4)
    for _ in range(4):
        credits.received()
    with pytest.raises(InvalidArgument, match="more than its share"):
        credits.received()


def test_a_limit_is_owed_when_half_of_the_share_is_free_again() -> None:
    credits = ReceiveCredits(8)
    for _ in range(5):
        credits.received()
    credits.freed(3)
    assert not credits.owes
    credits.freed(1)
    assert credits.owes
    assert credits.take_limit() == 12
    assert (credits.owes, credits.held) == (False, 1)


def test_no_more_places_can_be_freed_than_are_held() -> None:
    credits = ReceiveCredits(8)
    credits.received()
    with pytest.raises(InvalidArgument):
        credits.freed(2)


@pytest.mark.parametrize("side", [SendCredits, ReceiveCredits])
def test_a_share_too_small_to_work_is_refused(side: Any) -> None:
    with pytest.raises(InvalidArgument):
        side(LEAST_SHARE - 1)


@given(reference=st.integers(0, 1 << 70), distance=st.integers(-(1 << (WIRE_BITS - 2)), 1 << (WIRE_BITS - 2)))
def test_counts_survive_the_wires_width(reference: int, distance: int) -> None:
    number = max(0, reference + distance)
    assert unwrapped(reference, number % (1 << WIRE_BITS)) == number


def test_every_peer_has_its_own_share_until_all_are_given() -> None:
    shares = InboxShares(total=64, share=16)
    assert [shares.join(connection) for connection in range(4)] == [16] * 4
    with pytest.raises(InboxFull, match="all 4 shares"):
        shares.join(4)
    shares.leave(2)
    shares.leave(2)
    assert (shares.join(4), shares.num_members) == (16, 4)
    with pytest.raises(InvalidArgument):
        shares.join(4)


@pytest.mark.parametrize(("total", "share"), [(64, 3), (8, 16), (0, 0)])
def test_shares_that_cannot_work_are_refused(total: int, share: int) -> None:
    with pytest.raises(InvalidArgument):
        InboxShares(total, share)


class Side:
    """One end: frames it wants to send, its inbox, and the limits that ride on what it sends."""

    def __init__(self, sending_share: int, receiving_share: int) -> None:
        self.sends = SendCredits(sending_share)
        self.receives = ReceiveCredits(receiving_share)
        self.backlog = 0
        self.inbox = 0  # frames that came and are not worked off
        self.wire: deque[tuple[bool, int]] = deque()  # (whether a frame proper, the limit), towards the other side
        self.frames_received = 0

    def send(self) -> bool:
        """Whatever may go: a frame, or a limit alone where one is owed."""
        if self.backlog and self.sends.try_take():
            self.backlog -= 1
            self.wire.append((True, self.receives.take_limit()))
            return True
        if self.receives.owes and self.sends.try_take_last():
            self.wire.append((False, self.receives.take_limit()))
            return True
        return False

    def receive(self, other: "Side") -> bool:
        if not other.wire:
            return False
        is_frame, limit = other.wire.popleft()
        self.receives.received()
        self.sends.apply_limit(limit)
        self.frames_received += is_frame
        if is_frame:
            self.inbox += 1
        else:
            self.receives.freed()
        return True

    def work_off(self) -> bool:
        if not self.inbox:
            return False
        self.inbox -= 1
        self.receives.freed()
        return True


class Conversation(RuleBasedStateMachine):
    """Two sides that send, receive and work off frames in any order. However it stands, it can always be finished."""

    @initialize(shares=st.tuples(st.integers(LEAST_SHARE, 9), st.integers(LEAST_SHARE, 9)))
    def start(self, shares: tuple[int, int]) -> None:
        one, other = shares
        self.sides = (Side(one, other), Side(other, one))
        self.shares = (other, one)  # of each side's inbox
        self.asked = [0, 0]

    @rule(side=st.integers(0, 1), frames=st.integers(1, 30))
    def ask(self, side: int, frames: int) -> None:
        self.sides[side].backlog += frames
        self.asked[side] += frames

    @rule(side=st.integers(0, 1), times=st.integers(1, 12))
    def send(self, side: int, times: int) -> None:
        for _ in range(times):
            self.sides[side].send()

    @rule(side=st.integers(0, 1), times=st.integers(1, 12))
    def receive(self, side: int, times: int) -> None:
        for _ in range(times):
            self.sides[side].receive(self.sides[1 - side])

    @rule(side=st.integers(0, 1), times=st.integers(1, 12))
    def work_off(self, side: int, times: int) -> None:
        for _ in range(times):
            self.sides[side].work_off()

    @invariant()
    def no_inbox_overflows(self) -> None:
        if not hasattr(self, "sides"):
            return
        for index, side in enumerate(self.sides):
            under_way = len(self.sides[1 - index].wire)
            assert under_way + side.receives.held <= self.shares[index]

    def teardown(self) -> None:
        """From wherever it stands: all frames arrive, and then nobody sends any more."""
        if not hasattr(self, "sides"):
            return
        for _ in range(100 + 20 * sum(self.asked)):
            moved = [
                step(side)
                for index, side in enumerate(self.sides)
                for step in (Side.send, lambda side, i=index: side.receive(self.sides[1 - i]), Side.work_off)
            ]
            if not any(moved):
                break
        else:
            raise AssertionError("limits are told for ever")
        assert [side.frames_received for side in self.sides] == self.asked[::-1]
        assert [side.backlog for side in self.sides] == [0, 0]


TestConversation: Any = Conversation.TestCase
TestConversation.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("share", [LEAST_SHARE, 5, 16])
def test_a_side_that_never_speaks_still_returns_credits_and_not_one_by_one(share: int) -> None:
    speaker, listener = Side(share, share), Side(share, share)
    speaker.backlog = 1000
    bare_limits, moved = 0, True
    while moved:
        moved = any([speaker.send(), listener.receive(speaker), listener.work_off(), speaker.receive(listener)])
        told = listener.send()
        bare_limits += told
        moved |= told
    assert (speaker.backlog, listener.frames_received) == (0, 1000)
    assert bare_limits <= 2 * (1000 + bare_limits) / share + 1
