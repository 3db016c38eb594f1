"""The choice among a peer's paths, over virtual time."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from messenger.path_policy import (
    LEAST_WINDOW_NBYTES,
    MOST_WINDOW_NBYTES,
    STALL_S,
    TRIAL_WINDOW_NBYTES,
    Departure,
    PathPolicy,
    PathSample,
)

TICK_S = 0.02
MIB = 1 << 20


class Network:
    """Paths with a speed each, 0 if dead, that carry a backlog without end, sampled every tick."""

    def __init__(self, *speeds: float, round_trip_s: float = 0.001) -> None:
        self.policy = PathPolicy(len(speeds))
        self.speeds = list(speeds)
        self.now_s = 100.0
        self.round_trip_s = round_trip_s
        self.moved = [0.0] * len(speeds)
        self.in_flight = [4 * MIB] * len(speeds)
        self.left: list[Departure] = []

    def run(self, seconds: float, *, tick_s: float = TICK_S) -> list[Departure]:
        """Returns the paths left meanwhile; a path that is not in use carries nothing."""
        left: list[Departure] = []
        for _ in range(round(seconds / tick_s)):
            self.now_s += tick_s
            for path, speed in enumerate(self.speeds):
                if self.in_flight[path]:
                    self.moved[path] += speed * tick_s
            left += self.sample()
        return left

    def sample(self) -> list[Departure]:
        samples = [
            PathSample(int(moved), nbytes, int(moved) // MIB, self.round_trip_s)
            for moved, nbytes in zip(self.moved, self.in_flight, strict=True)
        ]
        left = self.policy.sample(samples, self.now_s)
        for path, _ in left:
            self.in_flight[path] = 0
        self.left += left
        return left

    def probe(self, **answers: bool) -> list[int]:
        """Probes what is due; all answer but `path0=False`. Returns the paths that are used again."""
        return [
            path
            for path in self.policy.probes_due(self.now_s)
            if self.policy.probed(path, answered=answers.get(f"path{path}", True), now_s=self.now_s)
        ]


def test_a_path_that_moves_nothing_is_left_while_another_one_moves() -> None:
    network = Network(1e9, 1e9)
    assert network.run(1.0) == []
    network.speeds[0] = 0
    began_s = network.now_s
    while not network.left:
        network.run(TICK_S)
    assert network.left[0].path == 0
    assert "nothing moved" in network.left[0].reason
    assert network.now_s - began_s <= STALL_S + 2 * TICK_S
    assert network.policy.order(0) == [1, 0]
    assert network.policy.num_down == 1


def test_no_path_is_left_because_the_peer_stands_still() -> None:
    network = Network(1e9, 1e9)
    network.run(1.0)
    network.speeds = [0, 0]
    for _ in range(200):
        assert network.run(TICK_S) == []
        network.probe(path0=False, path1=False)
    network.speeds = [1e9, 1e9]
    assert network.run(1.0) == []


def test_an_idle_path_proves_by_a_probe_that_the_peer_answers() -> None:
    network = Network(1e9, 1e9)
    network.in_flight[1] = 0
    network.run(1.0)
    network.speeds[0] = 0
    assert network.run(0.3) == []
    assert network.policy.probes_due(network.now_s) == [1]
    assert network.policy.probes_due(network.now_s) == [], "one at a time"
    assert not network.policy.probed(1, answered=True, now_s=network.now_s), "it was in use all the time"
    assert network.run(TICK_S) == []
    assert [path for path, _ in network.run(0.1)] == [0]


def test_bytes_that_a_kernel_accepts_do_not_prove_that_the_peer_answers() -> None:
    network = Network(1e9, 10 * MIB / 0.5)
    network.run(1.0)
    network.speeds[0] = 0
    network.moved[1] -= network.moved[1] % MIB  # the next answer comes after as much as a second's part of it
    network.speeds[1] = 0.9 * MIB / 0.5
    assert network.run(0.5) == []


def test_a_peer_that_continues_may_move_its_paths_one_after_the_other() -> None:
    network = Network(1e9, 1e9)
    network.run(1.0)
    network.speeds = [0, 0]
    assert network.run(1.0) == []
    network.speeds = [0, 1e9]
    assert network.run(2 * TICK_S) == []
    network.speeds = [1e9, 1e9]
    assert network.run(1.0) == []


def test_an_answer_from_before_the_stall_proves_nothing() -> None:
    network = Network(1e9, 1e9)
    network.run(1.0)
    network.in_flight[1] = 0
    network.run(1.0)
    network.speeds[0] = 0
    assert network.run(1.0) == []


def test_a_tenfold_slower_path_is_left() -> None:
    network = Network(50e6, 50e6)
    assert network.run(1.0) == []
    network.speeds[1] = 5e6
    left = network.run(0.5)
    assert [path for path, _ in left] == [1]
    assert "takes over its work" in left[0].reason


def test_a_path_that_is_somewhat_slower_is_used() -> None:
    assert Network(50e6, 20e6).run(5.0) == []


def test_the_only_path_in_use_is_never_left() -> None:
    network = Network(50e6, 50e6)
    network.run(0.5)
    network.speeds = [50e6, 0]
    assert [path for path, _ in network.run(0.5)] == [1]
    network.speeds = [5e3, 0]
    assert network.run(2.0) == []


def test_a_long_round_trip_is_not_a_stall() -> None:
    network = Network(1e9, 1e9, round_trip_s=0.2)
    network.run(1.0)
    network.speeds[0] = 0
    assert network.run(0.7) == []
    assert [path for path, _ in network.run(0.3)] == [0]


def test_time_in_which_this_process_was_stopped_is_not_a_stall() -> None:
    network = Network(1e9, 1e9)
    network.run(1.0)
    network.now_s += 5.0
    network.moved[1] += 1
    assert network.sample() == []


def test_a_path_rests_is_probed_and_returns_with_rests_that_double() -> None:
    network = Network(1e9, 1e9)
    network.run(0.5)
    rests = []
    for _ in range(4):
        network.speeds[0], network.in_flight[0] = 0, 4 * MIB
        assert [path for path, _ in network.run(0.5)] == [0]
        left_s = network.now_s
        network.probe()
        while not network.policy.is_up(0):
            network.run(TICK_S)
            network.probe()
        rests.append(network.now_s - left_s)
        network.speeds[0] = 1e9
        assert network.policy.window_nbytes(0) == TRIAL_WINDOW_NBYTES
        network.in_flight[0] = 4 * MIB
        network.run(0.3)
        assert network.policy.window_nbytes(0) >= LEAST_WINDOW_NBYTES
    assert rests == sorted(rests)
    assert rests[-1] > 4 * max(rests[0], 0.1) * 0.5


def test_a_probe_without_an_answer_prolongs_the_rest() -> None:
    network = Network(1e9, 1e9)
    network.run(0.5)
    network.policy.failed(0, network.now_s)
    first_s = network.policy.next_probe_s()
    assert first_s is not None
    network.now_s = first_s
    assert network.probe(path0=False) == []
    second_s = network.policy.next_probe_s()
    assert second_s is not None
    assert second_s - first_s > 0.15
    assert not network.policy.is_up(0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1e5, 5e6, 5e7, 1e9, 1e10]), st.integers(1, 40)),
        max_size=30,
    ),
)
def test_whatever_the_speeds_one_path_stays_in_use_and_all_return(
    paths: int, changes: list[tuple[int, float, int]]
) -> None:
    network = Network(*[1e9] * paths)
    for path, speed, ticks in changes:
        network.speeds[path % paths] = speed
        for _ in range(ticks):
            left = network.run(TICK_S)
            assert len({path for path, _ in left}) == len(left)
            network.probe(**{f"path{each}": speed > 0 for each, speed in enumerate(network.speeds)})
            for each in range(paths):
                if network.policy.is_up(each):
                    network.in_flight[each] = network.in_flight[each] or 4 * MIB
                assert 1 <= network.policy.window_nbytes(each) <= MOST_WINDOW_NBYTES
            up = [each for each in range(paths) if network.policy.is_up(each)]
            assert up, "no path is left without another one in use"
            assert network.policy.order(0)[: len(up)] == sorted(up)
            assert network.policy.num_down == paths - len(up)
    network.speeds = [1e9] * paths
    network.in_flight = [0] * paths
    for _ in range(math.ceil(40 / 0.1)):
        network.run(0.1, tick_s=0.1)
        network.probe()
    assert network.policy.num_down == 0
