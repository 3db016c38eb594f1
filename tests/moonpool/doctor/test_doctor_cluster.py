"""The doctor's findings for clusters in all kinds of trouble. A live one is examined in test_serve.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moonpool.cluster_view.collector import ClusterObservation, FrontendState
from moonpool.doctor.checks import Level
from moonpool.doctor.cluster import CHECKS, judge_cluster
from moonpool.doctor.peers import ConnectResult, Greeting, PeerProbe, PeerProtocol
from moonpool.errors import ClusterNotFound
from moonpool_proto.v1 import common_pb2, conductor_pb2

OK, NOTE, WARN, FAIL = Level.OK, Level.NOTE, Level.WARN, Level.FAIL
ROLES = {"p": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE, "a": common_pb2.ROLE_AGGREGATED}


def well() -> ClusterObservation:
    """Two prefill nodes, two decode nodes and their pool node, seen by two conductors alike."""
    told = conductor_pb2.ClusterReply(ready_models=["m"])
    for name in ("p0", "p1", "d0", "d1"):
        common: dict[str, Any] = {"model": "m", "model_fingerprint": "f", "max_model_len": 100, "pool_node_id": "k"}
        told.nodes.add(node=conductor_pb2.Node(node_id=name, role=ROLES[name[0]], **common))
    told.nodes.add(node=conductor_pb2.Node(node_id="k", role=common_pb2.ROLE_POOL))
    other = conductor_pb2.ClusterReply()
    other.CopyFrom(told)
    version = conductor_pb2.SloVersion(version=3, digest="x")
    slo = conductor_pb2.ShowSloReply(current=version)
    slo.acknowledged.add(node_id="one", version=3, digest="x")
    door = PeerProbe(
        "h:1", ConnectResult.OPEN, greeting=Greeting(PeerProtocol.MESSENGER, "messenger", encrypted=True, seconds=0.002)
    )
    doors = dict.fromkeys(("p0", "p1", "d0", "d1", "k"), door)
    return ClusterObservation({"one": told, "two": other}, slo, {}, doors, [FrontendState("http://h", "")])


def sample(seen: ClusterObservation, name: str, value: float, **labels: str) -> None:
    seen.reply.samples.add(name=name, value=value, labels=labels)


def node(seen: ClusterObservation, name: str) -> Any:
    return next(item for item in seen.reply.nodes if item.node.node_id == name)


def test_nothing_is_wrong_with_a_cluster_that_is_well() -> None:
    assert {finding.level for finding in judge_cluster(well())} == {OK}
    assert [finding.check for finding in judge_cluster(well())] == list(CHECKS)


def silent(seen: ClusterObservation) -> None:
    node(seen, "d0").suspect = True


def draining(seen: ClusterObservation) -> None:
    node(seen, "d0").report.draining = True


def not_ready(seen: ClusterObservation) -> None:
    del seen.reply.ready_models[:]


def empty(seen: ClusterObservation) -> None:
    for reply in seen.conductors.values():
        del reply.nodes[:]  # type: ignore[union-attr]


def unknown(seen: ClusterObservation) -> None:
    del seen.reply.nodes[1]


def other_weights(seen: ClusterObservation) -> None:
    node(seen, "p1").node.model_fingerprint = "g"


def other_blocks(seen: ClusterObservation) -> None:
    node(seen, "p1").node.spec.block_tokens = 32


def shorter(seen: ClusterObservation) -> None:
    node(seen, "p1").node.max_model_len = 50


def newer(seen: ClusterObservation) -> None:
    for item in seen.reply.nodes:
        item.node.software.version = "0.1"
    node(seen, "p1").node.software.version = "0.2"


def other_wire(seen: ClusterObservation) -> None:
    newer(seen)
    node(seen, "p0").node.software.kv_wire = 4
    node(seen, "p1").node.software.kv_wire = 5


def no_pool(seen: ClusterObservation) -> None:
    node(seen, "p1").node.pool_node_id = "k2"


def degraded(seen: ClusterObservation) -> None:
    sample(seen, "directory_exact", 0.0, node="k")


def broken_ssd(seen: ClusterObservation) -> None:
    node(seen, "k").report.counters.update(pool_ssd_capacity_bytes=9.0, pool_ssd_readable=1.0, pool_ssd_writable=0.0)


def full(seen: ClusterObservation) -> None:
    node(seen, "k").report.counters.update(pool_used_bytes=99.0, pool_capacity_bytes=100.0)


def slow(seen: ClusterObservation) -> None:
    sample(seen, "node_slowdown", 2.5, node="d1", what="step")


def held(seen: ClusterObservation) -> None:
    sample(seen, "event_loop_held_seconds", 0.4, process="conductor")


def redis_down(seen: ClusterObservation) -> None:
    sample(seen, "shared_store_up", 0.0)


def ending(seen: ClusterObservation) -> None:
    node(seen, "p0").report.counters["messenger_tls_certificate_left_seconds"] = 2 * 86400.0


def ended(seen: ClusterObservation) -> None:
    node(seen, "p0").report.counters["messenger_tls_certificate_left_seconds"] = -5.0


def unmeetable(seen: ClusterObservation) -> None:
    seen.objectives.unmeetable.append("ttft of chat is below any prefill")  # type: ignore[union-attr]


def behind(seen: ClusterObservation) -> None:
    seen.objectives.acknowledged.add(node_id="two", version=2, digest="y")  # type: ignore[union-attr]


def drift(seen: ClusterObservation) -> None:
    seen.objectives.drift.append("ttft 1 -> 2")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "check", "level", "said"),
    [
        (silent, "reports", FAIL, "silent: d0"),
        (draining, "reports", NOTE, "draining: d0"),
        (not_ready, "models", FAIL, "no node can serve m"),
        (empty, "models", FAIL, "no worker has joined"),
        (unknown, "conductors", WARN, "one lacks p1"),
        (draining, "spare nodes", NOTE, "decode of m"),
        (other_weights, "fit of workers", FAIL, "workers of m differ in weights"),
        (other_blocks, "fit of workers", FAIL, "workers of m differ in block_tokens"),
        (shorter, "fit of workers", WARN, "m 50 to 100"),
        (newer, "versions", NOTE, "4 nodes of 0.1, 1 nodes of 0.2"),
        (other_wire, "versions", FAIL, "cannot exchange KV"),
        (no_pool, "pool nodes of workers", WARN, "p1"),
        (degraded, "KV pool", WARN, "directory of k is incomplete"),
        (broken_ssd, "KV pool", FAIL, "SSD failed on k"),
        (full, "KV pool", NOTE, "without an SSD: k"),
        (slow, "node speed", WARN, "d1 takes 2.5 times as long for steps"),
        (held, "event loops", WARN, "conductor 400 ms"),
        (redis_down, "Redis", WARN, "one cannot use Redis"),
        (ending, "certificates", WARN, "p0 in 2.0 days"),
        (ended, "certificates", FAIL, "p0"),
        (unmeetable, "objectives", WARN, "ttft of chat"),
        (behind, "objectives", WARN, "two apply another version"),
        (drift, "objectives", NOTE, "ttft 1 -> 2"),
    ],
)
def test_what_is_wrong_is_found_by_its_check_alone(
    change: Callable[[ClusterObservation], None], check: str, level: Level, said: str
) -> None:
    seen = well()
    change(seen)
    findings = {finding.check: finding for finding in judge_cluster(seen)}
    assert (findings[check].level, bool(findings[check].advice)) == (level, True)
    assert said in findings[check].found
    worse = {name for name, finding in findings.items() if finding.level in (WARN, FAIL)} - {check}
    assert worse == set()


@pytest.mark.parametrize(
    ("fields", "check", "said"),
    [
        ({"unreachable": {"p0": "State at h:1: refused"}}, "control ports", "p0: State at h:1: refused"),
        ({"kv_ports": {"p0": PeerProbe("h:1", ConnectResult.REFUSED, "refused")}}, "KV ports", "p0: h:1: refused"),
        ({"frontends": [FrontendState("http://h", "draining")]}, "API servers", "http://h: draining"),
        ({"objectives": "no answer"}, "objectives", "no answer"),
    ],
)
def test_what_does_not_answer_is_told_in_its_own_words(fields: dict[str, Any], check: str, said: str) -> None:
    findings = {finding.check: finding for finding in judge_cluster(replace(well(), **fields))}
    assert said in findings[check].found
    assert findings[check].level in (WARN, FAIL)


def test_what_an_api_server_saw_is_said_to_be_seen_from_there_and_kv_ports_are_not_judged() -> None:
    far = replace(well(), kv_ports=None, viewpoint="the API server")
    findings = {finding.check: finding for finding in judge_cluster(far)}
    assert (findings["KV ports"].level, "--conductor" in findings["KV ports"].advice) == (NOTE, True)
    assert findings["control ports"].found == "5 nodes answer from the API server"


def test_nodes_of_which_only_some_encrypt_are_a_mistake() -> None:
    seen = well()
    bare = PeerProbe("h:2", ConnectResult.OPEN, greeting=Greeting(PeerProtocol.MESSENGER, "messenger", encrypted=False))
    mixed = replace(seen, kv_ports={**seen.kv_ports, "p0": bare})
    findings = {finding.check: finding for finding in judge_cluster(mixed)}
    assert (findings["KV ports"].level, "1 of 5" in findings["KV ports"].found) == (FAIL, True)


def test_a_conductor_that_is_away_is_named_and_the_others_word_counts() -> None:
    seen = well()
    seen = replace(seen, conductors={"one": "no answer", "two": seen.conductors["two"]})
    findings = {finding.check: finding for finding in judge_cluster(seen)}
    assert (findings["conductors"].level, findings["models"].level) == (FAIL, OK)
    with pytest.raises(ClusterNotFound, match="no answer"):
        _ = replace(seen, conductors={"one": "no answer"}).reply


def test_of_many_only_a_few_are_named() -> None:
    seen = replace(well(), unreachable={f"n{number}": "away" for number in range(9)})
    findings = {finding.check: finding for finding in judge_cluster(seen)}
    assert "and 4 more" in findings["control ports"].found
