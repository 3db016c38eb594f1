"""Nodes started and drained for the requested counts, and refused counts."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.commands.nodes import parse_counts
from moonpool.config import ModelEntry, ServeConfig
from moonpool.errors import ConfigError, ScaleRefused
from moonpool.plan import Planner, WorkerGroup
from moonpool.scaling.counts import CountChange, changes
from moonpool.scaling.scaler import Scaler, ScalingStep
from moonpool.supervision.supervisor import Supervisor

FIRST, SECOND = ModelEntry("first", Path("/first")), ModelEntry("second", Path("/second"))
GROUPS = {
    f"{prefix}{role}": WorkerGroup(f"{prefix}{role}", role, model)
    for prefix, model in (("", FIRST), ("second-", SECOND))
    for role in ("prefill", "decode", "aggregated")
}
PRESENT = {
    "prefill": ["prefill-0", "prefill-2"],
    "decode": ["decode-0", "decode-1", "decode-2"],
    "second-aggregated": ["second-aggregated-0"],
}


def asked(force: bool = False, **wanted: int) -> list[CountChange]:
    counts = {name.replace("_", "-"): count for name, count in wanted.items()}
    return changes(PRESENT, counts, GROUPS, force=force)


def test_more_are_started_and_the_newest_leave() -> None:
    assert asked(prefill=4, decode=1) == [
        CountChange("prefill", 2, ()),
        CountChange("decode", 0, ("decode-2", "decode-1")),
    ]


def test_what_is_not_named_stays_and_equal_counts_change_nothing() -> None:
    assert asked(prefill=2) == []


@pytest.mark.parametrize("wanted", [{"prefill": 0}, {"decode": 0}, {"second_aggregated": 0}])
def test_a_model_that_could_not_be_served_any_more_is_refused_unless_forced(wanted: dict[str, int]) -> None:
    with pytest.raises(ScaleRefused, match=r"could not be served.*--force"):
        asked(**wanted)
    assert [change.num_new for change in asked(force=True, **wanted)] == [0]


def test_both_phases_may_give_way_to_aggregated_workers() -> None:
    assert [change.group for change in asked(prefill=0, decode=0, aggregated=1)] == ["prefill", "decode", "aggregated"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [({"prefil": 1}, "must be one of prefill"), ({"pool": 2}, "one pool node"), ({"decode": 999}, "0 to 256")],
)
def test_what_cannot_be_is_refused_by_name(wanted: dict[str, int], said: str) -> None:
    with pytest.raises(ScaleRefused, match=said):
        asked(**wanted)


def test_counts_are_read_from_the_command_line() -> None:
    assert parse_counts(["prefill=2", "second-decode=0"]) == {"prefill": 2, "second-decode": 0}


@pytest.mark.parametrize("arguments", [["prefill"], ["=2"], ["prefill=-1"], ["prefill=two"], ["decode=1", "decode=2"]])
def test_a_count_that_cannot_be_read_is_an_error_that_says_so(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"ROLE=COUNT|twice"):
        parse_counts(arguments)


async def test_a_worker_that_left_before_its_turn_is_gone_already(scripts: Any, tmp_path: Path) -> None:
    # While the new workers came up, which takes a while, it was drained by hand.
    supervisor: Supervisor[Any] = Supervisor([], runtime=scripts, log_dir=tmp_path)
    planner = Planner(ServeConfig(), run_dir=tmp_path, port=1, cores=1)
    scaler = Scaler(supervisor, planner, conductor="unix:/nowhere", startup_s=1.0)
    steps: list[ScalingStep] = []
    await scaler._drain("decode-1", steps.append)
    assert steps == [ScalingStep("decode-1", "gone")]
