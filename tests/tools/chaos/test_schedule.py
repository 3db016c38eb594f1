"""The schedule of faults: reproducible, of all kinds, and never on both hosts at once."""

from __future__ import annotations

import pytest

from tools.chaos.schedule import (
    ALL_KINDS,
    ALONE,
    CUTS,
    RECOVERY_S,
    ROUND_S,
    FaultKind,
    Topology,
    counts,
    draw_schedule,
    model_of,
)

BOTH = Topology(("", "paced-"))


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    assert draw_schedule(7, 120, BOTH) == draw_schedule(7, 120, BOTH)
    assert draw_schedule(7, 120, BOTH) != draw_schedule(8, 120, BOTH)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_have_sixty_kills_and_every_kind_three_times(seed: int) -> None:
    found = counts(draw_schedule(seed, 600, BOTH))
    assert set(found) == set(ALL_KINDS)
    assert found[FaultKind.KILL] >= 60
    assert min(found.values()) >= 3


@pytest.mark.parametrize("seed", range(20))
def test_a_round_strikes_one_host_and_ends_before_the_next(seed: int) -> None:
    for each in draw_schedule(seed, 600, BOTH):
        assert all(fault.node in BOTH.names and fault.node.endswith(f"-{each.host}") for fault in each.faults)
        assert all(fault.at_s + fault.seconds <= ROUND_S - RECOVERY_S + 0.5 for fault in each.faults)
        victims = [fault.node for fault in each.faults if fault.kind == FaultKind.KILL]
        assert len(victims) == len(set(victims))


def test_a_cut_link_joins_two_nodes_that_exchange_messages() -> None:
    cuts = [
        fault for seed in range(20) for each in draw_schedule(seed, 600, BOTH) for fault in each.faults if fault.peer
    ]
    assert {fault.kind for fault in cuts} == set(CUTS)
    for fault in cuts:
        ends = {fault.node, fault.peer}
        assert len(ends) == 2
        roles = sorted(end if end in ALONE else end.rsplit("-", 2)[-2] for end in ends)
        assert roles == sorted(CUTS[fault.kind])
        if set(roles) == {"prefill", "decode"}:
            assert model_of(fault.node) == model_of(fault.peer)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="got flood"):
        draw_schedule(1, 60, BOTH, ["kill", "flood"])
