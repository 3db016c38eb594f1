"""When a node should change its role: only under pressure, only for much, only after long, and never the last one."""

from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.policy import role_plan
from conductor.policy.decisions import Place, Reject, SwitchRole
from conductor.policy.events import NS, DecodeSample, Held, NodeReported, RequestCompleted, Tick
from conductor.policy.roles import Demand, Split, Switching, better_split

loads = st.floats(0, 100)
counts = st.integers(1, 20)
shares = st.floats(0, 1)


def switching() -> Switching:
    return Switching(hold_ns=30 * NS, rest_ns=120 * NS)


PRESSED = Split(2, 6, prefill_load=2.4, decode_load=2.0)


@given(st.builds(Split, counts, counts, loads, loads), shares)
def test_a_change_helps_the_busier_role_and_leaves_no_role_without_nodes(split: Split, share: float) -> None:
    switch = better_split(split, share)
    if switch is not None:
        giving = split.decode_nodes if switch.to == "prefill" else split.prefill_nodes
        assert 1 <= switch.nodes <= max(1, share * giving)
        moved = split.moved(switch.to, switch.nodes)
        assert moved is not None
        assert min(moved.prefill_nodes, moved.decode_nodes) >= 1
        assert moved.busiest < 0.85 * split.busiest
        assert split.busiest >= 0.7


@given(st.builds(Split, counts, counts, loads, loads), shares)
def test_what_was_changed_is_not_changed_back_under_the_same_demand(split: Split, share: float) -> None:
    switch = better_split(split, share)
    if switch is not None:
        moved = split.moved(switch.to, switch.nodes)
        assert moved is not None
        again = better_split(moved, share)
        assert again is None or again.to == switch.to


def test_as_many_nodes_change_at_once_as_help_within_the_share() -> None:
    split = Split(1, 7, prefill_load=4.0, decode_load=1.5)
    changes = [better_split(split, share) for share in (0.0, 0.3, 0.5, 1.0)]
    assert [(change.to, change.nodes) for change in changes if change is not None] == [
        ("prefill", 1),
        ("prefill", 2),
        ("prefill", 3),
        ("prefill", 5),  # a sixth would leave the only decode node busier
    ]


def test_nothing_changes_where_there_is_time_to_spare_or_nothing_to_give() -> None:
    assert better_split(Split(2, 6, prefill_load=1.2, decode_load=0.1), 0.5) is None  # 60 % busy
    assert better_split(Split(1, 1, prefill_load=5.0, decode_load=0.1), 1.0) is None
    wanted = [better_split(split, 0.5) for split in (PRESSED, Split(6, 2, prefill_load=2.0, decode_load=2.4))]
    assert [switch.to for switch in wanted if switch is not None] == ["prefill", "decode"]


def test_a_wish_must_last_and_rests_once_it_was_granted() -> None:
    model = switching()
    told = [model.update(second * NS, PRESSED) is not None for second in range(200)]
    assert [second for second, said in enumerate(told) if said] == [30, 150]


def test_a_wish_that_was_given_up_begins_anew() -> None:
    model, calm = switching(), Split(2, 6, 0.1, 0.1)
    for second in range(100):
        assert model.update(second * NS, calm if second % 25 == 24 else PRESSED) is None


def test_demand_is_what_arrives_per_second_and_fades() -> None:
    demand = Demand()
    for tenth in range(3000):
        demand.arrived(tenth * NS // 10, prefill_s=0.25, prompt_tokens=1000)
        demand.answered(tenth * NS // 10, 200)
    now_ns = 300 * NS
    assert abs(demand.prefill_load(now_ns) - 2.5) < 0.05
    assert abs(demand.decode_load(now_ns, step_s=0.05, room=20) - 10 * 200 * 0.05 / 20) < 0.1
    assert abs(demand.mean_context - 1100) < 1e-6
    assert demand.prefill_load(now_ns + 600 * NS) < 0.01


def test_a_young_cluster_is_not_thought_idle() -> None:
    demand = Demand()
    for tenth in range(100):
        demand.arrived(tenth * NS // 10, prefill_s=0.25, prompt_tokens=1000)
    assert abs(demand.prefill_load(10 * NS) - 2.5) < 0.2


def press(c: Any, make: Any, seconds: int, *, prompt: int, new: int, answer: int) -> list[SwitchRole]:
    """Ten requests a second for a while, each answered a second later; the changes that are decided meanwhile."""
    decided: list[SwitchRole] = []
    for second in range(seconds):
        for tenth in range(10):
            name = f"{second}.{tenth}"
            placed = c.after(0.1).send(make.request(name, prompt=prompt, new=new))
            if isinstance(placed[0], Place):
                c.send(RequestCompleted(name, 0, "finished", ttft_s=0.1, mean_tbt_s=0.01, generated=answer))
        decided += [decision for decision in c.send(Tick()) if isinstance(decision, SwitchRole)]
    return decided


@pytest.mark.parametrize(("mode", "is_advice"), [("advise", True), ("act", False)])
def test_a_cluster_short_of_prefill_wants_a_decode_node_for_it(
    cluster: Any, make: Any, mode: str, is_advice: bool
) -> None:
    c = cluster(role_switching=mode, role_hold_s=10, role_rest_s=1000)
    c.learn("prefill-0", per_token_s=1e-3)
    (switch,) = press(c, make, 60, prompt=300, new=20, answer=2)  # 3 node-seconds of prefill each second, on 2 nodes
    assert (switch.node_id, switch.role, switch.is_advice) == ("decode-0", "prefill", is_advice)
    assert "2 prefill nodes" in switch.reason


def test_a_cluster_short_of_decode_wants_the_idlest_prefill_node_for_it(cluster: Any, make: Any) -> None:
    c = cluster(role_switching="act", role_hold_s=10, role_rest_s=1000)
    c.learn("decode-0", per_token_s=1e-6, step_s=0.01)
    # Answers of 500 tokens at 10 ms for each request in the batch: 50 node-seconds a second.
    switches = press(c, make, 40, prompt=16, new=600, answer=500)
    assert [(switch.node_id, switch.role) for switch in switches] == [("prefill-0", "decode")]


def test_running_answers_that_are_longer_than_those_before_want_a_prefill_node_before_they_end(
    cluster: Any, make: Any
) -> None:
    def switches(running: int) -> list[tuple[str, str]]:
        c = cluster(role_switching="act", role_hold_s=10, role_rest_s=1000)
        c.learn("decode-0", per_token_s=1e-6, step_s=0.01)
        for number in range(running):
            (placed,) = c.send(make.request(f"long-{number}", prompt=16, new=60))
            c.progress(placed.prefill, "prefill_ended", f"long-{number}")
            c.progress(placed.decode, "decode_joined", f"long-{number}")
        found = press(c, make, 30, prompt=16, new=20, answer=2)
        return [(switch.node_id, switch.role) for switch in found]

    assert switches(2) == []
    assert switches(60) == [("prefill-0", "decode")]


def test_nothing_is_decided_where_roles_stay_or_the_load_is_low(cluster: Any, make: Any) -> None:
    c = cluster(role_hold_s=10)
    c.learn("prefill-0", per_token_s=1e-3)
    assert press(c, make, 30, prompt=300, new=20, answer=2) == []
    calm = cluster(role_switching="act", role_hold_s=10)
    calm.learn("prefill-0", per_token_s=1e-6)
    assert press(calm, make, 30, prompt=300, new=20, answer=2) == []


def test_a_client_that_comes_back_after_a_rejection_is_one_demand_and_after_a_minute_another(
    cluster: Any, make: Any
) -> None:
    c = cluster(role_switching="act", ttft_slo_s=1e-6)
    c.learn("prefill-0", per_token_s=1e-3)
    demand = c.conductor._state.switching
    for number in range(5):  # each time as a new request of the same prompt
        (refused,) = c.after(10.0).send(make.request(f"r{number}", prompt=1000, prompt_key=7))
        assert isinstance(refused, Reject)
    c.send(make.request("other", prompt=1000, prompt_key=8))
    c.send(make.request("short", prompt=10))
    assert demand["m"].demand.requests == pytest.approx(3, abs=0.6)  # the first has faded a little
    c.after(61.0).send(make.request("late", prompt=1000, prompt_key=7))
    assert demand["m"].demand.requests == pytest.approx(1 + 2.5 * exp(-61 / 60), abs=0.1)


def test_prompts_that_are_forgotten_are_the_oldest() -> None:
    demand = Demand()
    for key in range(1, 10_002):
        demand.turned_away(key, key)
    assert not demand.comes_back(20_000, 1)
    assert demand.comes_back(20_000, 2)
    assert not demand.comes_back(20_000, 2)


def test_what_another_conductor_placed_is_demand_here_as_soon_as_its_worker_tells(cluster: Any, make: Any) -> None:
    one, other = (cluster(role_switching="act") for _ in range(2))
    for c in (one, other):
        c.learn("prefill-0", per_token_s=1e-3)
    (placed,) = one.send(make.request("r", prompt=1000, new=20))
    held = Held("r", 0, remaining_prefill_tokens=1000, prompt_tokens=1000, max_new_tokens=20, decode_node="decode-0")
    for c in (one, other):
        for _ in range(2):
            c.holds(placed.prefill, held)
    one_s, other_s = (c.conductor._state.switching["m"].demand.prefill_s for c in (one, other))
    assert one_s == pytest.approx(1.0, rel=0.05)
    assert other_s == pytest.approx(one_s, rel=0.05)


def test_nothing_is_decided_before_an_answer_has_told_how_long_answers_are(cluster: Any, make: Any) -> None:
    c = cluster(role_switching="act", role_hold_s=10)
    c.learn("prefill-0", per_token_s=1e-3)
    decided: list[SwitchRole] = []
    for tenth in range(400):
        c.after(0.1).send(make.request(f"{tenth}", prompt=300, new=20))
        decided += [decision for decision in c.send(Tick()) if isinstance(decision, SwitchRole)]
    assert decided == []
    c.send(RequestCompleted("0", 0, "finished", ttft_s=0.1, mean_tbt_s=0.01, generated=5))
    for _ in range(12):
        decided += [decision for decision in c.after(1.0).send(Tick()) if isinstance(decision, SwitchRole)]
    assert [decision.role for decision in decided] == ["prefill"]


def test_decode_is_sized_by_the_pages_that_requests_reserve(cluster: Any, make: Any) -> None:
    def busy(new: int) -> float:
        c = cluster(role_switching="act")
        steps = tuple(DecodeSample(batch, 100 * batch, 0.01) for batch in (1, 8, 64)) * 20
        c.send(NodeReported("decode-0", decodes=steps))
        press(c, make, 10, prompt=16, new=new, answer=8)
        model = c.conductor._state.nodes.model("m")
        demand = c.conductor._state.switching["m"].demand
        return role_plan._decode_load(c.conductor._now_ns, c.conductor._state, "m", model.decode, demand)[0]

    assert busy(4000) > 1.5 * busy(8)
