"""One caller and one owner against a model, by random walks: grants, writes, reads, cuts, cancels, deadlines, revokes.

The model knows for each operation whether it must succeed, must be refused, or may end either way (its deadline was
short, it was cancelled, or its key was revoked behind it). Bytes, the order of notifications and outcomes must be among
what it allows.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from messenger import Priority, RemoteAccessError, RemoteKey, TransferCancelled, TransferDeadlineExceeded

REGION = 4096
EARLY_ENDS = (RemoteAccessError, TransferDeadlineExceeded, TransferCancelled)
MUST, REFUSED, MAYBE = "must succeed", "is refused", "may end either way"

rows_strategy = st.lists(
    st.tuples(st.integers(0, REGION // 2 - 64), st.integers(0, REGION - 64), st.integers(1, 64)), min_size=1, max_size=6
)


@dataclass
class Grant:
    key: RemoteKey
    revoked: bool = False

    def allows(self, rows: list[tuple[int, int, int]], *, write: bool) -> bool:
        inside = all(
            self.key.offset <= remote and remote + nbytes <= self.key.offset + self.key.nbytes
            for _, remote, nbytes in rows
        )
        return inside and not self.revoked and (self.key.write if write else self.key.read)


@dataclass
class Pending:
    """Operations submitted and not checked yet, in the order of submission."""

    future: Future[Any]
    fate: str
    grant: Grant | None
    rows: list[tuple[int, int, int]]
    tag: bytes | None
    lands: bool = True
    """False once the owner has revoked the key and changed the memory itself."""


class Walk(RuleBasedStateMachine):
    a: Any
    b: Any

    def __init__(self) -> None:
        super().__init__()
        self.peer = self.a.messenger.connect(self.b.endpoint)
        self.b.array[:] = 0
        self.b.notes.clear()
        self.grants: list[Grant] = []
        self.pending: list[Pending] = []
        self.memory = np.zeros(REGION, np.uint8)
        self.told: list[bytes] = []
        self.tags = 0
        self.priority = Priority.NORMAL

    def teardown(self) -> None:
        self.settle()
        for grant in self.grants:
            self.b.messenger.revoke(grant.key)
        assert self.b.messenger.validate() == self.a.messenger.validate() == []

    @rule(
        offset=st.integers(0, REGION - 512), nbytes=st.integers(256, REGION), rights=st.sampled_from(["r", "w", "rw"])
    )
    def grant(self, offset: int, nbytes: int, rights: str) -> None:
        nbytes = min(nbytes, REGION - offset)
        key = self.b.messenger.grant(self.b.region, offset, nbytes, read="r" in rights, write="w" in rights)
        self.grants.append(Grant(key))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.pending))
        one.future.cancel()
        if one.fate is MUST:
            one.fate = MAYBE

    @rule(priority=st.sampled_from(list(Priority)))
    def go_on_at_another_priority(self, priority: Priority) -> None:
        """Order holds within one; so what was given before is waited for."""
        self.settle()
        self.priority = priority

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), rows=rows_strategy, tell=st.booleans(), hasty=st.booleans())
    def write(self, data: st.DataObject, rows: list[tuple[int, int, int]], tell: bool, hasty: bool) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        options: dict[str, Any] = {"deadline_s": 0.0005} if hasty else {}
        options["priority"] = self.priority
        tag = self.next_tag() if tell else None
        if tag is None:
            future = self.peer.write(grant.key, self.a.region, rows, **options)
        else:
            future = self.peer.write_notify(grant.key, self.a.region, rows, tag, b"", **options)
        fate = REFUSED if not grant.allows(rows, write=True) else MAYBE if hasty else MUST
        self.pending.append(Pending(future, fate, grant, rows, tag))

    @rule(hasty=st.booleans())
    def notify(self, hasty: bool) -> None:
        tag = self.next_tag()
        options: dict[str, Any] = {"deadline_s": 0.0005} if hasty else {}
        future = self.peer.notify(tag, b"", priority=self.priority, **options)
        self.pending.append(Pending(future, MAYBE if hasty else MUST, None, [], tag))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), rows=rows_strategy)
    def read(self, data: st.DataObject, rows: list[tuple[int, int, int]]) -> None:
        self.settle()
        grant = data.draw(st.sampled_from(self.grants))
        sink = REGION // 2
        places = [[sink + 64 * n, remote, nbytes] for n, (_, remote, nbytes) in enumerate(rows)]
        self.a.array[sink:] = 1
        wanted = self.a.array.copy()
        future = self.peer.read(grant.key, self.a.region, places, priority=self.priority)
        if grant.allows(rows, write=False):
            assert future.result().nbytes == sum(nbytes for _, _, nbytes in rows)
            for local, remote, nbytes in places:
                wanted[local : local + nbytes] = self.memory[remote : remote + nbytes]
        else:
            assert isinstance(future.exception(), RemoteAccessError)
        assert np.array_equal(self.a.array, wanted)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        self.b.messenger.revoke(grant.key)
        self.mark_revoked(grant)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), value=st.integers(2, 255))
    def revoke_and_use_the_memory(self, data: st.DataObject, value: int) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        if any(one.grant not in (grant, None) for one in self.pending):
            self.settle()
        self.b.messenger.revoke(grant.key)
        window = slice(grant.key.offset, grant.key.offset + grant.key.nbytes)
        self.b.array[window] = value
        self.mark_revoked(grant)
        for one in self.pending:
            one.lands = False
        # What landed before is under what the owner wrote since: the window was all that could change.
        self.memory[window] = value

    @rule()
    def cut(self) -> None:
        self.b.cut_inbound()

    @rule()
    def settle(self) -> None:
        allowed, told, pending = [self.memory], list(self.told), self.pending
        self.pending = []
        doubtful: set[bytes] = set()
        # All of them before anything is checked: what a failed walk left behind would be found by the next one.
        outcomes = [(one, one.future.exception()) for one in pending]
        for one, error in outcomes:
            self.check_outcome(one, error)
            if isinstance(error, RemoteAccessError):
                continue
            if one.tag is not None:
                told.append(one.tag)
                if error is not None:
                    doubtful.add(one.tag)
            if one.lands:
                landed = [self.applied(one.rows, memory) for memory in allowed]
                allowed = landed if error is None else allowed + landed[:1]
        found = [tag for _, tag, _ in self.b.notes]
        assert [tag for tag in told if tag not in doubtful or tag in found] == found
        self.told = found
        assert np.any([self.b.array == memory for memory in allowed], axis=0).all()
        self.memory = self.b.array.copy()

    @invariant()
    def what_was_told_is_told_once_and_in_order(self) -> None:
        found = [int(tag) for _, tag, _ in list(self.b.notes)]
        assert found == sorted(set(found))

    def check_outcome(self, one: Pending, error: BaseException | None) -> None:
        if one.fate is MUST:
            assert error is None
        elif one.fate is REFUSED:
            assert isinstance(error, EARLY_ENDS)
        else:
            assert error is None or isinstance(error, EARLY_ENDS)

    def mark_revoked(self, grant: Grant) -> None:
        grant.revoked = True
        for one in self.pending:
            if one.grant is grant and one.fate is MUST:
                one.fate = MAYBE

    def next_tag(self) -> bytes:
        self.tags += 1
        return b"%d" % self.tags

    def applied(self, rows: list[tuple[int, int, int]], memory: Any) -> Any:
        after = memory.copy()
        for local, remote, nbytes in rows:
            after[remote : remote + nbytes] = self.a.array[local : local + nbytes]
        return after


def test_whatever_happens_between_a_caller_and_an_owner_agrees_with_the_model(
    make_node: Any, fewer: Callable[[int], int]
) -> None:
    a, b = make_node("a", REGION), make_node("b", REGION, revoke_grace_s=0.05)
    a.fill(1)
    walk = type("WalkHere", (Walk,), {"a": a, "b": b})
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=fewer(40), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
