"""Choice of the running answers that give up their pages: lower classes only, as few as are needed, never in vain."""

from hypothesis import given
from hypothesis import strategies as st

from worker.policy import RunningAnswer, answers_to_preempt
from worker.policy.scheduling_order import QueueEntry

NOW_S = 100.0


def answer(level: int, pages: int, *, start_ns: int = 0, aged: bool = False) -> RunningAnswer:
    return RunningAnswer(QueueEntry(level=level, start_ns=start_ns, ages_s=NOW_S + (-1 if aged else 60)), pages)


ANSWERS = st.lists(
    st.builds(
        answer, st.integers(0, 3), st.integers(0, 5), start_ns=st.integers(0, 3), aged=st.sampled_from([False, True])
    ),
    max_size=8,
)


@given(running=ANSWERS, level=st.integers(0, 3), missing=st.integers(1, 12))
def test_only_answers_of_lower_classes_yield_and_as_few_as_are_needed(
    running: list[RunningAnswer], level: int, missing: int
) -> None:
    waiting = QueueEntry(level=level, ages_s=NOW_S + 60)
    chosen = answers_to_preempt(waiting, missing, running, NOW_S)
    may_yield = [one for one in running if one.entry.level > level and one.entry.ages_s > NOW_S]
    assert bool(chosen) == (sum(one.pages for one in may_yield) >= missing)
    if not chosen:
        return
    assert len(set(chosen)) == len(chosen)
    taken = [running[i] for i in chosen]
    assert all(one in may_yield and one.pages for one in taken)
    assert sum(one.pages for one in taken) >= missing > sum(one.pages for one in taken[:-1])
    kept = [one for i, one in enumerate(running) if i not in chosen and one in may_yield and one.pages]
    assert all(one.entry.level <= min(each.entry.level for each in taken) for one in kept)


def test_in_a_class_the_account_that_is_furthest_ahead_yields_first() -> None:
    running = [answer(2, 4, start_ns=5), answer(2, 4, start_ns=9), answer(1, 4, start_ns=20)]
    assert answers_to_preempt(QueueEntry(), 6, running, NOW_S) == [1, 0]


def test_an_aged_answer_keeps_its_pages() -> None:
    assert answers_to_preempt(QueueEntry(), 1, [answer(3, 8, aged=True)], NOW_S) == []
