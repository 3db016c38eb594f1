"""The verdict of `moonpool model check` follows from the losses."""

import pytest

from engine.rolling import RollingWindow
from moonpool.sink_check import SinkReport, measured_windows


def report(dense: float, alone: float, kept: float, *, sinks: int = 4, allows_sinks: bool = True) -> SinkReport:
    losses = {"dense": dense, "0": alone, str(sinks): kept}
    return SinkReport(losses, RollingWindow(sinks, 256, 32, 16), 2048, 2048, allows_sinks)


def test_sinks_that_bring_the_loss_close_suit() -> None:
    assert report(3.36, 3.71, 3.51).problem == ""
    assert report(3.36, 9.0, 3.4).problem == ""


def test_a_model_that_needs_no_sinks_is_suited() -> None:
    assert report(3.36, 3.40, 3.40).problem == ""


def test_first_tokens_that_help_nothing_are_no_sinks() -> None:
    assert "keeping the first 4 saves 0.000, expected at least 0.02" in report(3.4, 3.7, 3.7001).problem
    assert "it has no attention sinks" in report(3.4, 9.0, 9.0).problem


def test_sinks_that_leave_a_large_gap_do_not_suffice() -> None:
    assert "expected at most 0.5: try a longer window" in report(3.4, 9.0, 4.0).problem


@pytest.mark.parametrize(("loss", "problem"), [(3.6, ""), (3.8, ""), (4.0, "try a longer window")])
def test_models_with_learned_sinks_are_judged_without_tokens(loss: float, problem: str) -> None:
    assert report(3.4, loss, loss, sinks=0, allows_sinks=False).problem.endswith(problem)
    assert bool(report(3.4, loss, loss, sinks=0, allows_sinks=False).problem) == bool(problem)


def test_guessing_is_not_enough() -> None:
    assert "expected at most 7.125" in report(7.6, 7.6, 7.6).problem


@pytest.mark.parametrize(("sinks", "names"), [(0, "0"), (1, "0 1"), (4, "0 1 4")])
def test_everything_and_every_number_of_sinks_are_measured(sinks: int, names: str) -> None:
    found = measured_windows(RollingWindow(sinks, 256, 32, 16))
    assert list(found) == ["dense", *names.split()]
    assert [window.sinks for window in found.values() if window] == [int(name) for name in names.split()]
