"""When silence becomes a hang."""

from pathlib import Path

import pytest

from moonpool.supervision import hang_detection
from moonpool.supervision.hang_detection import HangWatch
from moonpool.supervision.supervisor import NodeState


def test_a_node_that_was_silent_for_the_whole_time_hangs_and_is_told_once() -> None:
    watch = HangWatch(10.0, longest_look_s=5.0)
    told = [watch.look(now_s, {"a"}) for now_s in (0.0, 4.0, 8.0, 12.0, 16.0)]
    assert told == [{}, {}, {}, {"a": 12.0}, {}]


def test_one_sign_of_life_begins_the_count_anew() -> None:
    watch = HangWatch(10.0, longest_look_s=5.0)
    looks = ((0.0, {"a"}), (4.0, {"a"}), (8.0, set()), (12.0, {"a"}), (16.0, {"a"}), (20.0, {"a"}))
    assert [watch.look(now_s, silent) for now_s, silent in looks] == [{}] * 6
    assert watch.look(24.0, {"a"}) == {"a": 12.0}


def test_time_in_which_nobody_looked_does_not_count() -> None:
    watch = HangWatch(10.0, longest_look_s=5.0)
    watch.look(0.0, {"a"})
    assert watch.look(3600.0, {"a"}) == {}
    assert watch.look(3604.0, {"a"}) == {}


def test_without_a_timeout_nothing_hangs() -> None:
    watch = HangWatch(0.0, longest_look_s=5.0)
    assert [watch.look(float(now_s), {"a"}) for now_s in range(100)] == [{}] * 100


@pytest.mark.parametrize(
    ("targets", "silent"),
    [
        ({"frontend": "http://h:1"}, {"frontend"}),
        ({"frontend": "", "frontend-1": "http://h:1"}, {"frontend-1"}),
        ({"frontend": "", "frontend-1": ""}, {"frontend", "frontend-1"}),
    ],
)
async def test_a_port_without_answers_makes_the_serving_frontend_silent_or_all_if_none_serves(
    targets: dict[str, str], silent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(url: str, timeout_s: float) -> bool:
        return False

    monkeypatch.setattr(hang_detection, "is_alive", no_answer)
    states = [NodeState(name, "frontend", 1, {"target": target}, 0, Path()) for name, target in targets.items()]
    assert await hang_detection._silent(states, {}, "http://h:1") == silent
