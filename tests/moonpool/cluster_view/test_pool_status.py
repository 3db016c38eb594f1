"""`pool status` of nodes in trouble: silent, missing from the directory, with a failing disk."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from kvpool import PoolNodeConfig, node_metrics
from kvpool.node import PoolNode
from moonpool.cluster_view.locate import Located
from moonpool.cluster_view.pool_client import ask_pool_status
from moonpool.cluster_view.pool_rendering import status_table
from moonpool.cluster_view.pool_status import node_status, pool_status, unreachable_node
from moonpool.cluster_view.reply import is_pool
from moonpool.errors import ClusterNotFound
from moonpool_proto.v1 import common_pb2, conductor_pb2
from settings.keys import assemble


@pytest.fixture
def reply() -> conductor_pb2.ClusterReply:
    told = conductor_pb2.ClusterReply()
    told.nodes.add(node=conductor_pb2.Node(node_id="p", role=common_pb2.ROLE_PREFILL))
    told.nodes[0].report.counters.update(
        {"prompt_tokens": 100.0, "cached_tokens": 70.0, "cached_dram_tokens": 40.0, "cached_ssd_tokens": 20.0}
    )
    told.nodes.add(node=conductor_pb2.Node(node_id="pool", role=common_pb2.ROLE_POOL, target="h:1"))
    for tier, blocks in (("dram", 3), ("ssd", 2)):
        told.samples.add(name="directory_blocks", value=blocks, labels={"node": "pool", "tier": tier})
    told.samples.add(name="directory_exact", value=0, labels={"node": "pool"})
    told.samples.add(name="replicas", value=2)
    told.samples.add(name="replication_saved_seconds_total", value=1.5)
    return told


@pytest.fixture
def state() -> dict[str, Any]:
    """Return the report of a node before its start."""
    node = PoolNode(assemble(PoolNodeConfig, node_id="pool", listen="unix:/nowhere"), incarnation=1)
    counters = node_metrics.counters(node)
    tiers = {
        tier: {"blocks": 4 - 2 * (tier == "ssd"), "used_bytes": 5, "capacity_bytes": 10} for tier in ("dram", "ssd")
    }
    counts = node_metrics.counts(node) | {"blocks": 5}
    memory = {"arena_pages": "small", "door": "", "namespaces": {"ab": {"blocks": 5, "spec": {}}}}
    return {"tiers": tiers, "counters": counters, "counts": counts, "ssd": None, **memory}


def test_tokens_are_told_by_where_their_kv_came_from(reply: conductor_pb2.ClusterReply) -> None:
    seen = pool_status(reply, [])
    assert (seen.prompt_tokens, seen.reused_tokens) == (100, {"pages": 10, "dram": 40, "ssd": 20, "remote": 0})
    assert (seen.replicas, seen.replication_saved_s, seen.replication_spent_s) == (2, 1.5, 0.0)


def test_a_node_that_does_not_answer_is_told_with_what_the_conductor_knows(reply: conductor_pb2.ClusterReply) -> None:
    (item,) = (item for item in reply.nodes if is_pool(item))
    item.suspect = True
    seen = pool_status(reply, [unreachable_node(item, reply, "no answer within 10 s")])
    (node,) = seen.nodes
    assert (node.state, node.directory, node.directory_blocks, node.hit_rate) == ("silent", "DEGRADED", 5, None)
    assert seen.troubles() == ["pool does not answer: no answer within 10 s"]


def test_a_disk_in_trouble_an_inexact_directory_and_damage_are_troubles(
    reply: conductor_pb2.ClusterReply, state: dict[str, Any]
) -> None:
    (item,) = (item for item in reply.nodes if is_pool(item))
    state["ssd"] = {"state": "read_only", "folder": "/ssd"}
    state["counters"] |= {"pool_ssd_write_errors": 3, "pool_dram_corrupt_blocks": 1}
    seen = pool_status(reply, [node_status(item, reply, state)])
    (node,) = seen.nodes
    assert (node.ssd_errors, node.unwritten_blocks, node.namespaces) == ({"ssd_write_errors": 3}, 3, {"ab": 5})
    assert seen.troubles() == [
        "pool: the SSD in /ssd is read_only",
        "pool: the conductor's directory of it is incomplete",
        "pool: 1 damaged blocks were removed",
    ]


def test_namespaces_are_told_with_the_models_whose_workers_use_them(
    reply: conductor_pb2.ClusterReply, state: dict[str, Any]
) -> None:
    reply.nodes[0].node.MergeFrom(
        conductor_pb2.Node(model="small", kv_namespace=b"\xab", window_namespace=b"\xac", window_blocks=3)
    )
    reply.nodes.add(
        node=conductor_pb2.Node(model="smaller", kv_namespace=b"\xae", window_namespace=b"\xae", window_blocks=3)
    )
    (item,) = (item for item in reply.nodes if is_pool(item))
    stored = ("ab", 5), ("ac", 2), ("ad", 1), ("ae", 3)
    state["namespaces"] = {name: {"blocks": blocks, "spec": {}} for name, blocks in stored}
    node = node_status(item, reply, state)
    assert node.namespace_users == {"ab": "small", "ac": "small, layers with windows", "ad": "", "ae": "smaller"}
    screen = io.StringIO()
    Console(file=screen, width=120).print(status_table(pool_status(reply, [node])))
    told = screen.getvalue()
    assert "namespace ab (small): 5 blocks" in told
    assert "namespace ac (small, layers with windows): 2 blocks" in told
    assert "namespace ad (of no worker that has joined): 1 blocks" in told


def test_evictions_are_told_by_tier_and_reason_with_their_median_age(
    reply: conductor_pb2.ClusterReply, state: dict[str, Any]
) -> None:
    (item,) = (item for item in reply.nodes if is_pool(item))
    state["counters"] |= {
        "pool_evicted_dram_room_blocks": 3,
        "pool_evicted_ssd_quota_blocks": 1,
        "pool_lost_no_ssd_blocks": 2,
        **{f"pool_evicted_dram_age_le_{bound}": 4 for bound in ("10s", "1m", "5m", "15m", "1h", "6h", "1d")},
        "pool_evicted_dram_age_count": 4,
        "pool_saved_ssd_compute_us": 250_000,
    }
    node = node_status(item, reply, state)
    assert {name: tier.evicted_blocks for name, tier in node.tiers.items()} == {
        "dram": {"room": 3},
        "ssd": {"quota": 1},
    }
    assert (node.tiers["dram"].evicted_age_p50_s, node.tiers["ssd"].evicted_age_p50_s) == (5.5, None)
    assert (node.lost_blocks, node.tiers["ssd"].saved_s) == ({"no_ssd": 2}, 0.25)


def test_a_cluster_that_does_not_answer_is_said_to_be_away() -> None:
    with pytest.raises(ClusterNotFound, match="conductor does not answer"):
        asyncio.run(ask_pool_status(Located("127.0.0.1:1", (), None)))
