"""`moonpool profile`: which work is measured, how it is fitted, and what comes out."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import ConfigError
from moonpool.model_files import cost_profiles_of
from moonpool.profiling import command
from moonpool.profiling.fitting import fit, fit_error, grid_of
from worker.policy.cost_profile import MOONCAKE, load_profile, save_profile


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    truth=st.tuples(*(st.floats(low, high) for low, high in ((1e-4, 1e-1), (1e-5, 1e-2), (1e-9, 1e-5)))),
)
def test_the_offline_fit_recovers_the_truth_under_gross_outliers(seed, truth):
    rng = random.Random(seed)
    sizes = [(16 * 2**i, reused) for i in range(8) for reused in (0, 255, 1023, 4000)] * 4
    features = [(1.0, new, new * (reused + new / 2)) for new, reused in sizes]
    exact = [sum(c * x for c, x in zip(truth, row, strict=True)) for row in features]
    seconds = [s * rng.uniform(0.99, 1.01) for s in exact]
    for i in rng.sample(range(len(seconds)), len(seconds) // 10):
        seconds[i] *= rng.choice([0.05, 20.0])
    found = fit(features, seconds)
    for row, s in zip(features, exact, strict=True):
        assert sum(c * x for c, x in zip(found, row, strict=True)) == pytest.approx(s, rel=0.15)


@given(seconds=st.lists(st.floats(1e-6, 1e3), min_size=4, max_size=12), size=st.integers(2, 3))
def test_no_coefficient_is_ever_negative(seconds, size):
    features = [(1.0, float(i + 1), float(i * i))[:size] for i in range(len(seconds))]
    assert min(fit(features, seconds)) >= 0


def test_the_error_of_a_fit_is_that_of_its_points():
    error = fit_error([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [1.0, 2.0, 6.0], (0.0, 1.0))
    assert (error.points, error.median, error.worst) == (3, 0.0, 0.5)


@given(length=st.integers(300, 200_000), max_batch=st.integers(4, 512), capacity=st.integers(300, 1 << 20))
def test_what_is_measured_fits_into_model_and_memory(length, max_batch, capacity):
    grid = grid_of(length, max_batch, capacity)
    assert all(new > 0 and reused >= 0 and new + reused <= min(length - 1, capacity) for new, reused in grid.prefills)
    assert all(1 <= batch <= max_batch and batch * (each + 1) <= capacity for batch, each in grid.steps)
    assert len({new for new, _ in grid.prefills}) > 1 < len({reused for _, reused in grid.prefills})


def test_a_model_or_memory_too_small_to_fit_to_is_refused():
    with pytest.raises(ConfigError, match=r"must be at least .* to fit costs"):
        grid_of(20, 64, 1000)


def test_the_command_writes_a_profile_of_the_model_and_a_picture(tmp_path, capsys):
    out, picture = tmp_path / "p.json", tmp_path / "p.svg"
    sizes = ["--capacity-tokens", "320", "--max-batch", "4", "--repeats", "3", "--no-transfers"]
    command.app(["--out", str(out), "--plot", str(picture), "--name", "tiny", *sizes], standalone_mode=False)
    made = load_profile(out)
    assert (made.kind, made.model, made.engine["max_batch"], made.kv_bytes_per_token) == ("measured", "tiny", 4, 6144)
    assert len(made.model_fingerprint) > 16
    assert 0 < made.prefill_s(32) < made.prefill_s(300) < 60
    assert made.decode.batch.most == 4
    printed = capsys.readouterr().out.splitlines()
    points = json.loads(printed[-1])["points"]
    assert made.prefill.error.points == len(points["prefill"])
    assert all(0 < point["least_s"] <= point["median_s"] for kind in points.values() for point in kind)
    assert any("decode step" in line for line in printed)
    assert "<svg" in picture.read_text()
    assert cost_profiles_of([str(out)], ["tiny"]) == {"tiny": made}


@pytest.mark.parametrize(("out", "message"), [("", "cannot be written"), ("file/p.json", "cannot create its folder")])
def test_a_profile_that_could_not_be_written_is_not_measured(tmp_path, capsys, out, message):
    (tmp_path / "file").write_text("")
    assert command.app(["--out", str(tmp_path / out), "--no-transfers"], standalone_mode=False) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "measuring" not in said


@pytest.mark.parametrize(
    ("words", "models", "message"),
    [
        (["nowhere.json"], [], "cannot be read"),
        (["no-such-profile"], [], "a profile's .json file or one of instant, "),
        (["mooncake-70b-8xa800"], ["chat"], "not served here"),
        (["other=mooncake-70b-8xa800"], ["chat"], "'other', which is not served here"),
        (["chat=mooncake-70b-8xa800", f"chat={MOONCAKE}"], ["chat"], "given twice"),
        (["chat=instant"], ["chat"], "predicts nothing"),
    ],
)
def test_a_cost_profile_that_cannot_be_is_refused_with_the_reason(words, models, message):
    with pytest.raises(ConfigError, match="--cost-profile") as refused:
        cost_profiles_of(words, models)
    assert message in str(refused.value)


def test_a_profile_is_for_the_model_that_is_named_or_that_it_was_measured_with(tmp_path):
    analytic = load_profile(MOONCAKE)
    assert cost_profiles_of(["chat=mooncake-70b-8xa800"], ["chat"]) == {"chat": analytic}
    save_profile(analytic, tmp_path / "a=b.json")
    assert cost_profiles_of([], ["chat"]) == {}
