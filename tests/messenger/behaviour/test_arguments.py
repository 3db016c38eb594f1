"""Invalid arguments are refused at once, before anything is sent."""

from typing import Any

import pytest

from messenger import (
    InvalidArgument,
    MessengerConfig,
)
from settings.keys import InvalidSetting, assemble

REGION = 1 << 16


@pytest.mark.parametrize(
    "slices",
    [[[0, 0]], [0, 0, 1], [[0.5, 0, 1]], [[-1, 0, 1]], [[0, -1, 1]], [[0, 0, -1]], [[0, 0, REGION + 1]]],
    ids=["two columns", "flat", "floats", "negative local", "negative remote", "negative length", "beyond the region"],
)
def test_slices_that_cannot_be_right_are_refused_at_once(pair: Any, slices: Any) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="slices"):
        a.messenger.connect(b.endpoint).write(b.grant(), a.region, slices)


def test_a_region_of_another_messenger_is_refused_at_once(pair: Any) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="not registered"):
        a.messenger.connect(b.endpoint).write(b.grant(), b.region, [[0, 0, 1]])


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_refused_at_once(pair: Any, deadline_s: float) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="deadline"):
        a.messenger.connect(b.endpoint).notify(b"t", b"", deadline_s=deadline_s)


def test_a_notify_over_the_limit_is_refused_at_once(pair: Any) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="notify"):
        a.messenger.connect(b.endpoint).notify(b"t", bytes(1 << 20))


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, 0), (0, REGION + 1), (REGION, 1)])
def test_a_window_outside_the_region_cannot_be_granted(pair: Any, offset: int, nbytes: int) -> None:
    with pytest.raises(InvalidArgument, match="window"):
        pair[0].messenger.grant(pair[0].region, offset, nbytes, read=True, write=True)


def test_a_grant_without_rights_cannot_be_made(pair: Any) -> None:
    with pytest.raises(InvalidArgument, match="right"):
        pair[0].grant(read=False, write=False)


def test_config_that_cannot_work_is_named() -> None:
    for wrong in (
        {"transport": "pigeon"},
        {"data_port": 70000},
        {"streams_per_peer": 0},
        {"default_deadline_s": 0.0},
        {"data_host": "0.0.0.0"},
    ):
        with pytest.raises((InvalidArgument, InvalidSetting), match=next(iter(wrong))):
            assemble(MessengerConfig, **wrong)  # type: ignore[arg-type]
