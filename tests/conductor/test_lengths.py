"""The length model: what it says after any history, and what it forgets."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.policy.events import NS
from conductor.policy.lengths import ENDLESS, KINDS, MAX_TENANTS, Lengths, grid
from conductor.policy.requests import NONE, REQUEST

answers = st.lists(
    st.tuples(
        st.integers(-100, 4000),  # seconds since the one before: clocks jump
        st.sampled_from(["", "a", "b"]),
        st.integers(1, 200_000),  # prompt
        st.integers(1, 1 << 22),  # length
        st.booleans(),
        st.integers(0, 1 << 22),  # the answer before
    ),
    max_size=60,
)


def taught(history):
    lengths, now_ns = Lengths(), 0
    for gap_s, tenant, prompt, length, ended, previous in history:
        now_ns += gap_s * NS
        lengths.learn(now_ns, lengths.curve_of(now_ns, "m", tenant, prompt, previous), length, ended=ended)
    return lengths, now_ns


def drawn(lengths, now_ns, tenant="a", prompt=1000):
    number = lengths.curve_of(now_ns, "m", tenant, prompt)
    return lengths.curves[number].copy()


@settings(max_examples=100, deadline=None)
@given(answers)
def test_a_curve_begins_at_one_falls_and_stays_a_share_whatever_was_seen(history):
    lengths, now_ns = taught(history)
    curve = drawn(lengths, now_ns)
    assert curve[0] == 1
    assert (np.diff(curve) <= 0).all()
    assert (curve >= 0).all()
    number = lengths.curve_of(now_ns, "m", "a", 1000)
    shares = [lengths.survival(number, tokens) for tokens in (0, 1, 2, 5, 9, 100, 10_000, 1 << 20, 1 << 40)]
    assert shares == sorted(shares, reverse=True)


@settings(max_examples=50, deadline=None)
@given(answers)
def test_the_same_history_teaches_the_same(history):
    (first, now_ns), (second, _) = taught(history), taught(history)
    assert (drawn(first, now_ns) == drawn(second, now_ns)).all()


@settings(max_examples=50, deadline=None)
@given(answers, st.floats(0.01, 0.5), st.integers(0, 500), st.integers(1, 5000))
def test_a_quantile_is_exceeded_by_no_more_than_it_says(history, exceeded, generated, limit):
    lengths, now_ns = taught(history)
    number = lengths.curve_of(now_ns, "m", "a", 1000)
    tokens = lengths.quantile(number, exceeded, generated, limit)
    assert 1 <= tokens <= limit
    if tokens < limit:
        left = lengths.survival(number, generated + tokens)
        assert left <= exceeded * lengths.survival(number, generated) + 1e-12


def test_before_anything_was_seen_nothing_ends_before_its_limit():
    lengths = Lengths()
    number = lengths.curve_of(0, "m", "", 100)
    assert lengths.survival(number, 1 << 30) == 1
    assert lengths.quantile(number, 0.1, 0, 777) == 777


def test_shares_are_those_of_the_answers_that_were_seen():
    lengths, rng = Lengths(), np.random.default_rng(1)
    seen = rng.geometric(1 / 200, 4000)
    number = lengths.curve_of(0, "m", "", 100)
    for length in seen.tolist():
        lengths.learn(0, number, length, ended=True)
    lengths.curve_of(0, "m", "", 100)
    for tokens in (0, 1, 3, 10, 50, 150, 300, 900):
        assert abs(lengths.survival(number, tokens) - (seen > tokens).mean()) < 0.02


def test_an_answer_that_was_cut_off_says_only_that_it_was_longer():
    lengths = Lengths()
    number = lengths.curve_of(0, "m", "", 100)
    for _ in range(200):
        lengths.learn(0, number, 64, ended=False)
        lengths.learn(0, number, 1000, ended=True)
    lengths.curve_of(0, "m", "", 100)
    assert lengths.survival(number, 500) > 0.98
    assert lengths.survival(number, 1200) < 0.1


def test_what_is_long_past_gives_way_to_what_is_now():
    lengths = Lengths()
    number = lengths.curve_of(0, "m", "", 100)
    for _ in range(2000):
        lengths.learn(0, number, 1000, ended=True)
    for _ in range(100):
        lengths.learn(7200 * NS, number, 10, ended=True)
    lengths.curve_of(7200 * NS, "m", "", 100)
    assert lengths.survival(number, 100) < 0.2


def test_after_a_pause_something_is_still_known():
    lengths = Lengths()
    number = lengths.curve_of(0, "m", "", 100)
    for _ in range(500):
        lengths.learn(0, number, 10, ended=True)
    month_ns = 30 * 86_400 * NS
    lengths.learn(month_ns, number, 10, ended=True)
    lengths.curve_of(month_ns, "m", "", 100)
    assert lengths.survival(number, 20) < 0.3


def test_a_tenant_and_a_kind_of_prompt_are_told_apart_and_those_without_answers_go_by_the_others():
    lengths = Lengths()
    for _ in range(300):
        lengths.learn(0, lengths.curve_of(0, "m", "short", 100), 10, ended=True)
        lengths.learn(0, lengths.curve_of(0, "m", "long", 100), 1000, ended=True)
        lengths.learn(0, lengths.curve_of(0, "m", "long", 100_000), 50, ended=True)
    tell = {
        (tenant, prompt): lengths.survival(lengths.curve_of(0, "m", tenant, prompt), 100)
        for tenant in ("short", "long", "new")
        for prompt in (100, 100_000)
    }
    assert tell["short", 100] < 0.1
    assert tell["long", 100] > 0.9
    assert tell["long", 100_000] < 0.2
    assert 0.3 < tell["new", 100] < 0.7
    assert lengths.survival(lengths.curve_of(0, "other", "short", 100), 100) == 1


def test_any_number_of_tenants_takes_bounded_memory_and_an_idle_one_gives_its_place():
    lengths = Lengths()
    for number in range(10 * MAX_TENANTS):
        lengths.learn(0, lengths.curve_of(0, "m", f"t{number}", 100), 1000, ended=True)
    bound = len(lengths)
    assert bound <= (MAX_TENANTS + 1) * (KINDS + 1)
    shared = lengths.curve_of(0, "m", "", 100)
    assert lengths.curve_of(0, "m", "one-too-many", 100) == shared
    own = lengths.curve_of(3600 * NS, "m", "one-too-many", 100)
    assert own != shared
    assert len(lengths) == bound
    assert lengths.weight(own) == 0


def test_what_never_ends_teaches_nothing():
    lengths = Lengths()
    lengths.learn(0, ENDLESS, 10, ended=True)
    assert lengths.survival(ENDLESS, 1 << 30) == 1


def test_the_points_of_a_curve_lie_four_to_an_octave():
    assert grid()[:9].tolist() == [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4]


def test_an_answer_follows_the_one_before_it_in_its_dialogue_whatever_the_prompt():
    lengths = Lengths()
    for _ in range(200):
        lengths.learn(0, lengths.curve_of(0, "m", "", 100, 20), 15, ended=True)
        lengths.learn(0, lengths.curve_of(0, "m", "", 100, 900), 1000, ended=True)
        lengths.learn(0, lengths.curve_of(0, "m", "", 100), 100, ended=True)
    tell = {
        previous: [lengths.survival(lengths.curve_of(0, "m", "", 100, previous), tokens) for tokens in (50, 500)]
        for previous in (0, 21, 800)
    }
    assert tell[21][0] < 0.1
    assert tell[800][1] > 0.9
    assert tell[0][0] > 0.9
    assert tell[0][1] < 0.1
    assert lengths.curve_of(0, "m", "", 50_000, 20) == lengths.curve_of(0, "m", "", 100, 20)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 1 << 31), st.integers(1, 1 << 31), st.integers(0, 1 << 20))
def test_previous_answers_less_than_half_an_octave_apart_or_above_6144_tokens_may_share_a_curve(first, second, prompt):
    lengths = Lengths()
    is_shared = lengths.curve_of(0, "m", "", prompt, first) == lengths.curve_of(0, "m", "", 0, second)
    low, high = sorted((first, second))
    assert not is_shared or high < 1.5 * low or low >= 6144
    assert is_shared or high != low


def running(curve, *, joined_ns, generated=0, max_new=1000):
    rows = np.full(1, NONE, REQUEST)
    rows["curve"], rows["decode_node"], rows["joined_ns"] = curve, 0, joined_ns
    rows["generated"], rows["max_new"] = generated, max_new
    return rows


def test_answers_that_go_on_are_not_forgotten_over_those_that_have_ended():
    lengths = Lengths()
    curve = lengths.curve_of(0, "m", "", 100)
    for _ in range(20):
        lengths.learn(0, curve, 10, ended=True)
    lengths.curve_of(0, "m", "", 100)
    before = lengths.survival(curve, 100)
    rows = np.concatenate([running(curve, joined_ns=0)] * 60)
    lengths.count_running(10 * NS, rows, np.full(1, NS // 50))  # 500 tokens each
    lengths.curve_of(0, "m", "", 100)
    assert before < 0.2
    assert lengths.survival(curve, 100) > 0.7
    lengths.count_running(11 * NS, rows[:0], np.full(1, NS // 50))  # they have left
    lengths.curve_of(0, "m", "", 100)
    assert lengths.survival(curve, 100) == before


def test_an_answer_that_has_not_begun_to_decode_and_an_endless_one_are_not_counted():
    lengths = Lengths()
    curve = lengths.curve_of(0, "m", "", 100)
    lengths.learn(0, curve, 10, ended=True)
    lengths.curve_of(0, "m", "", 100)
    before = lengths.curves[curve].copy()
    rows = np.concatenate([running(curve, joined_ns=NONE), running(ENDLESS, joined_ns=0)])
    lengths.count_running(10 * NS, rows, np.full(1, NS))
    lengths.curve_of(0, "m", "", 100)
    assert (lengths.curves[curve] == before).all()
    assert (lengths.curves[ENDLESS] == 1).all()


@settings(max_examples=50, deadline=None)
@given(answers, st.integers(1, 1 << 16))
def test_the_expected_length_is_the_sum_of_the_shares_that_reach_each_token(history, limit):
    lengths, now_ns = taught(history)
    number = lengths.curve_of(now_ns, "m", "a", 1000)
    tokens = np.arange(1.0, limit + 1)
    reach = np.interp(tokens, grid(), lengths.curves[number])
    expected = lengths.expected(number, limit)
    assert 1 <= expected <= limit
    assert abs(expected - reach.sum()) <= 1 + 1e-9 * limit
