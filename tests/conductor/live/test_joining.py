"""Nodes that join, report, are refused, drain, fall silent and leave: over real gRPC."""

import asyncio
import gc
import logging

import grpc
import pytest

from conductor import server
from conductor.service import ConductorService
from kvpool import KvGroup, KvSpec
from messenger.frames import VERSION as KV_WIRE
from moonpool_proto.v1 import common_pb2, conductor_pb2
from rpc import control
from rpc.join_tokens import JoinTokens
from rpc.versions import OLDEST_WIRE, WIRE, named, own_software

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)


@pytest.fixture
def services(monkeypatch):
    """The services behind the conductors that are started, from inside."""
    made = []

    class Told(ConductorService):
        def __init__(self, *parts):
            super().__init__(*parts)
            made.append(self)

    monkeypatch.setattr(server, "ConductorService", Told)
    return made


def software(wire=WIRE, oldest_wire=OLDEST_WIRE, kv_wire=KV_WIRE):
    return common_pb2.Software(version="9.0.0", wire=wire, oldest_wire=oldest_wire, kv_wire=kv_wire)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (software(wire=9, oldest_wire=8), ("this conductor", "needs wire 8 or newer", named(own_software()))),
        (software(kv_wire=99), ("node 'decode-0'", "by protocol 99", f"moves it by {KV_WIRE}")),
    ],
)
async def test_a_node_of_a_version_that_cannot_work_with_the_cluster_is_refused_by_both_names(conductor, told, words):
    _, client = await conductor()
    other = client.worker("decode-0", common_pb2.ROLE_DECODE)
    other.node.software.CopyFrom(own_software(kv_wire=KV_WIRE))
    await other.join()
    new = client.worker("prefill-0", common_pb2.ROLE_PREFILL)
    new.node.software.CopyFrom(told)
    refusal = await new.refusal()
    assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION
    for word in ("node 'prefill-0'", "Moonpool 9.0.0", *words):
        assert word in refusal.details()


async def test_nodes_of_neighbouring_versions_and_of_those_that_tell_none_work_together(conductor):
    _, client = await conductor()
    await client.join("decode-0", common_pb2.ROLE_DECODE)  # tells no version
    newer = client.worker("prefill-0", common_pb2.ROLE_PREFILL)
    newer.node.software.CopyFrom(software(wire=WIRE + 1))
    newer.node.MergeFromString(b"\xf8\x3e\x01")  # field 1007, which nobody knows yet
    await newer.join()
    assert (await client.schedule()).placement.prefill.node_id == "prefill-0"
    cluster = await client.stub.Cluster(conductor_pb2.ClusterRequest())
    assert [status.node.software.version for status in cluster.nodes] == ["", "9.0.0"]
    assert cluster.software == own_software()


async def test_a_frontend_of_a_version_that_cannot_be_spoken_with_is_refused_by_both_names(conductor):
    _, client = await conductor()
    call = client.stub.Schedule()
    await call.read()
    await call.write(conductor_pb2.FrontendCalls(software=software(wire=9, oldest_wire=8)))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "9.0.0" in refused.value.details()
    assert named(own_software()) in refused.value.details()


async def test_an_ended_stream_is_a_lost_node(conductor):
    _, client = await conductor()
    _, decode = await client.join_pair()
    decode.leave()
    await client.until_joined("prefill-0")
    rejection = (await client.schedule()).rejection
    assert (rejection.reason, rejection.retry_after_s) == ("no_nodes", 1.0)


async def test_a_report_that_cannot_be_taken_in_is_told_and_costs_the_node_its_stream_alone(conductor, caplog):
    _, client = await conductor()
    _, decode = await client.join_pair()
    other = conductor_pb2.Node()
    other.CopyFrom(decode.node)
    other.capacity_tokens += 1
    await decode.report(node=other)
    await decode.ended()
    (record,) = [one for one in caplog.records if one.exc_info is not None and one.name.startswith("conductor")]
    assert (record.name, "decode-0" in record.getMessage()) == ("conductor.service", True)
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    assert (await client.schedule("r2")).placement.decode.node_id == "decode-0"


async def test_a_node_that_stops_reporting_is_suspect_until_it_reports(conductor):
    _, client = await conductor(report_timeout_s=1.0)
    prefill, _ = await client.join_pair()
    await client.join("decode-1", common_pb2.ROLE_DECODE)

    async def suspects():
        await prefill.report()
        return {status.node.node_id for status in (await client.cluster()).nodes if status.suspect}

    async def both():
        return await suspects() == {"decode-0", "decode-1"}

    await client.until(both)
    assert not (await client.cluster()).ready_models
    rejection = (await client.schedule()).rejection
    assert (rejection.reason, "decode-0, decode-1 silent" in rejection.message) == ("no_nodes", True)
    await client.workers[-1].report()

    async def one():
        return await suspects() == {"decode-0"}

    await client.until(one)
    assert (await client.schedule()).placement.decode.node_id == "decode-1"


async def test_a_node_that_comes_back_replaces_its_former_incarnation(conductor):
    _, client = await conductor()
    _, old = await client.join_pair()
    await client.schedule()
    await client.join("decode-0", common_pb2.ROLE_DECODE, incarnation=2)
    assert await old.ended() == grpc.StatusCode.ABORTED
    assert (await client.json("Validate"))["counts"]["committed_tokens"] == 0
    assert (await client.schedule("s")).placement.decode.incarnation == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"namespace": bytes(16)}, "another provenance"),
        ({"spec": KvSpec(SPEC.groups, block_tokens=8)}, "block_tokens 8, not 16"),
        ({"spec": KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float16"),), 16)}, "KV in float16, not float32"),
        ({"spec": KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "int8", 4),), 16)}, "KV in int8 in groups of 4, not"),
        ({"spec": KvSpec((KvGroup("full", 0, (0, 1, 2), 1, 8, "float32"),), 16)}, "another KV spec"),
    ],
)
async def test_a_worker_with_other_kv_of_the_same_model_is_refused(conductor, fields, said):
    _, client = await conductor()
    await client.join_pair()
    error = await client.worker("decode-1", common_pb2.ROLE_DECODE, **fields).refusal()
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert said in error.details()
    assert "decode-1" in error.details()
    await client.until_joined("prefill-0", "decode-0")


async def test_another_model_may_have_other_kv(conductor):
    _, client = await conductor()
    await client.join_pair()
    await client.join("other-0", common_pb2.ROLE_AGGREGATED, model="other", namespace=bytes(16))
    await client.until_joined("prefill-0", "decode-0", "other-0")


async def test_a_stream_that_names_no_node_is_refused(conductor):
    _, client = await conductor()
    call = client.stub.Join()
    await call.write(conductor_pb2.NodeReport(num_running=1))
    with pytest.raises(grpc.aio.AioRpcError, match="must name the node"):
        await call.read()


async def test_the_cluster_shows_the_last_report(conductor):
    _, client = await conductor()
    worker = await client.join("a", common_pb2.ROLE_AGGREGATED)
    await worker.report(num_running=3, free_tokens=17, counters={"generation_tokens": 5.0})

    async def seen():
        report = (await client.cluster()).nodes[0].report
        return (report.num_running, report.free_tokens, dict(report.counters)) == (3, 17, {"generation_tokens": 5.0})

    await client.until(seen)


async def test_a_node_is_asked_to_drain_on_its_stream_and_is_not_said_to_be_lost(conductor, caplog):
    _, client = await conductor()
    prefill, decode = await client.join_pair()
    await client.drain("decode-0")
    command = await asyncio.wait_for(decode.command(), 10)
    assert command.HasField("drain")
    await decode.report(draining=True)

    async def draining():
        return [s.node.node_id for s in (await client.cluster()).nodes if s.report.draining] == ["decode-0"]

    await client.until(draining)
    await prefill.report()
    decode.leave()
    await client.until_joined("prefill-0")
    assert "is lost" not in caplog.text
    prefill.leave()
    await client.until_joined()
    assert "node prefill-0 is lost" in caplog.text


async def test_a_node_that_leaves_while_a_command_is_written_to_it_is_taken_off(conductor):
    _, client = await conductor()
    gc.disable()
    try:
        for index in range(40):
            prefill, decode = await client.join_pair()
            asked = asyncio.ensure_future(client.drain("decode-0"))
            for _ in range(index % 8):
                await asyncio.sleep(0)
            decode.leave()
            prefill.leave()
            await asyncio.gather(asked, return_exceptions=True)
            await client.until_joined()
    finally:
        gc.enable()


async def test_a_node_that_ends_its_reports_at_once_receives_its_status(conductor):
    """A write that is cancelled halfway would keep gRPC from sending one."""
    _, client = await conductor()
    for _ in range(200):
        worker = client.worker("prefill-0", common_pb2.ROLE_PREFILL)
        await worker.report(node=worker.node)
        await worker.end_reports()
        assert await worker.ended() is grpc.StatusCode.OK


async def test_a_node_is_taken_off_whenever_its_stream_is_cut_short_while_it_ends(conductor, services):
    """Sides of a stream end one after the other; gRPC may cancel the call at each step in between."""
    _, client = await conductor()
    (service,) = services
    for moment in range(12):
        told, leaves = asyncio.Event(), asyncio.Event()

        async def reports(leaves=leaves):
            yield conductor_pb2.NodeReport(node=client.worker("decode-0", common_pb2.ROLE_DECODE).node)
            await leaves.wait()

        class Stream:
            async def write(self, command, told=told):
                told.set()

        joined = asyncio.create_task(service.Join(reports(), Stream()))
        await asyncio.wait_for(told.wait(), 10)
        leaves.set()
        for _ in range(moment):
            await asyncio.sleep(0)
        joined.cancel()
        await asyncio.wait_for(asyncio.gather(joined, return_exceptions=True), 10)
        assert not (await client.cluster()).nodes, f"cut short after {moment} steps of the loop"


async def test_draining_an_unknown_node_is_refused_and_names_those_there_are(conductor):
    _, client = await conductor()
    await client.join_pair()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.drain("decode-7")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "unknown node 'decode-7'; joined nodes: decode-0, prefill-0"


async def test_a_pool_node_leaves_on_request_only_when_no_worker_needs_it(conductor, start_pool):
    _, client = await conductor()
    pool = await start_pool("pool-0")
    decode = await client.join("decode-0", common_pb2.ROLE_DECODE)
    await client.until_joined("decode-0", "pool-0")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.drain("pool-0")
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "decode-0" in caught.value.details()
    decode.leave()
    await client.until_joined("pool-0")
    await client.drain("pool-0")
    assert await pool.ended() is True
    await client.until_joined()


async def test_who_shows_no_join_token_can_neither_join_nor_ask_nor_drain_and_harms_nobody(
    conductor, tmp_path, request, caplog
):
    caplog.set_level(logging.DEBUG, "conductor")
    good, bad = "of-the-cluster-0123456789", "of-a-stranger-0123456789"
    request.addfinalizer(lambda: control.admit_by(None))
    for name, token in (("good", good), ("bad", bad)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(token)
    control.admit_by(JoinTokens(tmp_path / "good"))
    _, client = await conductor()
    await client.join_pair()
    for tokens in (None, JoinTokens(tmp_path / "bad")):
        control.admit_by(tokens)
        stranger = type(client)(client.line.target)
        refusals = [await stranger.worker("decode-1", common_pb2.ROLE_DECODE).refusal()]
        node = conductor_pb2.DrainNodeRequest(node_id="decode-0")
        asked = [stranger.cluster(), stranger.stub.DrainNode(node, timeout=10), stranger.json("Validate")]
        for call in asked:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            refusals.append(caught.value)
        assert {refusal.code() for refusal in refusals} == {grpc.StatusCode.UNAUTHENTICATED}
        assert all("join_token_file" in refusal.details() for refusal in refusals)
        with pytest.raises(control.Unavailable, match="join_token_file"):
            await stranger.schedule("stolen")
        await stranger.close()
    assert (await client.schedule("r")).WhichOneof("result") == "placement"
    await client.complete("r")
    await client.until_joined("prefill-0", "decode-0")
    assert "refused a call from" in caplog.text
    assert good not in caplog.text
    assert bad not in caplog.text
