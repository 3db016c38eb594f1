"""The conductor predicts a request's wait by the very order in which its node will serve it."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.policy import Conductor, PolicyConfig
from conductor.policy.decisions import Place, Reject
from conductor.policy.events import (
    NS,
    Held,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    ObjectivesChanged,
    Progress,
    QueueKey,
    RequestArrived,
    RequestCompleted,
    Tick,
)
from conductor.policy.kernels import prefill_kernels
from conductor.policy.requests import REQUEST
from worker.policy import scheduling_order
from worker.policy.scheduling_order import WaitQueue

AGING_S = 30.0
RECORD = {
    "classes": {"urgent": {"priority": -5, "ttft": "2s"}, "batch": {"priority": 5}, "usual": {"ttft": "10s"}},
    "tenants": {"b": {"weight": 3}},
    "headers": "any",
}


def conductor_of(*prefill: str, **config: object) -> Conductor:
    config = {"aging_s": AGING_S, "max_queue_s": 1e6, "explain": 8} | config
    config = {"attained_share": 0.0, "report_timeout_s": 0.0} | config
    conductor = Conductor(PolicyConfig(**config))  # type: ignore[arg-type]
    conductor.on_event(0, ObjectivesChanged(1, json.dumps(RECORD)))
    for node_id in (*prefill, "decode-0"):
        role = node_id.split("-")[0]
        view = NodeView(node_id, role, 1, "h", "", "m", 16, 1 << 20, 1 << 16, 64, 1000)  # type: ignore[arg-type]
        conductor.on_event(0, NodeJoined(view))
    return conductor


def request(name: str, prompt: int = 1000, **fields: object) -> RequestArrived:
    return RequestArrived(name, 0, "f", "m", prompt, 8, **fields)  # type: ignore[arg-type]


def stands(turn: QueueKey, now_ns: int) -> scheduling_order.QueueEntry:
    """As a worker whose clock is the conductor's takes it."""
    now_s = now_ns / NS
    times = now_s - turn.waited_s, now_s + turn.due_in_s, now_s + turn.ages_in_s
    return scheduling_order.QueueEntry(*times, turn.level, turn.account, turn.start_ns, turn.priority)


arrivals: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    prompt=st.integers(10, 4000),
    tenant=st.sampled_from("abc"),
    slo_class=st.sampled_from(["", "urgent", "batch", "usual"]),
    priority=st.integers(-1, 1),
    waited_s=st.sampled_from([0.0, 0.5, 29.0, 31.0]),
)
steps = st.lists(
    st.tuples(
        st.integers(1, 2_000), st.one_of(arrivals, arrivals, arrivals, st.sampled_from(["start", "end", "cancel"]))
    ),
    min_size=2,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_predicted_wait_is_the_work_that_the_node_will_do_first(history: list) -> None:  # type: ignore[type-arg]
    conductor, now_ns = conductor_of("prefill-0", "prefill-1"), 0
    lines = {"prefill-0": WaitQueue(), "prefill-1": WaitQueue()}
    at: dict[str, str] = {}
    for number, (gap_ms, step) in enumerate(history):
        now_ns += gap_ms * 1_000_000
        if isinstance(step, dict):
            name = f"r{number}"
            event = request(name, **step)
            place = conductor.on_event(now_ns, event)[0]
            assert isinstance(place, Place)
            at[name] = place.prefill
            mine = stands(place.turn, now_ns)
            for score in place.considered.prefill:
                line = copy.deepcopy(lines[score.node_id])
                line.add((name, 0), mine)
                assert score.queue_s == pytest.approx(work_before(conductor, line, at, name, now_ns))
            lines[place.prefill].add((name, 0), mine)
        elif at:
            name = min(at, key=lambda one: lines[at[one]].rank((one, 0), now_ns / NS))
            if step == "start":
                conductor.on_event(now_ns, NodeReported(at[name], progress=(Progress(name, 0, "prefill_started"),)))
            else:
                lines[at[name]].remove((name, 0))
                over: NodeReported | RequestCompleted = RequestCompleted(name, 0, "cancelled")
                if step == "end":
                    over = NodeReported(at[name], progress=(Progress(name, 0, "prefill_ended"),))
                conductor.on_event(now_ns, over)
                del at[name]
    assert conductor.validate()[0] == []


def work_before(conductor: Conductor, line: WaitQueue, at: dict[str, str], name: str, now_ns: int) -> float:
    """Seconds of compute left of those in line before `name`, which is not in the ledger there."""
    table, total_ns = conductor._state.requests, 0
    for other in at:
        key, row = (other, 0), table.find(other)
        if row is None or other == name or key not in line:
            continue
        if line.rank(key, now_ns / NS) < line.rank((name, 0), now_ns / NS):
            started = int(table.column("started_ns")[row])
            elapsed_ns = max(0, now_ns - started) if started >= 0 else 0
            total_ns += max(0, int(table.column("prefill_ns")[row]) - elapsed_ns)
    return total_ns / NS


@pytest.fixture
def cluster() -> SimpleNamespace:
    """One prefill node, and `ask`, which places a request and says how long it is predicted to wait."""
    conductor = conductor_of("prefill-0")
    made = SimpleNamespace(conductor=conductor, now_ns=NS, turns={})

    def ask(name: str, **fields: object) -> float:
        place = conductor.on_event(made.now_ns, request(name, **fields))[0]  # type: ignore[arg-type]
        assert isinstance(place, Place), place
        made.turns[name] = place.turn
        return place.considered.prefill[0].queue_s

    made.ask = ask
    return made


def test_one_that_asks_little_waits_little_behind_one_that_floods(cluster: SimpleNamespace) -> None:
    waits_s = [cluster.ask(f"flood-{i}", tenant="a") for i in range(20)]
    assert waits_s == sorted(waits_s)
    assert cluster.ask("little", tenant="c") < waits_s[2]
    assert cluster.ask("flood-20", tenant="a") > waits_s[-1]


def test_a_tenant_of_weight_three_has_three_requests_served_for_one_of_another(cluster: SimpleNamespace) -> None:
    for i in range(12):
        cluster.ask(f"a{i}", tenant="a")
        cluster.ask(f"b{i}", tenant="b")
    line = WaitQueue()
    for name, turn in cluster.turns.items():
        line.add((name, 0), stands(turn, cluster.now_ns))
    order = sorted(cluster.turns, key=lambda name: line.rank((name, 0), cluster.now_ns / NS))
    assert [name[0] for name in order[:12]].count("b") == 9


def test_an_urgent_class_waits_for_nobody_else_and_others_wait_for_it(cluster: SimpleNamespace) -> None:
    for i in range(5):
        cluster.ask(f"batch-{i}", slo_class="batch")
    one_s = cluster.ask("probe", slo_class="batch") / 5
    assert cluster.ask("urgent", slo_class="urgent") == 0
    assert cluster.ask("usual") == pytest.approx(one_s)
    assert cluster.ask("batch-6", slo_class="batch") == pytest.approx(8 * one_s)


@pytest.mark.parametrize("rows", [2, 5, 400])
def test_however_many_wait_the_first_of_an_account_has_its_smallest_ticket(rows: int) -> None:
    rng = np.random.default_rng(rows)
    requests = np.full(rows, -1, REQUEST)
    requests["prefill_node"], requests["prefill_ns"] = rng.integers(2, size=rows), 1
    for name, values in zip(("level", "account", "priority"), rng.integers(2, size=(3, rows)), strict=True):
        requests[name] = values
    for name, values in zip(("due_ns", "arrived_ns"), rng.integers(rows, size=(2, rows)), strict=True):
        requests[name] = values
    requests["ticket_ns"] = rng.permutation(rows)
    requests["prefill_node"][0] = requests["level"][0] = requests["account"][0] = 0
    before = requests["ticket_ns"].copy()
    prefill_kernels().reassign_tickets(requests, 0)
    waits = (requests["prefill_node"] == 0) & (requests["level"] == 0) & (requests["account"] == 0)
    order = sorted(
        np.flatnonzero(waits), key=lambda row: (*requests[["priority", "due_ns", "arrived_ns"]][row].tolist(), row)
    )
    assert requests["ticket_ns"][order].tolist() == sorted(before[waits].tolist())
    assert (requests["ticket_ns"][~waits] == before[~waits]).all()


def test_deadlines_order_a_tenants_requests(cluster: SimpleNamespace) -> None:
    for i in range(5):
        cluster.ask(f"r{i}", slo_class="usual")
    assert cluster.ask("soon", slo_class="usual", ttft_objective_s=1.0) == 0
    patient_s = cluster.ask("patient", slo_class="usual", ttft_objective_s=20.0)
    assert cluster.ask("last", slo_class="usual") == patient_s


def test_what_has_waited_for_the_bound_is_before_everything_newer(cluster: SimpleNamespace) -> None:
    one_s = (cluster.ask("first", slo_class="batch"), cluster.ask("probe", slo_class="batch"))[1]
    assert cluster.ask("urgent", slo_class="urgent") == 0
    cluster.now_ns += round(AGING_S * NS)
    assert cluster.ask("newer", slo_class="urgent") == pytest.approx(3 * one_s)
    assert cluster.ask("moved", slo_class="batch", waited_s=2 * AGING_S) == 0


def test_what_another_conductor_placed_stands_where_the_worker_says(cluster: SimpleNamespace) -> None:
    one_s = (cluster.ask("mine"), cluster.ask("probe"))[1]
    told = QueueKey(5, "", 0, 0, 1.0, 9.0, 29.0)
    held = Held("theirs", 0, remaining_prefill_tokens=1000, prompt_tokens=1000, max_new_tokens=8, turn=told)
    cluster.conductor.on_event(cluster.now_ns, NodeReported("prefill-0", held=(held,)))
    assert cluster.ask("usual") == pytest.approx(2 * one_s)
    assert cluster.ask("batch", slo_class="batch") == pytest.approx(4 * one_s, rel=0.1)
    cluster.conductor.on_event(cluster.now_ns, NodeLost("prefill-0", 1))


def test_a_tenant_has_so_many_endless_requests_and_no_more(cluster: SimpleNamespace) -> None:
    for i in range(4):
        cluster.ask(f"r{i}", tenant="a", endless=True)
    refused = cluster.conductor.on_event(cluster.now_ns, request("r4", tenant="a", endless=True))
    assert isinstance(refused[0], Reject)
    assert (refused[0].reason, refused[0].retry_after_s) == ("endless", 1.0)
    assert "4 endless requests of this tenant" in refused[0].message
    cluster.ask("another", tenant="c", endless=True)
    cluster.ask("with an end", tenant="a")
    cluster.ask("moved", tenant="a", endless=True, generated=5)
    cluster.conductor.on_event(cluster.now_ns, RequestCompleted("r0", 0, "cancelled"))
    cluster.conductor.on_event(cluster.now_ns, RequestCompleted("moved", 0, "cancelled"))
    cluster.ask("r5", tenant="a", endless=True)


def test_an_endless_request_is_charged_while_it_runs(cluster: SimpleNamespace) -> None:
    cluster.ask("r", tenant="a", endless=True)
    report = NodeReported("prefill-0", progress=(Progress("r", 0, "prefill_started"),))
    cluster.conductor.on_event(cluster.now_ns, report)
    cluster.now_ns += 20 * NS
    cluster.conductor.on_event(cluster.now_ns, Tick())
    cluster.ask("next", tenant="a")
    cluster.ask("other", tenant="c")
    assert cluster.turns["next"].start_ns > cluster.turns["other"].start_ns + NS
