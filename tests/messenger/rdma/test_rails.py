"""Slices over rails: the spread, the order of frames, what happens when rails fail."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.path_health import FIRST_REST_NS, HEALED_AFTER_NS, LONGEST_REST_NS
from messenger.rdma.policy.batch_split import CUT_NBYTES, shares, take
from messenger.rdma.policy.posting import Announce, Instruction, Limits, Post, RailSpec
from messenger.rdma.policy.rail_speed import FORGET_NS, RailSpeed
from messenger.rdma.policy.rails import Rails
from messenger.slices import NBYTES, Rows, coalesced
from rpc.errors import InvalidArgument

KIB, MIB, MS, SECOND = 1 << 10, 1 << 20, 1_000_000, 1_000_000_000


def rows_of(*sizes: int, start: int = 0) -> Rows:
    """Slices one behind the other in the remote memory, with gaps in the local one."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    return np.stack([start + starts * 2, start + starts, np.array(sizes)], axis=1).astype(np.int64)


def make(*speeds_gbit: float, spares: int = 0, **limits: int) -> Rails:
    specs = [
        RailSpec(f"mlx5_{index}/1", gbit, is_spare=index >= len(speeds_gbit) - spares)
        for index, gbit in enumerate(speeds_gbit)
    ]
    return Rails(specs, Limits(**limits), now_ns=0)


def by_rail(instructions: list[Instruction]) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in instructions:
        if isinstance(each, Post):
            found[each.rail] = found.get(each.rail, 0) + each.nbytes
    return found


def run_down(rails: Rails, started: list[Instruction], now_ns: int = 0) -> list[Instruction]:
    """Complete everything in order; all instructions that were given."""
    given_ = list(started)
    queue = list(started)
    while queue:
        each = queue.pop(0)
        now_ns += MS
        rails.completed(each.number, each.rail, now_ns)
        more = rails.due(now_ns)
        given_ += more
        queue += more
    return given_


# The spread.


def test_a_small_batch_stays_on_one_rail() -> None:
    rails = make(400, 400, 400)
    rails.submit(rows_of(*[16 * KIB] * 16), announce=False)
    assert by_rail(rails.due(0)) == {0: 256 * KIB}


def test_small_batches_go_where_they_end_first() -> None:
    rails = make(400, 400)
    for _ in range(2):
        rails.submit(rows_of(64 * KIB), announce=False)
    assert by_rail(rails.due(0)) == {0: 64 * KIB, 1: 64 * KIB}


def test_a_small_batch_with_a_frame_stays_with_the_frames() -> None:
    rails = make(400, 400)
    for _ in range(2):
        rails.submit(rows_of(64 * KIB), announce=True)
    given_ = rails.due(0)
    assert by_rail(given_) == {0: 128 * KIB}
    assert [type(each) for each in given_] == [Post, Announce, Post, Announce]


def test_a_large_batch_is_spread_evenly_over_equal_rails() -> None:
    rails = make(400, 400, 400, 400)
    rails.submit(rows_of(8 * MIB), announce=False)
    assert by_rail(rails.due(0)) == dict.fromkeys(range(4), 2 * MIB)


def test_a_large_batch_is_spread_by_nominal_speed_until_there_is_a_measure() -> None:
    rails = make(300, 100)
    rails.submit(rows_of(8 * MIB), announce=False)
    assert by_rail(rails.due(0)) == {0: 6 * MIB, 1: 2 * MIB}


def test_the_measured_speed_replaces_the_nominal_one() -> None:
    rails = make(400, 400)
    now_ns = 0
    for _ in range(30):
        rails.submit(rows_of(8 * MIB), announce=False)
        given_ = rails.due(now_ns)
        ends = {rail: now_ns + nbytes * (1 if rail == 0 else 3) // 8 for rail, nbytes in by_rail(given_).items()}
        for each in sorted(given_, key=lambda each: ends[each.rail]):
            rails.completed(each.number, each.rail, ends[each.rail])
        now_ns = max(ends.values())
    rails.submit(rows_of(8 * MIB), announce=False)
    found = by_rail(rails.due(now_ns))
    assert found[0] / found[1] == pytest.approx(3, rel=0.1)


def test_what_a_rail_has_to_do_already_counts() -> None:
    rails = make(400, 400)
    rails.submit(rows_of(384 * KIB), announce=False)
    rails.submit(rows_of(1 * MIB), announce=False)
    first, *others = rails.due(0)
    assert by_rail([first]) == {0: 384 * KIB}
    assert by_rail(others) == {0: 320 * KIB, 1: 704 * KIB}


def test_where_much_waits_batches_are_not_cut_finer_than_posts() -> None:
    rails = make(400, 400)
    for _ in range(4):
        rails.submit(rows_of(4 * MIB), announce=False)
    assert [each.nbytes for each in rails.due(0) if isinstance(each, Post)] == [4 * MIB] * 2 + [2 * MIB] * 4


def test_bytes_in_flight_are_bounded_and_go_on_when_there_is_room() -> None:
    rails = make(400, window_nbytes=4 * MIB, post_nbytes=2 * MIB)
    rails.submit(rows_of(8 * MIB), announce=False)
    given_ = rails.due(0)
    assert [each.nbytes for each in given_ if isinstance(each, Post)] == [2 * MIB, 2 * MIB]
    assert rails.due(0) == []
    rails.completed(given_[0].number, 0, MS)
    assert by_rail(rails.due(MS)) == {0: 2 * MIB}
    assert rails.in_flight_nbytes(0) == 4 * MIB


def test_slices_in_flight_are_bounded() -> None:
    rails = make(400, window_rows=100, post_rows=40)
    rails.submit(rows_of(*[16] * 250), announce=False)
    given_ = rails.due(0)
    assert [len(each.rows) for each in given_ if isinstance(each, Post)] == [40, 40, 20]
    everything = run_down(rails, given_)
    assert sum(len(each.rows) for each in everything if isinstance(each, Post)) == 250


def test_a_slow_rail_gets_nothing_that_a_fast_one_ends_sooner() -> None:
    rails = make(400, 1)
    rails.submit(rows_of(8 * MIB), announce=False)
    assert by_rail(rails.due(0)) == {0: 8 * MIB}


def test_links_that_do_not_tell_their_speed_are_taken_as_equal() -> None:
    rails = make(0, 0)
    rails.submit(rows_of(1 * MIB), announce=False)
    assert by_rail(rails.due(0)) == {0: 512 * KIB, 1: 512 * KIB}


@given(
    nbytes=st.integers(1, 1 << 30),
    rails=st.lists(st.tuples(st.integers(0, 1 << 26), st.floats(1e6, 1e11)), min_size=1, max_size=9),
    least=st.integers(4096, 1 << 20),
)
def test_shares_add_up_and_none_is_too_small(nbytes: int, rails: list[tuple[int, float]], least: int) -> None:
    backlogs, speeds = [backlog for backlog, _ in rails], [speed for _, speed in rails]
    found = shares(nbytes, backlogs, speeds, least)
    assert sum(found) == nbytes
    assert min(found) >= 0
    used = [share for share in found if share]
    assert len(used) == 1 or min(used) >= least
    # Never later than all on the one rail that would have done it first.
    ends = [(backlog + share) / speed for backlog, share, speed in zip(backlogs, found, speeds, strict=True) if share]
    alone = min((backlog + nbytes) / speed for backlog, speed in rails)
    assert max(ends) <= alone * (1 + 1e-6) + 1e-6


@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=30),
    nbytes=st.integers(CUT_NBYTES, 200_000),
    max_rows=st.integers(1, 30),
)
def test_taking_rows_loses_and_reorders_nothing(sizes: list[int], nbytes: int, max_rows: int) -> None:
    rows = rows_of(*sizes)
    first, rest = take(rows, nbytes, max_rows)
    taken = int(first[:, NBYTES].sum())
    assert len(first) <= max_rows
    assert 0 < taken <= nbytes
    assert coalesced(np.concatenate((first, rest))).tolist() == rows.tolist()
    assert not len(rest) or len(first) == max_rows or taken > nbytes - CUT_NBYTES


# Speeds.


def test_one_late_completion_in_five_changes_little() -> None:
    speed = RailSpeed(1e9)
    for index in range(50):
        took_ns = 50 * MS if index % 5 == 2 else MS
        speed.sample(1_000_000, took_ns, index * MS)
    assert speed.bytes_s(50 * MS) == pytest.approx(1e9, rel=0.02)


def test_a_speed_that_changed_is_learnt() -> None:
    speed = RailSpeed(50e9)
    for index in range(40):
        speed.sample(1_000_000, MS, index * MS)
    assert speed.bytes_s(40 * MS) == pytest.approx(1e9, rel=0.1)


def test_a_slow_time_long_ago_is_forgotten() -> None:
    speed = RailSpeed(1e9)
    for index in range(20):
        speed.sample(1_000_000, 100 * MS, index)
    slow = speed.bytes_s(20)
    assert slow < 2e7
    assert speed.bytes_s(19 + FORGET_NS) == slow
    assert speed.bytes_s(20 + 2 * FORGET_NS) == pytest.approx((1e9 + slow) / 2, rel=0.01)
    assert speed.bytes_s(20 + 20 * FORGET_NS) == pytest.approx(1e9, rel=0.01)


def test_completions_that_are_found_together_are_measured_together() -> None:
    rails = make(400, window_nbytes=64 * MIB)
    now_ns = 0
    for _ in range(40):  # 8 MiB in 8 ms, found at once
        rails.submit(rows_of(8 * MIB), announce=False)
        given_ = rails.due(now_ns)
        assert len(given_) == 2
        now_ns += 8 * MS
        for each in given_:
            rails.completed(each.number, 0, now_ns)
    assert rails.bytes_s(0, now_ns) == pytest.approx(MIB * 1000, rel=0.2)


# The order of frames.


def test_a_frame_waits_for_what_is_under_way_on_other_rails() -> None:
    rails = make(400, 400)
    batch = rails.submit(rows_of(8 * MIB), announce=True)
    given_ = rails.due(0)
    assert set(by_rail(given_)) == {0, 1}
    on_other = next(each for each in given_ if each.rail == 1)
    assert not any(isinstance(each, Announce) for each in given_)
    assert rails.completed(on_other.number, 1, MS) is None
    (announce,) = rails.due(MS)
    assert isinstance(announce, Announce)
    assert (announce.batch, announce.rail) == (batch, 0)
    for own in (each for each in given_ if each.rail == 0):
        assert rails.completed(own.number, 0, MS) is None
    assert rails.completed(announce.number, 0, MS) == batch


def test_a_frame_waits_for_earlier_batches_too() -> None:
    rails = make(400, 400)
    rails.submit(rows_of(8 * MIB), announce=False)
    rails.submit(rows_of(start=0), announce=True)
    given_ = rails.due(0)
    assert all(isinstance(each, Post) for each in given_)
    rails.completed(next(each.number for each in given_ if each.rail == 1), 1, MS)
    assert [type(each) for each in rails.due(MS)] == [Announce]


def test_a_frame_does_not_wait_for_later_batches() -> None:
    rails = make(400, 400)
    rails.submit(rows_of(64 * KIB), announce=True)
    rails.submit(rows_of(8 * MIB), announce=False)
    assert [type(each) for each in rails.due(0)][:2] == [Post, Announce]


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        make(400).submit(rows_of(), announce=False)


# Failure.


def test_unfinished_slices_of_a_failed_rail_go_on_another() -> None:
    rails = make(400, 400)
    batch = rails.submit(rows_of(8 * MIB), announce=False)
    given_ = rails.due(0)
    rails.rail_failed(1, MS)
    rails.validate()
    again = rails.due(MS)
    assert by_rail(again) == {0: 4 * MIB}
    for each in [*(each for each in given_ if each.rail == 0), *again]:
        done = rails.completed(each.number, 0, MS)
    assert done == batch


def test_frames_that_may_have_arrived_hold_up_everything_until_the_peer_was_asked() -> None:
    rails = make(400, 400)
    batch = rails.submit(rows_of(64 * KIB), announce=True)
    rails.due(0)
    rails.rail_failed(0, MS)
    assert (rails.doubts, rails.frame_rail, rails.due(MS)) == ((batch,), 1, [])
    assert rails.resolve(0) == []
    assert [(type(each), each.rail) for each in rails.due(MS)] == [(Post, 1), (Announce, 1)]


def test_what_the_peer_has_is_not_sent_again() -> None:
    rails = make(400, 400)
    plain = rails.submit(rows_of(64 * KIB), announce=False)
    one, other = (rails.submit(rows_of(64 * KIB), announce=True) for _ in range(2))
    done = [rails.completed(each.number, each.rail, 0) for each in rails.due(0) if each.rail == 1]
    rails.rail_failed(0, MS)
    assert rails.doubts == (one, other)
    assert rails.resolve(one) == [number for number in (plain, one) if number not in done]
    assert {each.batch for each in rails.due(MS)} == {other}


def test_frames_that_did_not_arrive_are_sent_again_in_their_order() -> None:
    rails = make(400, 400)
    batches = [rails.submit(rows_of(), announce=True) for _ in range(3)]
    rails.due(0)
    batches.append(rails.submit(rows_of(), announce=True))
    rails.rail_failed(0, MS)
    assert rails.resolve(0) == []
    assert [each.batch for each in rails.due(MS)] == batches


def test_only_a_doubt_can_be_resolved() -> None:
    rails = make(400)
    with pytest.raises(InvalidArgument):
        rails.resolve(3)


def test_spares_serve_only_where_nothing_else_does() -> None:
    rails = make(400, 400, spares=1)
    rails.submit(rows_of(8 * MIB), announce=False)
    assert by_rail(rails.due(0)) == {0: 8 * MIB}
    rails.rail_failed(0, MS)
    assert by_rail(rails.due(MS)) == {1: 8 * MIB}


def test_without_a_rail_nothing_is_due_and_nothing_is_lost() -> None:
    rails = make(400)
    rails.submit(rows_of(64 * KIB), announce=False)
    rails.due(0)
    rails.rail_failed(0, 0)
    assert (rails.is_stranded, rails.due(0), rails.num_unfinished) == (True, [], 1)
    assert rails.next_probe_ns() == FIRST_REST_NS
    assert rails.probes_due(FIRST_REST_NS - 1) == []
    assert rails.probes_due(FIRST_REST_NS) == [0]
    assert rails.probes_due(FIRST_REST_NS) == []
    rails.rail_returned(0, FIRST_REST_NS)
    assert by_rail(rails.due(FIRST_REST_NS)) == {0: 64 * KIB}
    assert rails.next_probe_ns() is None


def rest_after(rails: Rails, now_ns: int) -> int:
    rails.rail_failed(0, now_ns)
    end_ns = rails.next_probe_ns()
    assert end_ns is not None
    return end_ns - now_ns


def test_rests_grow_with_failures_in_a_row_up_to_a_bound() -> None:
    rails, now_ns, rests = make(400), 0, []
    for _ in range(12):
        rests.append(rest_after(rails, now_ns))
        now_ns += rests[-1]
        assert rails.probes_due(now_ns) == [0]
    assert rests == [min(FIRST_REST_NS << index, LONGEST_REST_NS) for index in range(12)]


def test_a_rail_that_returns_and_fails_at_once_rests_longer_and_one_that_held_does_not() -> None:
    rails = make(400)
    now_ns = rest_after(rails, 0)
    rails.probes_due(now_ns)
    rails.rail_returned(0, now_ns)
    flapping = rest_after(rails, now_ns + 1)
    assert flapping == 2 * FIRST_REST_NS
    now_ns += 1 + flapping
    rails.probes_due(now_ns)
    rails.rail_returned(0, now_ns)
    assert rest_after(rails, now_ns + HEALED_AFTER_NS) == FIRST_REST_NS


def test_only_a_rail_that_is_probed_can_return() -> None:
    with pytest.raises(InvalidArgument):
        make(400).rail_returned(0, 0)


def test_an_instruction_is_completed_once() -> None:
    rails = make(400)
    rails.submit(rows_of(64 * KIB), announce=False)
    (post,) = rails.due(0)
    rails.completed(post.number, 0, MS)
    with pytest.raises(InvalidArgument):
        rails.completed(post.number, 0, MS)


@pytest.mark.parametrize(
    "limits", [{"least_share_nbytes": 100}, {"post_nbytes": 64 * KIB}, {"window_nbytes": MIB}, {"post_rows": 0}]
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        Limits(**limits)


# Rails that lag.


FLOOR_NS = 200 * MS


def warmed(*speeds_gbit: float) -> tuple[Rails, list[Instruction], int]:
    """Rails whose speeds are measured (100 MB/s), with 64 MiB to move: the posts in flight, and the time."""
    rails = make(*speeds_gbit)
    now_ns = 0
    for _ in range(8):
        rails.submit(rows_of(16 * MIB), announce=False)
        for each in rails.due(now_ns):
            now_ns += int(each.nbytes * 10) if isinstance(each, Post) else 0
            rails.completed(each.number, each.rail, now_ns)
        for each in rails.due(now_ns):
            rails.completed(each.number, each.rail, now_ns)
    rails.submit(rows_of(64 * MIB), announce=False)
    return rails, rails.due(now_ns), now_ns


def complete_on(rails: Rails, posts: list[Instruction], rail: int, now_ns: int) -> None:
    for each in posts:
        if each.rail == rail:
            rails.completed(each.number, rail, now_ns)


def test_a_rail_lags_that_completes_nothing_while_another_one_does() -> None:
    rails, posts, now_ns = warmed(10, 10)
    assert {each.rail for each in posts} == {0, 1}
    assert rails.frame_rail == 0
    complete_on(rails, posts, 0, now_ns + 50 * MS)
    assert rails.lagging(FLOOR_NS, now_ns + 200 * MS) == []
    assert rails.lagging(FLOOR_NS, now_ns + 3 * SECOND) == [1]
    assert rails.lagging(4 * SECOND, now_ns + 3 * SECOND) == [], "the floor"


def test_no_rail_lags_where_none_completes_anything() -> None:
    rails, _, now_ns = warmed(10, 10)
    assert rails.lagging(FLOOR_NS, now_ns + 60 * SECOND) == []


def test_the_rail_of_the_frames_lags_later() -> None:
    rails, posts, now_ns = warmed(10, 10)
    complete_on(rails, posts, 1, now_ns + 50 * MS)
    assert rails.lagging(FLOOR_NS, now_ns + SECOND) == []
    assert rails.lagging(FLOOR_NS, now_ns + 60 * SECOND) == [0]


def test_a_rail_without_a_measured_speed_is_judged_by_the_slowest_other_and_not_without_any() -> None:
    rails = make(10, 10)
    rails.submit(rows_of(32 * MIB), announce=False)
    posts = rails.due(0)
    small = next(each for each in posts if each.rail == 0)
    assert rails.lagging(FLOOR_NS, 60 * SECOND) == []
    rails.completed(small.number, 0, 40 * MS)
    assert rails.lagging(FLOOR_NS, 100 * MS) == []
    assert rails.lagging(FLOOR_NS, 60 * SECOND) == [1]


def test_a_lagging_rails_work_goes_by_the_other_and_every_byte_once() -> None:
    rails, posts, now_ns = warmed(10, 10)
    complete_on(rails, posts, 0, now_ns + 50 * MS)
    (lagging,) = rails.lagging(FLOOR_NS, now_ns + 3 * SECOND)
    rails.rail_failed(lagging, now_ns + 3 * SECOND)
    kept = [each for each in posts if each.rail == 0]
    again = run_down(rails, rails.due(now_ns + 3 * SECOND), now_ns + 3 * SECOND)
    moved = sum(each.nbytes for each in [*kept, *again] if isinstance(each, Post))
    assert moved == 64 * MIB
    assert rails.num_unfinished == 0
    rails.validate()
