"""The routes under /admin: who may call what, what is forwarded, and the errors of what is not."""

import asyncio
from typing import Any

import aiohttp
import grpc.aio
import pytest

from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc import gateway
from rpc.control import CallRefused, Unavailable, call, open_channel

ADMIN, USER = ({"authorization": f"Bearer mp-{name}-key"} for name in ("admins", "users"))


@pytest.fixture(autouse=True)
def no_key() -> Any:
    yield
    gateway.authorize("")


async def posted(http: aiohttp.ClientSession, bed: Any, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
    async with http.post(f"{bed.url}/admin/{path}", json=body, **kwargs) as answer:
        return answer.status, await answer.json()


async def known(bed: Any, node_id: str) -> None:
    """Wait until the frontend has polled the node."""
    async with asyncio.timeout(60), open_channel(gateway.node_url(bed.url, node_id)) as channel:
        while True:
            try:
                await call(WorkerStub(channel).State(common_pb2.JsonRequest()), what="", target="", deadline_s=60)
            except CallRefused:
                await asyncio.sleep(0.05)
            except Unavailable:  # the frontend has tried to call it
                return


async def test_views_are_for_admins_if_there_are_keys_and_changes_always(
    open_bed: Any, http: aiohttp.ClientSession
) -> None:
    drain = {"node_id": "prefill-0"}
    async with open_bed() as bed:
        assert (await posted(http, bed, "conductor/Cluster", {}))[0] == 200
        status, said = await posted(http, bed, "conductor/DrainNode", drain)
        assert (status, said["error"]["code"]) == (403, "no_admin_key")
    async with open_bed(with_keys=True) as bed:
        for path in ("conductor/Cluster", "conductor/DrainNode", "nodes/prefill-0/State", "supervisor/Scale"):
            assert (await posted(http, bed, path, {}))[0] == 401, path
            assert (await posted(http, bed, path, {}, headers=USER))[0] == 403, path
        async with http.get(f"{bed.url}/admin/conductors") as answer:
            assert answer.status == 401
        await bed.join_usual()
        assert await posted(http, bed, "conductor/DrainNode", drain, headers=ADMIN) == (200, {})
        assert (await bed.nodes["prefill-0"].command()).HasField("drain")


async def test_only_the_listed_methods_exist(open_bed: Any, http: aiohttp.ClientSession) -> None:
    async with open_bed(with_keys=True) as bed:
        await bed.join_usual()
        gateway.authorize("mp-admins-key")
        await known(bed, "prefill-0")
        for path in ("conductor/Join", "conductor/Schedule", "nodes/prefill-0/Attach", "nodes//State", "other/State"):
            assert (await posted(http, bed, path, {}, headers=ADMIN))[0] == 404, path
        status, said = await posted(http, bed, "nodes/prefill-0/Flush", {}, headers=ADMIN)
        assert (status, said["error"]["code"]) == (400, "INVALID_ARGUMENT")
        async with http.get(f"{bed.url}/admin/conductor/Cluster", headers=ADMIN) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_a_stub_gets_the_messages_that_direct_access_gives(open_bed: Any) -> None:
    async with open_bed(with_keys=True) as bed:
        await bed.join_usual()
        gateway.authorize("mp-admins-key")
        assert await gateway.conductors_behind(bed.url) == [bed.target]
        for target in (gateway.conductor_url(bed.url), gateway.conductor_url(bed.url, bed.target)):
            async with open_channel(target) as channel:
                far = await ConductorStub(channel).Cluster(conductor_pb2.ClusterRequest())
            near = await bed.stub.Cluster(conductor_pb2.ClusterRequest())
            assert [item.node for item in far.nodes] == [item.node for item in near.nodes]
            assert far.conductor_incarnation == near.conductor_incarnation


async def test_a_refusal_keeps_the_code_and_reason_of_the_process_that_refused(open_bed: Any) -> None:
    async with open_bed(with_keys=True) as bed:
        gateway.authorize("mp-admins-key")
        async with open_channel(gateway.conductor_url(bed.url)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ConductorStub(channel).DrainNode(conductor_pb2.DrainNodeRequest(node_id="nobody"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "nobody" in str(refused.value.details())
        async with open_channel(gateway.conductor_url(bed.url, "10.0.0.9:1")) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="the conductor must be one of"):
                await ConductorStub(channel).Cluster(conductor_pb2.ClusterRequest())


async def test_a_conductor_that_is_away_is_named(open_bed: Any) -> None:
    async with open_bed() as bed:
        await bed.stop_conductor()
        async with open_channel(gateway.conductor_url(bed.url)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ConductorStub(channel).Cluster(conductor_pb2.ClusterRequest())
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert f"Conductor.Cluster at {bed.target}" in str(failed.value.details())


async def test_callers_cannot_report_tenants_as_frontends_do(open_bed: Any, http: aiohttp.ClientSession) -> None:
    async with open_bed() as bed:
        body = {"frontend_id": "fake", "tenants": ["mallory"]}
        assert (await posted(http, bed, "conductor/Cluster", body))[0] == 200
        with pytest.raises(grpc.aio.AioRpcError, match="mallory"):  # the conductor knows no such tenant
            await bed.stub.ChangeSlo(
                conductor_pb2.ChangeSloRequest(
                    author="a", reason="r", content='{"tenants": {"mallory": {"ttft": 1}}}', trial=True
                )
            )


async def test_a_body_that_is_no_request_is_refused_by_name(open_bed: Any, http: aiohttp.ClientSession) -> None:
    async with open_bed(with_keys=True) as bed:
        bodies: list[Any] = [{"nodeid": "x"}, {"node_id": 1}, []]
        for body in bodies:
            status, said = await posted(http, bed, "conductor/DrainNode", body, headers=ADMIN)
            assert status == 400, said
