"""Priority classes: higher ones first, lower ones never starved, background yields to urgent bytes."""

from hypothesis import given
from hypothesis import strategies as st

from messenger.priority import FRESH_S, HELD_S, MAX_PASSED, BackgroundHold, Priority, PriorityPicker, TrafficGate


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=300))
def test_turns_go_to_classes_that_wait_and_a_waiting_one_is_passed_over_a_bounded_number_of_times(
    waiting: list[tuple[bool, bool, bool]],
) -> None:
    picker = PriorityPicker()
    passed = [0] * len(Priority)
    for each in waiting:
        chosen = picker.pick(each)
        if chosen is None:
            assert not any(each)
            continue
        assert each[chosen]
        for priority in Priority:
            passed[priority] = passed[priority] + 1 if each[priority] and priority != chosen else 0
        # Two classes may become due at once, and then one of them waits for the other.
        assert max(passed) <= MAX_PASSED + 1


def test_the_highest_class_goes_first_until_a_lower_one_is_due() -> None:
    picker = PriorityPicker()
    picks = [picker.pick([True, False, True]) for _ in range(2 * (MAX_PASSED + 1))]
    share = [Priority.URGENT] * MAX_PASSED + [Priority.BACKGROUND]
    assert picks == share * 2


events = st.lists(
    st.tuples(st.sampled_from(["open", "move", "close", "try"]), st.floats(0.0, 0.08, allow_nan=False)), max_size=200
)


@given(events)
def test_background_is_held_while_urgent_bytes_move_and_goes_in_bounded_time_all_the_same(
    events: list[tuple[str, float]],
) -> None:
    hold = BackgroundHold()
    now_s, last_s, opened, moved_s = 100.0, 0.0, 0, 0.0
    for event, delay_s in events:
        now_s += delay_s
        if event == "open":
            hold.urgent_submitted(now_s)
            opened, moved_s = opened + 1, now_s
        elif event == "move" and opened:
            hold.urgent_progressed(now_s)
            moved_s = now_s
        elif event == "close" and opened:
            opened -= 1
            assert hold.urgent_ended() == (opened == 0)
        until_s = hold.allowed_s(last_s, now_s)
        if not opened:
            assert until_s <= now_s
        elif now_s < moved_s + FRESH_S and now_s < last_s + HELD_S:
            assert until_s > now_s
        assert until_s <= max(now_s, last_s + HELD_S)
        if event == "try" and until_s <= now_s:
            last_s = now_s


def test_an_urgent_operation_whose_peer_stands_still_holds_nobody_back_for_long() -> None:
    hold = BackgroundHold()
    hold.urgent_submitted(10.0)
    assert hold.allowed_s(10.0 + FRESH_S, 10.0 + FRESH_S) <= 10.0 + FRESH_S


def test_who_is_held_is_told_until_when_and_called_once_nothing_urgent_is_left() -> None:
    gate = TrafficGate()
    calls: list[str] = []
    assert gate.background_allowed_s(0.0, 10.0, lambda: calls.append("never")) <= 10.0
    gate.urgent_submitted(10.0)
    gate.urgent_submitted(10.0)

    def call() -> None:
        calls.append("held")

    assert gate.background_allowed_s(9.99, 10.0, call) == 9.99 + HELD_S
    assert gate.background_allowed_s(9.99, 10.001, call) == 9.99 + HELD_S
    assert gate.urgent_ended() == []
    for held in gate.urgent_ended():
        held()
    assert calls == ["held"]
    assert gate.background_allowed_s(9.99, 10.002, call) == 10.002
    gate.urgent_submitted(11.0)
    assert gate.urgent_ended() == []
