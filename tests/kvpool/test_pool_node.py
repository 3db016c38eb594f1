"""A pool node over real sockets: puts, leases, statuses, reads through the messenger, self-check."""

import asyncio
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool import KvSpec, Lease, SlotStatus, layer_digests, parent_keys
from kvpool.errors import PoolConfigError, PoolRefused, PutLost, SpecMismatch
from messenger import AddressInUse, Messenger, RemoteAccessError, RemoteKey
from rpc.control import Unavailable
from settings.keys import InvalidSetting

NEW, EXISTS, NO_SPACE = SlotStatus.NEW, SlotStatus.EXISTS, SlotStatus.NO_SPACE


async def test_describe_names_the_node_and_its_messenger(start_pool, worker) -> None:
    pool = await start_pool(pool_bytes=256 << 10)
    description = await worker.client(pool.target).describe()
    assert (description.node_id, description.arena_bytes) == ("pool", 256 << 10)
    assert description.endpoint.node_id == "pool"
    assert description.endpoint.incarnation == description.incarnation


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_reads_through_the_messenger_are_bit_equal(start_pool, start_worker, chain_of, transport: str) -> None:
    pool, worker = await start_pool(), start_worker(transport)
    client = worker.client(pool.target)
    written = await worker.put(client, chain_of(5))
    lease = await client.pin(worker.ns, chain_of(9), lease_s=30)
    assert lease is not None
    assert lease.num_blocks == 5
    assert worker.messenger.connect(lease.endpoint).transport == transport
    for g, view in enumerate(await worker.read(lease)):
        assert np.array_equal(view, written[g])
        assert np.array_equal(layer_digests(view, worker.spec, g, np.full(5, 4, np.int32)), lease.digests[g])
    await client.unpin(lease)


async def test_a_put_is_invisible_before_its_seal(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    ticket = await worker.allocate(client, chain_of(3))
    await worker.write(ticket, seed=1)
    assert await client.pin(worker.ns, chain_of(3), lease_s=30) is None
    assert await client.seal(ticket, worker.digests(3)) == 3
    lease = await client.pin(worker.ns, chain_of(3), lease_s=30)
    assert np.array_equal(lease.chain, chain_of(3))
    await client.unpin(lease)


async def test_a_block_can_be_evicted_only_once_nobody_can_write_to_it(
    start_pool, worker, chain_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = worker.client((await start_pool()).target)
    ticket = await worker.allocate(client, chain_of(2))
    await worker.write(ticket, seed=1)
    loop, revoke = asyncio.get_running_loop(), Messenger.revoke
    has_begun, may_end = asyncio.Event(), threading.Event()

    def slow_revoke(messenger: Messenger, key: RemoteKey) -> None:
        loop.call_soon_threadsafe(has_begun.set)
        assert may_end.wait(60)
        revoke(messenger, key)

    monkeypatch.setattr(Messenger, "revoke", slow_revoke)
    sealing = asyncio.ensure_future(client.seal(ticket, worker.digests(2), deadline_s=60))
    try:
        async with asyncio.timeout(60):
            await has_begun.wait()
        assert await client.pin(worker.ns, chain_of(2), lease_s=30) is None
        assert await client.evict(worker.ns, chain_of(2)) == 0
    finally:
        may_end.set()
    assert await sealing == 2
    assert await client.evict(worker.ns, chain_of(2)) == 2


async def test_statuses_new_exists_no_space(start_pool, worker, chain_of) -> None:
    pool = await start_pool(pool_bytes=64 << 10)
    client = worker.client(pool.target)
    await worker.put(client, chain_of(2))
    lease = await client.pin(worker.ns, chain_of(2), lease_s=30)
    ticket = await worker.allocate(client, chain_of(200))
    n = len(ticket.new_blocks)
    assert ticket.status == [EXISTS] * 2 + [NEW] * n + [NO_SPACE] * (198 - n)
    assert 20 < n < 198
    assert ticket.new_blocks == list(range(2, n + 2))
    assert ticket.offsets.shape == (2, n)
    nothing = await worker.allocate(client, chain_of(2))
    assert (nothing.key, nothing.new_blocks, nothing.offsets.shape) == (None, [], (2, 0))
    assert await client.seal(nothing, worker.digests(0)) == 0
    await client.abort_put(nothing)
    await client.abort_put(ticket)
    await client.unpin(lease)


async def test_sealed_blocks_cannot_be_written_any_more(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    ticket = await worker.allocate(client, chain_of(2))
    written = await worker.write(ticket, seed=1)
    await client.seal(ticket, worker.digests(2))
    with pytest.raises(RemoteAccessError):
        await worker.write(ticket, seed=2)
    lease = await client.pin(worker.ns, chain_of(2), lease_s=30)
    for g, view in enumerate(await worker.read(lease)):
        assert np.array_equal(view, written[g])
    await client.unpin(lease)


async def test_an_aborted_puts_slots_are_reused_and_safe_from_its_writer(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    ticket = await worker.allocate(client, chain_of(2))
    await client.abort_put(ticket)
    with pytest.raises(PutLost):
        await client.seal(ticket, worker.digests(2))
    again = await worker.allocate(client, chain_of(2))
    assert np.array_equal(np.sort(again.offsets), np.sort(ticket.offsets))
    with pytest.raises(RemoteAccessError):
        await worker.write(ticket, seed=2)
    await client.abort_put(again)


async def test_a_dead_owners_put_expires_and_its_slots_come_back(start_pool, worker, chain_of, until) -> None:
    client = worker.client((await start_pool()).target)
    ticket = await worker.allocate(client, chain_of(2), ttl_s=0.05)

    async def expired() -> bool:
        return (await client.validate())["ok"]

    assert not await expired()
    await until(expired)
    with pytest.raises(PutLost, match="allocate again"):
        await client.seal(ticket, worker.digests(2))
    with pytest.raises(RemoteAccessError):
        await worker.write(ticket, seed=1)
    assert (await client.state())["counters"]["pool_expired_puts"] == 1


async def test_a_lease_protects_from_eviction_until_given_back(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool(pool_bytes=64 << 10)).target)
    await worker.put(client, chain_of(3))
    lease = await client.pin(worker.ns, chain_of(3), lease_s=30)
    crowd = chain_of(200, salt="crowd")
    await worker.put(client, crowd)
    assert await client.evict(worker.ns, chain_of(3)) == 0
    await client.unpin(lease)
    await worker.put(client, chain_of(200, salt="more"))
    assert await client.pin(worker.ns, chain_of(3), lease_s=30) is None


async def test_a_dead_owners_lease_expires(start_pool, worker, chain_of, until) -> None:
    pool = await start_pool(operation_s=0.05)
    client = worker.client(pool.target)
    await worker.put(client, chain_of(3))
    lease = await client.pin(worker.ns, chain_of(3), lease_s=0.05)
    assert (await client.state())["owners"] == {"w0": {"leases": 1, "puts": 0}}

    async def expired() -> bool:
        return (await client.validate())["ok"]

    await until(expired)
    assert not await client.renew(lease, 30)
    await client.unpin(lease)
    assert await client.evict(worker.ns, chain_of(3)) == 3


async def test_a_killed_owners_puts_and_leases_end_with_its_connection(start_pool, worker, tmp_path, until) -> None:
    pool = await start_pool()
    client = worker.client(pool.target)
    script = Path(__file__).with_name("worker_process.py")
    doomed = await asyncio.create_subprocess_exec(
        sys.executable, str(script), pool.target, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert doomed.stdout is not None
    assert (await asyncio.wait_for(doomed.stdout.readline(), 60)).strip() == b"holds"
    assert (await client.state())["owners"] == {"doomed": {"leases": 1, "puts": 1}}
    doomed.kill()
    await doomed.wait()
    await doomed.stdout.read()

    async def nobody_holds() -> bool:
        return (await client.validate())["ok"]

    await until(nobody_holds)
    assert (await client.state())["counts"]["blocks"] == 1


async def test_a_renewed_lease_goes_on(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(1))
    lease = await client.pin(worker.ns, chain_of(1), lease_s=20)
    assert await client.renew(lease, 30)
    await client.unpin(lease)
    assert not await client.renew(lease, 30)


async def test_pin_gives_the_longest_leading_run_with_all_groups(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    chain = chain_of(6)
    await worker.put(client, chain[:2])
    ticket = await client.allocate(worker.ns, worker.spec, chain[4:], chain[3:5], ttl_s=30)
    await worker.write(ticket, seed=3)
    await client.seal(ticket, worker.digests(2))
    lease = await client.pin(worker.ns, chain, lease_s=30)
    assert lease.offsets.shape == (2, 2)
    assert [d.shape for d in lease.digests] == [(2, 2), (2, 3)]
    assert await client.pin(worker.ns, chain[2:], lease_s=30) is None
    await client.unpin(lease)


@pytest.mark.parametrize(
    ("stored", "window_blocks", "expected"),
    [
        ([3, 4, 5], 3, (3, 6)),
        ([0, 1, 3, 4, 5, 7], 2, (4, 6)),
        ([0, 1, 3, 4, 5, 7], 3, (3, 6)),
        ([0, 1, 3, 4, 5, 7], 4, (0, 2)),
        ([0, 1], 4, (0, 2)),
        (list(range(8)), 3, (5, 8)),
        ([1, 2, 3], 4, None),
    ],
)
async def test_pin_gives_the_last_window_that_is_whole(
    start_pool, worker, chain_of, stored: list[int], window_blocks: int, expected: tuple[int, int] | None
) -> None:
    client, chain = worker.client((await start_pool()).target), chain_of(8)
    for index in stored:
        await worker.put(client, chain[index : index + 1])
    lease = await client.pin(worker.ns, chain, lease_s=30, window_blocks=window_blocks)
    if expected is None:
        assert lease is None
        return
    assert lease is not None
    assert (lease.first_block, lease.first_block + lease.num_blocks) == expected
    assert np.array_equal(lease.chain, chain[slice(*expected)])
    await client.unpin(lease)


async def test_quarantined_blocks_are_gone_for_new_readers(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(4))
    lease = await client.pin(worker.ns, chain_of(4), lease_s=30)
    assert await client.quarantine(worker.ns, chain_of(4)[1:2]) == 1
    assert await client.quarantine(worker.ns, chain_of(4)[1:2]) == 0
    shorter = await client.pin(worker.ns, chain_of(4), lease_s=30)
    assert shorter.num_blocks == 1
    await client.unpin(shorter)
    await client.unpin(lease)
    ticket = await worker.allocate(client, chain_of(4))
    assert ticket.status == [EXISTS, NEW, EXISTS, EXISTS]
    await client.abort_put(ticket)


async def test_a_lease_travels_as_a_pull_range(start_pool, worker, chain_of, spec: KvSpec) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(4))
    lease = await client.pin(worker.ns, chain_of(4), lease_s=30)
    message = lease.head(3).to_pull_range(7)
    assert (message.first_block, len(message.blocks)) == (7, 3)
    got = Lease.from_pull_range(message, spec)
    assert (got.num_blocks, got.key, got.endpoint) == (3, lease.key, lease.endpoint)
    assert np.array_equal(got.offsets, lease.offsets[:, :3])
    assert all(np.array_equal(a, b[:3]) for a, b in zip(got.digests, lease.digests, strict=True))
    await client.unpin(lease)


async def test_requests_that_cannot_be_right_are_refused_by_name(start_pool, worker, chain_of, spec: KvSpec) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(1))
    one_group = KvSpec(spec.groups[:1], spec.block_tokens)
    with pytest.raises(SpecMismatch, match="holds blocks of"):
        await client.allocate(worker.ns, one_group, chain_of(1), parent_keys(chain_of(1)), ttl_s=30)
    with pytest.raises(PoolRefused, match="parents"):
        await client.allocate(worker.ns, spec, chain_of(2), chain_of(1), ttl_s=30)
    with pytest.raises(PoolRefused, match="namespace"):
        await client.pin(b"short", chain_of(1), lease_s=30)
    with pytest.raises(PoolRefused, match="lease_s"):
        await client.pin(worker.ns, chain_of(1), lease_s=-1)
    ticket = await worker.allocate(client, chain_of(2))
    with pytest.raises(PoolRefused, match="digests per group"):
        await client.seal(ticket, [d[:, :1] for d in worker.digests(1)])
    await client.abort_put(ticket)


async def test_validate_names_what_is_held(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(1))
    ticket = await worker.allocate(client, chain_of(2))
    lease = await client.pin(worker.ns, chain_of(1), lease_s=30)
    report = await client.validate()
    assert not report["ok"]
    assert {"1 leases are held", "1 puts are held", "1 write_keys are held"} <= set(report["problems"])
    await client.abort_put(ticket)
    await client.unpin(lease)
    assert (await client.validate())["ok"]


async def test_nobody_there_is_unavailable(worker, tmp_path) -> None:
    client = worker.client(f"unix:{tmp_path}/nobody.sock")
    with pytest.raises(Unavailable, match=r"Pool.Describe at unix:.*nobody.sock"):
        await client.describe()


async def test_an_address_in_use_is_named(start_pool) -> None:
    pool = await start_pool(listen="127.0.0.1:0")
    with pytest.raises(AddressInUse):
        await start_pool("other", listen=pool.target)


@pytest.mark.parametrize(
    "fields", [{"pool_bytes": 1000}, {"pool_bytes": 1 << 60}, {"operation_s": 0}, {"max_incoming_copies": 0}]
)
async def test_impossible_configurations_are_refused(start_pool, fields: dict[str, float]) -> None:
    with pytest.raises((PoolConfigError, InvalidSetting)):
        await start_pool(**fields)


async def test_many_owners_at_once_store_every_block_once(start_pool, start_worker, chain_of) -> None:
    pool, workers = await start_pool(), [start_worker() for _ in range(3)]
    clients = [worker.client(pool.target) for worker in workers]

    async def store(i: int) -> int:
        ticket = await workers[i].allocate(clients[i], chain_of(40))
        if ticket.new_blocks:
            await workers[i].write(ticket, seed=i)
            await clients[i].seal(ticket, workers[i].digests(len(ticket.new_blocks)))
        return len(ticket.new_blocks)

    assert sum(await asyncio.gather(*(store(i) for i in range(3)))) == 40
    lease = await clients[0].pin(workers[0].ns, chain_of(40), lease_s=30)
    assert lease.num_blocks == 40
    await clients[0].unpin(lease)
