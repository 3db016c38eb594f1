"""Memory lent in place: what was read is confirmed, or is not; other transports say what to use."""

import threading
from typing import Any

import numpy as np
import pytest

from messenger import InvalidArgument, RemoteAccessError

NBYTES = 1 << 20


@pytest.fixture
def pair(make_node: Any) -> Any:
    a, b = make_node("a", NBYTES), make_node("b", NBYTES)
    b.fill(5)
    return a, b


@pytest.mark.transports("shm")
def test_what_is_lent_lies_in_the_owners_memory_and_cannot_be_written(pair: Any) -> None:
    a, b = pair
    loan = a.messenger.connect(b.endpoint).borrow(b.grant(), 1000, 5000)
    assert np.array_equal(loan.array, b.array[1000:6000])
    assert loan.confirm()
    b.array[1000] += 1
    assert loan.array[0] == b.array[1000]
    with pytest.raises(ValueError, match="read-only"):
        loan.array[0] = 0


@pytest.mark.transports("shm")
def test_a_loan_is_not_confirmed_once_its_key_is_revoked_or_its_owner_is_gone(pair: Any, make_child: Any) -> None:
    a, b = pair
    peer, key, other = a.messenger.connect(b.endpoint), b.grant(), b.grant()
    loan, kept = peer.borrow(key, 0, NBYTES), peer.borrow(other, 0, NBYTES)
    b.messenger.revoke(key)
    assert not loan.confirm()
    assert kept.confirm()
    with pytest.raises(RemoteAccessError):
        peer.borrow(key, 0, 10)
    child = make_child("c")
    lent = a.messenger.connect(child.endpoint).borrow(child.key, 0, 10)
    assert lent.confirm()
    child.kill()
    assert not lent.confirm()
    assert lent.array.sum() == 0, "still readable"


@pytest.mark.transports("shm")
def test_loans_after_the_first_make_no_request(pair: Any) -> None:
    a, b = pair
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.borrow(key, 0, 10)
    before = a.messenger.counters()
    for n in range(100):
        assert peer.borrow(key, n, 10).confirm()
    assert a.messenger.counters() == before


@pytest.mark.transports("shm")
def test_nothing_beyond_the_keys_window_is_lent(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    key = b.messenger.grant(b.region, 100, 100, read=True, write=False)
    assert peer.borrow(key, 100, 100).confirm()
    for offset, nbytes in ((99, 10), (150, 51), (150, 0), (-1, 10)):
        with pytest.raises(InvalidArgument, match="cannot be borrowed"):
            peer.borrow(key, offset, nbytes)
    with pytest.raises(InvalidArgument, match="cannot be borrowed"):
        peer.borrow(b.messenger.grant(b.region, 0, 100, read=False, write=True), 0, 10)


@pytest.mark.transports("shm")
def test_loans_are_confirmed_by_many_threads_at_once_and_by_none_once_the_owner_closed(pair: Any) -> None:
    a, b = pair
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    loans = [peer.borrow(key, n, 100) for n in range(4)]
    verdicts: list[bool] = []

    def confirm(loan: Any) -> None:
        verdicts.append(all(loan.confirm() for _ in range(5000)))

    threads = [threading.Thread(target=confirm, args=(loan,)) for loan in loans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * len(loans)
    a.messenger.close()
    assert not any(loan.confirm() for loan in loans)


@pytest.mark.transports("tcp", "rdma")
def test_other_transports_say_what_to_use(pair: Any) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="use read"):
        a.messenger.connect(b.endpoint).borrow(b.grant(), 0, 10)
