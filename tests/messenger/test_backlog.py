"""Queued and in-flight operations to one peer: none is lost or begun twice, order and notifications hold."""

import time

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from messenger.backlog import Backlog, InFlight, QueueKind
from messenger.memory import RemoteKey
from messenger.operation import Kind, Notification, Operation, Part, Transfer
from messenger.peer import stream_roles
from messenger.priority import Priority
from messenger.slices import Slices

KEY = RemoteKey(1, 1, 0, 1, True, True)
SLICES = Slices(1, [(0, 0, 1)], None)
NOTE = Notification(b"t", b"p")


class BacklogMachine(RuleBasedStateMachine):
    """Two write streams and two read streams, without their connections."""

    def __init__(self) -> None:
        super().__init__()
        self.backlog = Backlog()
        self.roles = stream_roles(4)
        self.flights = [InFlight() for _ in self.roles]
        self.queued: list[Part] = []
        self.over: set[Part] = set()
        self.writes: list[Operation] = []
        self.left: dict[Operation, int] = {}
        self.number = 0

    def new(self, kind: Kind, priority: Priority, way: QueueKind, transfers: int, *, note: bool) -> None:
        self.number += 1
        apart = note and (way is QueueKind.SPREAD or not transfers)
        operation = Operation(self.number, kind, priority, transfers, transfers + apart, time.monotonic(), 1.0)
        transfer = Transfer(KEY, None, SLICES)  # type: ignore[arg-type]
        parts = [Part(operation, transfer) for _ in range(transfers)]
        if apart:
            parts.append(Part(operation, None, NOTE))
        elif note:
            parts[-1].notification = NOTE
        for part in parts:
            self.backlog.push(way if part.transfer is not None else QueueKind.ORDERED, part)
        self.queued += parts
        self.left[operation] = len(parts)
        if kind is Kind.WRITE:
            self.writes.append(operation)

    priorities = st.sampled_from(Priority)

    @rule(priority=priorities, parts=st.integers(1, 3), note=st.booleans())
    def write(self, priority: Priority, parts: int, note: bool) -> None:
        self.new(Kind.WRITE, priority, QueueKind.ORDERED, parts, note=note)

    @rule(priority=priorities, parts=st.integers(2, 5), note=st.booleans())
    def large_write(self, priority: Priority, parts: int, note: bool) -> None:
        self.new(Kind.WRITE, priority, QueueKind.SPREAD, parts, note=note)

    @rule(priority=priorities)
    def notify(self, priority: Priority) -> None:
        self.new(Kind.NOTIFY, priority, QueueKind.ORDERED, 0, note=True)

    @rule(priority=priorities, parts=st.integers(1, 3))
    def read(self, priority: Priority, parts: int) -> None:
        self.new(Kind.READ, priority, QueueKind.READS, parts, note=False)

    streams = st.integers(0, 3)

    @rule(stream=streams, background=st.booleans())
    def begin(self, stream: int, background: bool) -> None:
        role, flight = self.roles[stream], self.flights[stream]
        expected = self.backlog.has_startable(role, background=background)
        part = flight.repeats.popleft() if flight.repeats else self.backlog.take(role, background=background)
        if part is None:
            assert not expected
            return
        if part in self.queued:
            assert background or part.operation.priority is not Priority.BACKGROUND
            self.check_order(part)
            self.queued.remove(part)
        flight.begin(part)

    def check_order(self, part: Part) -> None:
        operation = part.operation
        same = [
            other
            for other in self.queued
            if other.operation.priority is operation.priority and other.operation.number < operation.number
        ]
        if part.notification is not None:
            earlier = [
                one for one in self.writes if one.number < operation.number and one.priority is operation.priority
            ]
            # What goes by the first stream is done in order; what does not is over.
            for one in earlier:
                assert all(other.operation is not one for other in same)
                for flight in self.flights[1:]:
                    assert all(flying.operation is not one for flying in (*flight.sent, *flight.repeats))
        if part.transfer is None:
            assert all(other is part or other.operation is not operation for other in self.queued)
            assert operation.num_in_flight == 0

    @rule(stream=streams)
    def answered(self, stream: int) -> None:
        if self.flights[stream].sent:
            self.end(self.flights[stream].answered())

    @rule(stream=streams)
    def one_step_more(self, stream: int) -> None:
        flight = self.flights[stream]
        if flight.sent and flight.sent[0].operation.kind is Kind.READ:
            flight.next_step()

    @rule(stream=streams)
    def connection_lost(self, stream: int) -> None:
        flight = self.flights[stream]
        expected = [*flight.sent, *flight.repeats]
        flight.connection_lost()
        assert list(flight.repeats) == expected

    @precondition(lambda self: bool(self.left))
    @rule(data=st.data())
    def doom(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(list(self.left)))
        dropped = self.backlog.drop([operation])
        for flight in self.flights:
            dropped += flight.drop([operation])
        for part in dropped:
            if part in self.queued:
                self.queued.remove(part)
            self.end(part)
        carried = any(flight.carries([operation]) for flight in self.flights)
        assert carried == (operation in self.left)

    def end(self, part: Part) -> None:
        assert part not in self.over
        self.over.add(part)
        self.backlog.spread_ended(part)
        self.left[part.operation] -= 1
        if not self.left[part.operation]:
            del self.left[part.operation]
            if part.operation in self.writes:
                self.writes.remove(part.operation)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        held = sum(len(flight.sent) + len(flight.repeats) for flight in self.flights)
        assert len(self.backlog) == len(self.queued)
        assert len(self.queued) + held == sum(self.left.values())

    @invariant()
    def requests_fly_in_the_order_of_their_numbers(self) -> None:
        for flight in self.flights:
            seqs = [part.seq for part in flight.sent]
            assert seqs == sorted(set(seqs))

    def teardown(self) -> None:
        """Whatever is left can all be done, so nothing waits for ever."""
        while self.left:
            progress = False
            for role, flight in zip(self.roles, self.flights, strict=True):
                while True:
                    part = flight.repeats.popleft() if flight.repeats else self.backlog.take(role, background=True)
                    if part is None:
                        break
                    if part in self.queued:
                        self.queued.remove(part)
                    flight.begin(part)
                while flight.sent:
                    self.end(flight.answered())
                    progress = True
            assert progress


TestBacklog = BacklogMachine.TestCase
