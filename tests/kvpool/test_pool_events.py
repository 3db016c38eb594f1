"""Event streams from real pool nodes into a directory: snapshot, deltas, gaps, restarts; and joining a conductor."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from conductor.directory import DirectoryState
from kvpool import PoolEvents
from messenger import MessengerConfig
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc, pool_pb2, pool_pb2_grpc
from rpc.control import ControlDeadlineExceeded, start_server
from settings.keys import assemble

EXACT, DEGRADED = DirectoryState.EXACT, DirectoryState.DEGRADED


async def test_a_directory_follows_stores_evictions_and_quarantine(start_pool, worker, chain_of, follow, until) -> None:
    pool = await start_pool()
    client, chain = worker.client(pool.target), chain_of(5)
    await worker.put(client, chain[:2])
    follower = follow(pool.target)
    await until(follower.holds(worker.ns, chain, 2))
    await worker.put(client, chain)
    await until(follower.holds(worker.ns, chain, 5))
    await client.evict(worker.ns, chain[4:])
    await until(follower.holds(worker.ns, chain, 4))
    await client.quarantine(worker.ns, chain[1:2])
    await until(follower.holds(worker.ns, chain, 1))
    assert (follower.snapshots, follower.losses) == (1, [])


async def test_a_restarted_node_is_resynced_under_its_new_incarnation(
    start_process, tmp_path, worker, chain_of, follow, until
) -> None:
    listen, chain = f"unix:{tmp_path}/p.sock", chain_of(3)
    client = worker.client(listen)
    process = await start_process(listen)
    follower = follow(listen)
    first = await client.describe()
    await worker.put(client, chain)
    await until(follower.holds(worker.ns, chain, 3))
    assert await process.end(signal.SIGKILL) == -signal.SIGKILL
    await until(follower.holds(worker.ns, chain, 3, state=DEGRADED))
    process = await start_process(listen)
    await until(follower.holds(worker.ns, chain, 0))
    second = await client.describe()
    assert second.incarnation != first.incarnation
    await worker.put(client, chain)
    await until(follower.holds(worker.ns, chain, 3))
    assert follower.snapshots == 2
    assert (await client.validate())["ok"]
    assert await process.end(signal.SIGTERM) == 0


async def test_a_client_notices_the_restart_by_the_put_it_gets(start_process, tmp_path, worker, chain_of) -> None:
    listen = f"unix:{tmp_path}/p.sock"
    client = worker.client(listen)
    process = await start_process(listen)
    await client.abort_put(await worker.allocate(client, chain_of(1)))
    await process.end(signal.SIGKILL)
    process = await start_process(listen)
    ticket = await worker.allocate(client, chain_of(1))
    assert ticket.endpoint == (await worker.client(listen).describe()).endpoint
    await worker.write(ticket, seed=1)
    assert await client.seal(ticket, worker.digests(1)) == 1
    await process.end(signal.SIGTERM)


async def test_a_node_that_hangs_costs_a_call_three_seconds_beside_its_wait(
    start_process, tmp_path, worker, chain_of
) -> None:
    listen = f"unix:{tmp_path}/p.sock"
    client = worker.client(listen)
    process = await start_process(listen)
    await client.describe()
    process.process.send_signal(signal.SIGSTOP)
    calls = [
        client.pin(worker.ns, chain_of(1), lease_s=30),
        client.pin(worker.ns, chain_of(1), lease_s=30, wait_s=0.01),
        worker.allocate(client, chain_of(1)),
    ]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in errors} == {ControlDeadlineExceeded}
    said = [re.search("no answer within (.*) s", str(error)) for error in errors]
    assert [found and found[1] for found in said] == ["3", "3.01", "3"]


class ScriptedPool(pool_pb2_grpc.PoolServicer):
    """Answers each Events call with the next script of messages; then keeps the stream open in silence."""

    def __init__(self, *scripts: list[PoolEvents]) -> None:
        self.scripts = list(scripts)
        self.requests: list[tuple[int, int]] = []

    async def Events(self, request: Any, context: Any) -> AsyncIterator[pool_pb2.PoolEvents]:
        self.requests.append((request.incarnation, request.after_seq))
        for events in self.scripts.pop(0) if self.scripts else []:
            yield events.to_proto()
        await asyncio.Event().wait()


ScriptedPool.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


@pytest.fixture
async def script(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[tuple[ScriptedPool, str]]]]:
    """Serve a scripted pool; gives it and its target."""
    servers = []

    async def start(*scripts: list[PoolEvents]) -> tuple[ScriptedPool, str]:
        pool = ScriptedPool(*scripts)
        listen = f"unix:{tmp_path}/script.sock"
        servers.append(await start_server(listen, lambda s: pool_pb2_grpc.add_PoolServicer_to_server(pool, s)))
        return pool, listen

    yield start
    for server in servers:
        await server.stop(0)


@pytest.mark.parametrize(
    "broken",
    [
        PoolEvents(1, 9),
        PoolEvents(1, 5),
        PoolEvents(2, 8),
    ],
    ids=["gap", "repetition", "another incarnation"],
)
async def test_events_that_do_not_follow_lead_to_a_snapshot(script, follow, until, broken: PoolEvents) -> None:
    first = [PoolEvents(1, 7, snapshot_begin=True), PoolEvents(1, 7, snapshot_end=True), broken]
    again = [PoolEvents(1, 9, snapshot_begin=True), PoolEvents(1, 9, snapshot_end=True)]
    pool, target = await script(first, again)
    follower = follow(target)

    async def resynced() -> bool:
        return follower.directory.position("p") == (1, 9)

    await until(resynced)
    assert pool.requests == [(0, 0), (0, 0)]
    assert len(follower.losses) == 1
    assert "does not follow 1/7" in follower.losses[0]


async def test_a_silent_stream_is_left_and_continued_where_it_was(script, follow, until) -> None:
    pool, target = await script(
        [PoolEvents(1, 7, snapshot_begin=True), PoolEvents(1, 7, snapshot_end=True)], [PoolEvents(1, 7)]
    )
    follower = follow(target)

    async def continued() -> bool:
        return len(pool.requests) == 2 and follower.directory.state("p") is EXACT

    await until(continued)
    assert pool.requests == [(0, 0), (1, 7)]
    assert "no answer within 2 s" in follower.losses[0]


async def test_a_snapshot_that_breaks_off_is_asked_for_again(script, follow, until) -> None:
    pool, target = await script([PoolEvents(1, 7, snapshot_begin=True), PoolEvents(2, 8)])
    follow(target)

    async def asked_twice() -> bool:
        return len(pool.requests) >= 2

    await until(asked_twice)
    assert pool.requests[1] == (0, 0)


class RecordingConductor(conductor_pb2_grpc.ConductorServicer):
    def __init__(self) -> None:
        self.reports: list[list[conductor_pb2.NodeReport]] = []

    async def Join(
        self, request_iterator: AsyncIterator[conductor_pb2.NodeReport], context: Any
    ) -> AsyncIterator[conductor_pb2.NodeCommand]:
        mine: list[conductor_pb2.NodeReport] = []
        self.reports.append(mine)
        yield conductor_pb2.NodeCommand(accepted=conductor_pb2.JoinAccepted(conductor_incarnation=1))
        async for report in request_iterator:
            mine += [report]


RecordingConductor.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


async def test_a_node_joins_reports_and_joins_again_after_the_conductor_restarts(
    start_pool, worker, chain_of, tmp_path, until
) -> None:
    listen = f"unix:{tmp_path}/c.sock"
    pool = await start_pool(conductor_targets=(listen,))
    client = worker.client(pool.target)
    await worker.put(client, chain_of(3))
    description = await client.describe()
    for _ in range(2):
        conductor = RecordingConductor()

        def add(server: grpc.aio.Server, conductor: RecordingConductor = conductor) -> None:
            conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server)

        server = await start_server(listen, add)

        async def reported(conductor: RecordingConductor = conductor) -> bool:
            return bool(conductor.reports) and len(conductor.reports[0]) >= 3

        await until(reported)
        node = conductor.reports[0][0].node
        assert (node.node_id, node.role, node.target) == ("pool", common_pb2.ROLE_POOL, pool.target)
        assert node.incarnation == description.incarnation
        assert node.endpoint == description.endpoint.to_proto()
        assert not conductor.reports[0][1].HasField("node")
        assert conductor.reports[0][-1].counters["pool_stored_blocks"] == 3
        assert conductor.reports[0][-1].counters["pool_held_blocks"] == 3
        await server.stop(0)


async def test_leases_puts_and_fill_are_reported_but_no_running_requests(
    start_pool, worker, chain_of, tmp_path, until
) -> None:
    listen = f"unix:{tmp_path}/c.sock"
    conductor = RecordingConductor()
    server = await start_server(listen, lambda s: conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, s))
    pool = await start_pool(conductor_targets=(listen,))
    client = worker.client(pool.target)
    await worker.put(client, chain_of(3))
    lease = await client.pin(worker.ns, chain_of(2), lease_s=30)
    ticket = await worker.allocate(client, chain_of(5))
    slot_nbytes = sum(-(-worker.spec.slot_nbytes(g) // 64) * 64 for g in range(worker.spec.num_groups))

    def last(*names: str) -> list[float]:
        counters = conductor.reports[0][-1].counters if conductor.reports and conductor.reports[0] else {}
        return [counters.get(name, -1.0) for name in names]

    async def busy() -> bool:
        return last("pool_leases_open", "pool_puts_open", "pool_held_blocks") == [1, 1, 3]

    await until(busy)
    assert last("pool_used_bytes", "pool_capacity_bytes") == [5 * slot_nbytes, 1 << 20]
    await client.abort_put(ticket)
    await client.unpin(lease)

    async def at_rest() -> bool:
        return last("pool_leases_open", "pool_puts_open", "pool_used_bytes") == [0, 0, 3 * slot_nbytes]

    await until(at_rest)
    assert {report.num_running for report in conductor.reports[0]} == {0}
    await server.stop(0)


async def test_a_node_that_listens_at_a_wildcard_joins_as_what_it_advertises(
    start_pool, worker, chain_of, tmp_path, until
) -> None:
    listen = f"unix:{tmp_path}/c.sock"
    conductor = RecordingConductor()
    server = await start_server(listen, lambda s: conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, s))
    messenger = assemble(MessengerConfig, data_host="0.0.0.0", data_advertise="127.0.0.1", transport="tcp")
    pool = await start_pool(
        listen="0.0.0.0:0", advertise="127.0.0.1:0", conductor_targets=(listen,), messenger=messenger
    )
    assert pool.target.startswith("127.0.0.1:")

    async def reported() -> bool:
        return bool(conductor.reports) and bool(conductor.reports[0])

    await until(reported)
    node = conductor.reports[0][0].node
    assert (node.target, node.endpoint.tcp_host) == (pool.target, "127.0.0.1")
    await worker.put(worker.client(node.target), chain_of(2))
    await server.stop(0)
