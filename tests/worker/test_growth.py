"""Sequences that take slots as they need them: whatever is granted, all that have begun can end."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.policy.growth import GrowthLedger

SLOTS = 24


def test_an_answer_that_could_keep_another_from_ending_does_not_begin() -> None:
    book = GrowthLedger(10)
    assert book.begin("a", [0, 1, 2, 3], 4)
    assert book.begin("b", [4, 5], 4)  # a can take 4 and end, then b has more than enough
    assert not book.begin("c", [6], 4)  # three would be left, and nobody could end with those
    assert len(book) == 2


def test_slots_that_two_hold_come_back_with_the_second() -> None:
    book = GrowthLedger(10)
    assert book.begin("a", [0, 1, 2, 3, 4, 5], 2)
    assert book.begin("b", [0, 1, 2, 3, 4, 6], 4)
    assert not book.may_extend("b", 2)  # one left: a cannot end, nor b
    assert book.may_extend("a", 2)


def test_what_is_granted_is_wanted_no_more() -> None:
    book = GrowthLedger(4)
    assert book.begin("a", [0], 3)
    assert book.may_extend("a", 3)
    book.extend("a", [1, 2, 3])
    assert book.wants("a") == 0
    book.end("a")
    assert book.wants("a") == len(book) == 0


class GrowingAnswers(RuleBasedStateMachine):
    """A node's slots: some sequences grow, some hold what they have for a while; slots may be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.book = GrowthLedger(SLOTS)
        self.held: dict[int, list[int]] = {}
        self.fixed: list[list[int]] = []  # of those that do not grow
        self.names = 0

    @property
    def free(self) -> list[int]:
        taken = {slot for slots in (*self.held.values(), *self.fixed) for slot in slots}
        return [slot for slot in range(SLOTS) if slot not in taken]

    @rule(count=st.integers(1, 8), wants=st.integers(1, 12), shared=st.integers(0, 4), data=st.data())
    def begin(self, count: int, wants: int, shared: int, data: st.DataObject) -> None:
        common = list(data.draw(st.sampled_from(list(self.held.values()))))[:shared] if self.held else []
        if count > len(self.free) or len(common) + count + wants > SLOTS:
            return
        self.names += 1
        slots = common + self.free[:count]
        if self.book.begin(self.names, slots, wants):
            self.held[self.names] = slots

    @rule(count=st.integers(1, 10))
    def hold(self, count: int) -> None:
        if count <= len(self.free):
            self.fixed.append(self.free[:count])

    @precondition(lambda self: self.fixed)
    @rule()
    def let_go(self) -> None:
        self.fixed.pop()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        count = min(count, self.book.wants(name), len(self.free))
        if count and self.book.may_extend(name, count):
            more = self.free[:count]
            self.held[name] += more
            self.book.extend(name, more)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.book.end(name)
        del self.held[name]

    @invariant()
    def all_can_end(self) -> None:
        """By granting slot after slot to whoever may have it, and asking nobody to want less, all end."""
        book, held = GrowthLedger(SLOTS), {name: list(slots) for name, slots in self.held.items()}
        for name, slots in held.items():
            assert book.begin(name, slots, self.book.wants(name))
        while held:
            taken = {slot for slots in held.values() for slot in slots}
            free = [slot for slot in range(SLOTS) if slot not in taken]
            done = [name for name in held if not book.wants(name)]
            if done:
                book.end(done[0])
                del held[done[0]]
                continue
            name = next(name for name in sorted(held) if free and book.may_extend(name, 1))
            book.extend(name, free[:1])
            held[name] += free[:1]


TestGrowing = GrowingAnswers.TestCase
TestGrowing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
