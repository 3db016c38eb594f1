"""The pure schedule."""

import pytest

from tools.training.model import PRESETS
from tools.training.schedule import STAGES, Clock, Phase, Stage
from tools.training.windows import Mixture

TEXT = Mixture(reading=0.0, recall=0.0, copy=0.0)


def test_a_rate_that_decays_ends_at_zero_and_others_do_not() -> None:
    last, other = (Stage((Phase(1.0, 512, TEXT),), decays) for decays in (True, False))
    assert [last.rate(progress) for progress in (0.0, 0.005, 0.01, 0.4)] == [0.0, 0.5, 1.0, 1.0]
    assert last.rate(0.7) == pytest.approx(0.5)
    assert last.rate(1.0) == 0.0
    assert [other.rate(progress) for progress in (0.0, 0.005, 0.5, 1.0)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("preset", sorted(STAGES))
def test_every_preset_ends_with_windows_of_all_positions_at_a_rate_of_zero(preset: str) -> None:
    stages = STAGES[preset]
    assert stages[-1].decays
    assert stages[-1].phase(1.0).context == PRESETS[preset].positions
    assert all(stage.phases[-1].end == 1.0 for stage in stages)


def test_phases_follow_each_other() -> None:
    stage = Stage((Phase(0.5, 256, TEXT), Phase(1.0, 512, TEXT)))
    assert [stage.phase(progress).context for progress in (0.0, 0.5, 0.51, 1.0)] == [256, 256, 512, 512]


def test_a_wall_clock_run_that_is_late_is_finished() -> None:
    clock = Clock(started_s=100.0, deadline_s=200.0)
    assert [clock.progress(now, step=7) for now in (90.0, 150.0, 500.0)] == [0.0, 0.5, 1.0]


def test_a_run_by_steps_does_not_look_at_the_time() -> None:
    assert Clock(started_s=0.0, deadline_s=0.0, steps=8).progress(now_s=1e9, step=2) == 0.25
