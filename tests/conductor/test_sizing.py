"""How many nodes a demand needs: enough of them, soon; fewer late; and no swinging between two counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.policy.decisions import Place
from conductor.policy.events import NS, RequestCompleted, Tick
from conductor.policy.roles import (
    ModelSizing,
    RoleLoad,
    Sizing,
    Trend,
    decode_spare,
    node_counts,
    prefill_spare,
)

busy = st.floats(0, 1000)
GROW_S, SHRINK_S = 15, 300


def sizing() -> Sizing:
    return Sizing(GROW_S * NS, SHRINK_S * NS)


@given(busy)
def test_the_nodes_needed_have_time_to_spare_and_one_fewer_had_not(load: float) -> None:
    need, enough = node_counts(load)
    assert load / need <= 0.85 + 1e-9
    assert need == 1 or load / (need - 1) > 0.85
    assert enough >= need >= 1


@given(busy, busy, busy)
def test_spare_nodes_and_waiting_work_add_to_what_is_needed(load: float, spare: float, now: float) -> None:
    need, enough = node_counts(load, spare, now)
    assert need >= max(node_counts(load)[0], min(now, 4096))
    assert (need, enough) >= node_counts(load + spare)


@given(st.floats(0.01, 100), st.floats(0.01, 10), st.floats(0, 100))
def test_prefill_nodes_are_spared_for_tight_objectives_up_to_the_share_without_one(
    load: float, prefill_s: float, ttft_s: float
) -> None:
    usual = prefill_spare(load, prefill_s, 0.0)
    assert node_counts(load, usual)[0] == pytest.approx(load / 0.7, abs=1)
    assert 0 <= prefill_spare(load, prefill_s, ttft_s) <= usual
    assert prefill_spare(load, prefill_s, prefill_s / 2) == usual
    assert prefill_spare(load, prefill_s, 1e4 * prefill_s) <= 0.01
    assert prefill_spare(load, prefill_s, 3 * prefill_s) >= prefill_spare(load, prefill_s, 30 * prefill_s)


def test_decode_nodes_are_spared_for_two_deviations_of_the_number_of_answers() -> None:
    assert decode_spare(4.0, 100) * 100 == pytest.approx(2 * (4.0 * 100) ** 0.5)
    assert decode_spare(0.0, 0) == 0


def test_a_trend_knows_where_a_steady_rise_will_be() -> None:
    trend = Trend()
    for second in range(3000):
        trend.add(second * NS, 0.01 * second)
    assert trend.ahead(0) == pytest.approx(30, rel=0.01)
    assert trend.ahead(120) == pytest.approx(31.2, rel=0.01)
    for second in range(3000, 6000):
        trend.add(second * NS, 0.0)
    assert trend.ahead(120) == pytest.approx(0, abs=1e-3)


def test_the_model_is_sized_for_the_demand_that_is_coming() -> None:
    model = ModelSizing(GROW_S * NS, SHRINK_S * NS)
    wanted = []
    for second in range(1200):
        model.update(second * NS, {"prefill": RoleLoad(1, 0.005 * second)})
        wanted.append(model.roles["prefill"].wanted)
    assert wanted[-1] is not None
    assert wanted[-1] > 6.0 / 0.85
    model.update(1200 * NS, {"decode": RoleLoad(1, None)})
    assert list(model.roles) == ["decode"]


@given(st.lists(st.tuples(st.integers(1, 400), busy), max_size=40), st.integers(0, 20))
def test_no_wish_goes_beyond_what_was_needed_or_below_what_was_enough(
    looks: list[tuple[int, float]], nodes: int
) -> None:
    own, now_s = sizing(), 0
    seen = [max(1, nodes)]
    for pause_s, load in looks:
        now_s += pause_s
        before = own.wanted
        wanted = own.update(now_s * NS, RoleLoad(nodes, load))
        need, enough = node_counts(load)
        assert wanted is not None
        if before is not None and wanted > before:
            assert wanted <= need
        if before is not None and wanted < before:
            assert wanted >= enough
        seen += [need, enough]
        assert min(seen) <= wanted <= max(seen)


@given(busy, st.integers(1, 30))
def test_a_steady_demand_is_met_and_then_nothing_changes(load: float, nodes: int) -> None:
    own = sizing()
    wishes = [own.update(second * NS, RoleLoad(nodes, load)) for second in range(700)]
    need, enough = node_counts(load)
    assert wishes[-1] is not None
    assert need <= wishes[-1] <= max(enough, need)
    assert len(set(wishes)) <= 2


def test_more_are_wanted_after_a_moment_and_fewer_after_long() -> None:
    own = sizing()
    assert own.update(0, RoleLoad(2, 1.0)) == 2
    up = [own.update(second * NS, RoleLoad(2, 3.4)) for second in range(1, 40)]
    assert up.index(4) == GROW_S
    down = [own.update((40 + second) * NS, RoleLoad(4, 0.3)) for second in range(400)]
    assert down.index(1) == SHRINK_S


def test_a_peak_within_the_hold_counts_and_a_dip_begins_it_anew() -> None:
    own = sizing()
    own.update(0, RoleLoad(8, 6.0))
    told = [own.update(second * NS, RoleLoad(8, 2.0 if second == 150 else 0.3)) for second in range(1, 302)]
    assert told[-1] == 3  # the most that was enough meanwhile
    dips = [own.update((400 + second) * NS, RoleLoad(3, 0.3 if second % 10 == 9 else 9.0)) for second in range(100)]
    assert set(dips) == {3}


def test_without_a_known_demand_those_that_are_there_are_wanted() -> None:
    own = sizing()
    assert own.update(0, RoleLoad(0, None)) is None
    assert [own.update(1, RoleLoad(count, None)) for count in (1, 3, 0)] == [1, 3, 3]


def drive(c: Any, make: Any, seconds: int, *, answer: int = 2) -> dict[str, int]:
    """Ten requests a second for a while, each answered at once: what is wanted afterwards."""
    for second in range(seconds):
        for tenth in range(10):
            name = f"{c.conductor._now_ns}.{second}.{tenth}"
            placed = c.after(0.1).send(make.request(name, prompt=300, new=600))
            if isinstance(placed[0], Place):
                c.send(RequestCompleted(name, 0, "finished", ttft_s=0.1, mean_tbt_s=0.01, generated=answer))
        c.send(Tick())
    return {role: count for model, role, count in c.conductor.desired_nodes() if model == "m"}


def test_a_cluster_short_of_prefill_wants_more_of_it_whether_roles_switch_or_not(cluster: Any, make: Any) -> None:
    c = cluster(size_grow_hold_s=10)
    c.learn("prefill-0", per_token_s=1e-3)
    wanted = drive(c, make, 60)  # 3 node-seconds of prefill each second
    assert 4 <= wanted["prefill"] <= 7
    assert wanted["decode"] >= 1


def test_an_idle_cluster_wants_one_node_of_each_role_in_the_end(cluster: Any, make: Any) -> None:
    c = cluster(size_grow_hold_s=10, size_shrink_hold_s=30)
    c.learn("prefill-0", per_token_s=1e-3)
    before = drive(c, make, 60)
    for _ in range(600):
        c.after(1.0).send(Tick())
    assert before["prefill"] > 1
    assert {role: count for _, role, count in c.conductor.desired_nodes()} == {"prefill": 1, "decode": 1}


def test_a_cluster_that_has_answered_nothing_wants_the_nodes_it_has(cluster: Any, make: Any) -> None:
    c = cluster()
    c.send(Tick())
    prefill = [node for node in c.conductor._state.nodes if node.role == "prefill"]
    assert ("m", "prefill", len(prefill)) in list(c.conductor.desired_nodes())


@pytest.mark.parametrize("hold", ["size_grow_hold_s", "size_shrink_hold_s"])
def test_holds_must_be_finite(cluster: Any, hold: str) -> None:
    with pytest.raises(Exception, match=hold):
        cluster(**{hold: -1})
