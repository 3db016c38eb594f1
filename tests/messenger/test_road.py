"""Background that is held back is called as soon as nothing urgent is left, and knows when to ask again otherwise."""

from messenger.priority import HELD_S
from messenger.road import Road


def test_who_is_held_is_told_until_when_and_called_once_nothing_urgent_is_left() -> None:
    road = Road()
    calls: list[str] = []
    assert road.until_s(0.0, 10.0, lambda: calls.append("never")) <= 10.0
    road.opened(10.0)
    road.opened(10.0)

    def call() -> None:
        calls.append("held")

    assert road.until_s(9.99, 10.0, call) == 9.99 + HELD_S
    assert road.until_s(9.99, 10.001, call) == 9.99 + HELD_S
    assert road.closed() == []
    for held in road.closed():
        held()
    assert calls == ["held"]
    assert road.until_s(9.99, 10.002, call) == 10.002
    road.opened(11.0)
    assert road.closed() == []
