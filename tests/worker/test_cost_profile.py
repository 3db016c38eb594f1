"""Cost profiles: what they predict, and what their files are refused for."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import ProfileError
from worker.policy.analytic_costs import MOONCAKE_SETTING, analytic_profile
from worker.policy.cost_profile import MOONCAKE, load_profile, save_profile

BUNDLED = load_profile(MOONCAKE)
TOKENS = st.integers(0, 1 << 20)


@pytest.fixture
def document():
    return json.loads(MOONCAKE.read_text())


@pytest.fixture
def refusal_of(tmp_path):
    def refusal(text):
        path = tmp_path / "profile.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(ProfileError, match=r"profile\.json") as caught:
            load_profile(path)
        return str(caught.value)

    return refusal


def test_what_is_saved_is_read_back(tmp_path):
    save_profile(BUNDLED, tmp_path / "deeper" / "profile.json")
    assert load_profile(tmp_path / "deeper" / "profile.json") == BUNDLED


def test_the_bundled_analytic_profile_is_what_its_setting_gives():
    assert analytic_profile(MOONCAKE_SETTING) == BUNDLED
    assert BUNDLED.kind == "analytic"


@pytest.mark.parametrize(("new", "reused"), [(8192, 0), (1000, 31_000), (131_072, 0)])
def test_the_analytic_prefill_is_mooncakes_polynomial(new, reused):
    def flops(n):
        return 80 * (4 * n**2 * 8192 + 22 * n * 8192**2)

    seconds = (flops(new + reused) - flops(reused)) / (8 * 312e12 * 0.5)
    assert BUNDLED.prefill_s(new, reused) == pytest.approx(seconds + 4e-3)


def test_loading_beats_computing_from_the_bandwidth_that_mooncake_names():
    rate = MOONCAKE_SETTING.kv_bytes_per_token * 8192 / BUNDLED.prefill_s(8192)
    assert rate * 2 == pytest.approx(6e9, rel=0.05)  # the paper reckons with all of the peak, the profile with half


@given(cuts=st.lists(st.integers(0, 5000), max_size=6), window=st.integers(0, 3000), windowed=st.integers(0, 100))
def test_the_chunks_of_a_push_have_the_bytes_of_a_prefix_whose_window_alone_is_kept(cuts, window, windowed):
    profile = replace(BUNDLED, kv_bytes_per_token=7, window_tokens=window, window_bytes_per_token=windowed)
    ends = [*sorted(cuts), 5000]
    pushed = [profile.pushed_nbytes(start, end, 5000) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert sum(pushed) == profile.read_nbytes(5000) == 5000 * 7 + min(window, 5000) * windowed
    assert all(nbytes >= 0 for nbytes in pushed)


@given(new=TOKENS, more=TOKENS, reused=TOKENS)
def test_prefill_grows_with_new_and_with_reused_tokens_inside_and_outside_of_the_range(new, more, reused):
    least = BUNDLED.prefill_s(new, reused)
    assert 0 <= least <= BUNDLED.prefill_s(new + more, reused)
    assert least <= BUNDLED.prefill_s(new, reused + more)


@given(batch=st.integers(0, 4096), context=TOKENS, more=TOKENS, max_batch=st.integers(1, 512))
def test_time_between_tokens_grows_with_context_and_batch(batch, context, more, max_batch):
    least = BUNDLED.tbt_s(batch, context, max_batch)
    assert 0 <= least <= BUNDLED.tbt_s(batch, context + more, max_batch) * (1 + 1e-12)
    assert least <= BUNDLED.tbt_s(batch + 1, context, max_batch) * (1 + 1e-12)


def test_beyond_the_measured_range_a_prediction_is_lengthened_by_a_bounded_margin():
    cost = BUNDLED.prefill
    for times, margin in ((1, 1.0), (2, 1.1), (3, 1.2), (6, 1.5), (50, 1.5)):
        new = 131_072 * times
        formula = cost.fixed_s + cost.per_token_s * new + cost.per_pair_s * new * new / 2
        assert BUNDLED.prefill_s(new) == pytest.approx(formula * margin)


def test_nothing_costs_nothing_to_move_and_a_busy_sender_takes_longer():
    assert BUNDLED.fetch_s(0) == 0
    assert BUNDLED.fetch_s(1 << 30, 3) > 3 * BUNDLED.fetch_s(1 << 30)


def test_work_that_is_negative_or_no_number_is_refused():
    for ask in (
        lambda: BUNDLED.prefill_s(-1),
        lambda: BUNDLED.prefill_s(1, -1),
        lambda: BUNDLED.decode_s(-1, 0),
        lambda: BUNDLED.decode_s(1, float("nan")),
        lambda: BUNDLED.tbt_s(1, 1, 0),
        lambda: BUNDLED.transfer_s("load", -1),
    ):
        with pytest.raises(ValueError, match="must be at least"):
            ask()


def test_a_path_that_was_not_measured_is_named_with_those_that_were():
    with pytest.raises(ProfileError, match=r"no path 'carrier_pigeon': it has fetch"):
        BUNDLED.transfer_s("carrier_pigeon", 1)


@pytest.mark.parametrize("value", [-1.0, 1e5, "fast", None, True])
def test_a_coefficient_that_cannot_be_is_refused_by_name(document, refusal_of, value):
    document["profile"]["prefill"]["per_token_s"] = value
    assert "profile.prefill.per_token_s" in refusal_of(document)


def test_numbers_that_are_not_finite_are_refused(refusal_of):
    text = MOONCAKE.read_text().replace('"fixed_s": 0.004', '"fixed_s": NaN')
    assert "finite" in refusal_of(text)


def test_unknown_and_missing_fields_other_versions_and_other_files_are_refused(document, refusal_of):
    assert "format" in refusal_of({"coefficients": [1, 2]})
    assert "not JSON" in refusal_of("per_token: 3")
    assert "version" in refusal_of({**document, "version": 2})
    document["profile"]["colour"] = "blue"
    assert "profile.colour" in refusal_of(document)
    del document["profile"]["colour"], document["profile"]["decode"]
    assert "profile.decode: Field required" in refusal_of(document)


def test_a_range_that_ends_before_it_begins_is_refused(document, refusal_of):
    document["profile"]["decode"]["batch"] = {"least": 9, "most": 8}
    assert "least must not exceed most (8), got 9" in refusal_of(document)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path / "none.json")
