"""`status` for every state of a node, from the conductor's reply and the ready file."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from moonpool.cluster_view.status import ClusterStatus, cluster_status
from moonpool.supervision.ready_file import ReadyFile, ReadyNode
from moonpool_proto.v1 import common_pb2, conductor_pb2


def ready_file(**nodes: ReadyNode) -> ReadyFile:
    return ReadyFile("http://127.0.0.1:1", "m", 7, "/run/x", "unix:/c", nodes)


def process(role: str, *, pid: int | None = 8, ready: bool = True) -> ReadyNode:
    return ReadyNode(role, pid, f"unix:/{role}", ready, 2, "/log", "m" if role.endswith("-node") else "")


@pytest.fixture
def joined() -> Callable[..., conductor_pb2.ClusterReply]:
    """A conductor's reply with one decode node, and a prefill node with these fields of its status and report."""

    def reply(*, suspect: bool = False, draining: bool = False, **counters: float) -> conductor_pb2.ClusterReply:
        told = conductor_pb2.ClusterReply(ready_models=["m"])
        common: dict[str, Any] = {"model": "m", "capacity_tokens": 1000}
        node = conductor_pb2.Node(node_id="p", role=common_pb2.ROLE_PREFILL, target="h:1", **common)
        report = conductor_pb2.NodeReport(num_waiting=3, num_running=1, free_tokens=250, draining=draining)
        report.counters.update(counters)
        told.nodes.add(node=node, report=report, suspect=suspect)
        told.nodes.add(node=conductor_pb2.Node(node_id="d", role=common_pb2.ROLE_DECODE, **common))
        told.nodes.add(node=conductor_pb2.Node(node_id="pool", role=common_pb2.ROLE_POOL))
        return told

    return reply


def state(seen: ClusterStatus, node: str) -> str:
    return next(row.state for row in seen.nodes if row.node == node)


def test_a_cluster_elsewhere_is_told_without_its_processes(joined: Callable[..., Any]) -> None:
    seen = cluster_status(joined(prompt_tokens=200.0, cached_tokens=50.0), None)
    prefill, decode, pool = seen.nodes
    assert (prefill.role, prefill.model, prefill.state, prefill.address) == ("prefill", "m", "ready", "h:1")
    assert (prefill.waiting, prefill.running, prefill.free_tokens, prefill.capacity_tokens) == (3, 1, 250, 1000)
    assert (prefill.pid, prefill.restarts, prefill.cached_share) == (None, None, 0.25)
    assert (decode.cached_share, pool.free_tokens) == (None, None)
    assert (seen.ready, seen.models, seen.cached_share) == (True, {"m": True}, 0.25)
    assert seen.verdict() == "ready; 25% of prompt tokens from the cache"


def test_versions_are_told_of_nodes_and_conductor_and_the_verdict_names_a_mixture(joined: Callable[..., Any]) -> None:
    told = joined()
    told.software.version = told.nodes[0].node.software.version = "0.2.0"
    ready = ready_file(conductor=ReadyNode("conductor", 8, "unix:/c", True, 0, "/log"))
    seen = cluster_status(told, ready)
    assert {row.node: row.version for row in seen.nodes} == {"conductor": "0.2.0", "p": "0.2.0", "d": "", "pool": ""}
    assert "together" not in seen.verdict()
    told.nodes[1].node.software.version = "0.1.0"
    assert "; versions 0.1.0 and 0.2.0 together" in cluster_status(told, ready).verdict()


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, "ready"), ({"draining": True}, "draining"), ({"suspect": True}, "silent")]
)
def test_a_joined_nodes_state_is_the_conductors(
    joined: Callable[..., Any], fields: dict[str, bool], expected: str
) -> None:
    for ready in (None, ready_file(p=process("prefill-node"))):
        seen = cluster_status(joined(**fields), ready)
        assert state(seen, "p") == expected
        assert (f"p {expected}" in seen.verdict()) == (expected != "ready")


def test_a_process_that_has_not_joined_is_starting_or_being_restarted(joined: Callable[..., Any]) -> None:
    ready = ready_file(
        conductor=process("conductor"),
        frontend=process("frontend", ready=False),
        d2=process("decode-node"),
        d3=process("decode-node", pid=None),
        p=process("prefill-node", pid=None),
    )
    seen = cluster_status(joined(), ready)
    states = [state(seen, node) for node in ("conductor", "frontend", "d2", "d3", "p", "d")]
    assert states == ["ready", "starting", "starting", "restarting", "restarting", "ready"]
    assert next(row.restarts for row in seen.nodes if row.node == "d2") == 2
    assert {row.role for row in seen.nodes if row.node in ("d", "d2", "d3")} == {"decode"}


def test_a_model_without_a_place_is_named() -> None:
    seen = cluster_status(conductor_pb2.ClusterReply(), ready_file(d=process("decode-node")))
    assert (seen.ready, seen.models, seen.cached_share) == (False, {"m": False}, None)
    assert seen.verdict() == "not ready: no node can serve a request of m; d starting"
    assert not cluster_status(conductor_pb2.ClusterReply(), None).ready


def test_roles_that_changed_and_prompts_computed_where_they_decode_are_told(joined: Callable[..., Any]) -> None:
    reply = joined()
    for outcome, count in (("done", 3), ("not_sooner", 5)):
        reply.samples.add(name="undivided_total", labels={"model_name": "m", "outcome": outcome}, value=count)
    roles = {"model_name": "m", "from_role": "prefill", "to_role": "decode"}
    reply.samples.add(name="role_switches_total", labels={**roles, "outcome": "done"}, value=2)
    reply.samples.add(name="role_switches_refused_total", labels={**roles, "reason": "last"}, value=1)
    seen = cluster_status(reply, None)
    assert "; 3 requests prefilled where they decode; " in seen.verdict() + "; "
    assert "role switches prefill to decode: 2 done, 1 refused (last)" in seen.verdict()
    assert seen.to_json()["undivided"] == {"done": 3, "not_sooner": 5}
    assert seen.to_json()["role_switches"] == {"prefill to decode": {"done": 2, "refused (last)": 1}}
    assert "role switches" not in cluster_status(joined(), None).verdict()


def test_a_demand_for_other_numbers_of_nodes_than_there_are_is_told(joined: Callable[..., Any]) -> None:
    reply = joined()
    there = Counter(row.role for row in cluster_status(reply, None).nodes if row.model == "m" and row.state == "ready")
    for role, count in (("prefill", there["prefill"] + 3), ("decode", there["decode"])):
        reply.samples.add(name="desired_nodes", labels={"model_name": "m", "role": role}, value=count)
    seen = cluster_status(reply, None)
    assert f"demand of m: prefill {there['prefill'] + 3} (has {there['prefill']})" in seen.verdict()
    assert "decode" not in seen.verdict().partition("demand of m")[2].partition(";")[0]
    assert seen.to_json()["desired_nodes"] == {"m": {"prefill": there["prefill"] + 3, "decode": there["decode"]}}
