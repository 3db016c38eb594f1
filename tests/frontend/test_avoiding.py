"""Which nodes a request stays away from, and for how long."""

from frontend.avoiding import Avoided


class Now:
    """Incarnations in the cluster now."""

    def __init__(self) -> None:
        self.incarnations: dict[str, int] = {}

    def __call__(self, node_id: str) -> int:
        return self.incarnations.get(node_id, 0)


def test_a_node_that_failed_is_held_off_for_the_pause_and_avoided_for_good() -> None:
    avoided = Avoided(2.0, 15.0, Now())
    avoided.add("b", 1, 100.0)
    avoided.add("a", 1, 101.0)
    assert avoided.held_off(101.9) == ["a", "b"]
    assert avoided.held_off(102.0) == ["a"]
    assert avoided.held_off(103.0) == []
    assert avoided.nodes() == ["a", "b"]


def test_the_pause_doubles_with_each_failure_up_to_the_longest() -> None:
    avoided = Avoided(2.0, 15.0, Now())
    for pause_s in (2.0, 4.0, 8.0, 15.0, 15.0):
        avoided.add("a", 1, 100.0)
        assert avoided.held_off(100.0 + pause_s - 0.01) == ["a"]
        assert avoided.held_off(100.0 + pause_s) == []


def test_another_incarnation_is_not_avoided_and_begins_anew() -> None:
    now = Now()
    avoided = Avoided(2.0, 15.0, now)
    avoided.add("a", 1, 100.0)
    avoided.add("a", 1, 100.0)
    now.incarnations["a"] = 2
    assert avoided.nodes() == avoided.held_off(100.0) == []
    avoided.add("a", 2, 100.0)
    assert avoided.held_off(101.9) == ["a"]
    assert avoided.held_off(102.0) == []


def test_a_node_that_is_not_in_the_cluster_or_of_unknown_incarnation_counts_as_the_same() -> None:
    now = Now()
    avoided = Avoided(2.0, 15.0, now)
    avoided.add("a", 1, 100.0)
    assert avoided.nodes() == ["a"]
    now.incarnations["b"] = 3
    avoided.add("b", 0, 100.0)
    assert avoided.nodes() == ["a", "b"]
