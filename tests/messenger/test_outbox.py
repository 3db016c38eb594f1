"""Whatever happens to a stream, each operation is settled once, and what is sent keeps its order."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from messenger.operation import Kind, Operation, Part
from messenger.outbox import Outbox


class OutboxMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox()
        self.open: list[Operation] = []
        self.settled: list[Operation] = []
        self.flying: list[int] = []
        self.completed: list[int] = []

    def settle(self, operations: list[Operation]) -> None:
        for operation in operations:
            assert operation not in self.settled
            assert operation.outstanding == 0
            self.open.remove(operation)
            self.settled.append(operation)

    @rule(parts=st.integers(1, 4))
    def push(self, parts: int) -> None:
        operation = Operation(len(self.open) + len(self.settled), Kind.WRITE, 0, parts, 1.0)
        self.open.append(operation)
        self.outbox.push([Part(operation, None) for _ in range(parts)])

    @precondition(lambda self: self.outbox.has_queued)
    @rule()
    def begin(self) -> None:
        part = self.outbox.begin()
        assert part.operation.failure is None
        assert self.outbox.carries(part.operation)
        self.flying.append(part.seq)

    @precondition(lambda self: self.outbox.has_in_flight)
    @rule()
    def done(self) -> None:
        self.completed.append(self.flying.pop(0))
        self.settle(self.outbox.done())

    @precondition(lambda self: self.outbox.has_in_flight)
    @rule()
    def refused(self) -> None:
        self.flying.pop(0)
        operation = self.outbox.oldest_in_flight()
        assert operation is not None
        self.settle(self.outbox.refused(RuntimeError("refused")))
        assert operation.operation.failure is not None

    @precondition(lambda self: self.outbox.has_in_flight)
    @rule()
    def connection_lost(self) -> None:
        self.flying.clear()
        self.settle(self.outbox.connection_lost())
        assert not self.outbox.has_in_flight

    @precondition(lambda self: bool(self.open))
    @rule(data=st.data())
    def deadline(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.open))
        operation.failure = operation.failure or RuntimeError("deadline")
        self.settle(self.outbox.drop_doomed())
        assert operation in self.settled or self.outbox.carries(operation)

    @rule()
    def close(self) -> None:
        self.settle(self.outbox.doom_all(lambda _: RuntimeError("closed")))
        assert not self.outbox.has_queued

    @invariant()
    def requests_fly_and_complete_in_order(self) -> None:
        assert self.flying == sorted(set(self.flying))
        assert self.completed == sorted(set(self.completed))

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert len(self.outbox) == sum(operation.outstanding for operation in self.open)


TestOutbox = OutboxMachine.TestCase
