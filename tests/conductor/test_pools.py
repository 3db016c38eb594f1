"""Real pool nodes as the conductor uses them: followed whatever happens; copies of hot prefixes dropped, hinted at."""

import asyncio

import numpy as np
import pytest

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.directory import DirectoryState, WindowedBlocks
from conductor.policy.decisions import Copy, Shrink
from conductor.pools import CopiedPrefixes, PoolNodes
from kvpool import KvGroup, KvSpec, keys_u64, layer_digests, parent_keys
from kvpool.client import PoolClient
from kvpool.config import PoolNodeConfig
from kvpool.server import serve_pool_node
from messenger import MessengerConfig
from moonpool_proto.v1 import conductor_pb2
from settings.keys import assemble

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)
NAMESPACE = bytes(range(16))
CHAIN = np.random.default_rng(1).integers(0, 256, (10, 16), dtype=np.uint8)
NAMES = ("pool-0", "pool-1")
WINDOWS = WindowedBlocks(NAMESPACE, 3)


class Nodes:
    """Two pool nodes, and a conductor's side of them."""

    def __init__(self, folder):
        self._folder = folder
        self._running = {}
        self.core = Core(assemble(ConductorConfig, listen=f"unix:{folder}/c.sock"))
        self.pools = PoolNodes(self.core, 1, 10.0)

    def target(self, name):
        return f"unix:{self._folder}/{name}.sock"

    async def start(self, name):
        stop, ready = asyncio.Event(), asyncio.Event()
        config = assemble(
            PoolNodeConfig,
            node_id=name,
            listen=self.target(name),
            pool_bytes=4 << 20,
            messenger=assemble(MessengerConfig, transport="tcp"),
        )
        task = asyncio.create_task(serve_pool_node(config, stop, lambda _: ready.set()))
        self._running[name] = stop, task
        await asyncio.wait_for(ready.wait(), 30)

    async def stop(self, name):
        stop, task = self._running.pop(name)
        stop.set()
        await asyncio.wait_for(task, 30)

    def join(self, name):
        self.pools.add(conductor_pb2.Node(node_id=name, target=self.target(name)))

    async def store(self, name):
        """All of the chain; its bytes are those of an arena that nobody has used."""
        client = PoolClient(self.target(name), owner="test", owner_incarnation=1)
        ticket = await client.allocate(NAMESPACE, SPEC, CHAIN, parent_keys(CHAIN), ttl_s=60)
        zeros = np.zeros((len(CHAIN), SPEC.slot_nbytes(0)), np.uint8)
        digests = layer_digests(zeros, SPEC, 0, np.full(len(CHAIN), 16, np.int32))
        assert await client.seal(ticket, [digests]) == len(CHAIN)
        await client.close()

    async def told(self, name):
        """Return the holders that the node was told for its blocks."""
        client = PoolClient(self.target(name), owner="test", owner_incarnation=1)
        found = [block for key in CHAIN for block in await client.inspect(key.tobytes(), kv_namespace=NAMESPACE)]
        await client.close()
        return [block["replicas"] for block in found]

    async def held(self, name):
        return len(await self.told(name))

    async def known(self, *names):
        """Wait until the directory has all of the chain at each node."""
        await until(lambda: [self.pools.directory.num_blocks(name) for name in names] == [len(CHAIN)] * len(names))
        await until(lambda: all(self.pools.directory.state(name) is DirectoryState.EXACT for name in names))

    async def settled(self):
        await until(lambda: not self.pools.num_copies)

    async def close(self):
        await self.pools.close()
        for name in list(self._running):
            await self.stop(name)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def nodes(tmp_path):
    made = Nodes(tmp_path)
    made.pools.directory_updater.open()
    for name in NAMES:
        await made.start(name)
        made.join(name)
        await made.store(name)
    await made.known(*NAMES)
    yield made
    await made.close()


async def test_of_two_copies_that_go_cold_at_once_one_stays(nodes):
    for number, name in enumerate(NAMES, 1):
        nodes.pools.replicas.add(NAMESPACE, CHAIN.tobytes(), name, number)
    for number, name in enumerate(NAMES, 1):
        nodes.pools.shrink(Shrink(name, number))
    await nodes.settled()
    assert [await nodes.held(name) for name in NAMES] == [0, 10]


async def test_a_copy_stays_while_the_other_holder_does_not_answer(nodes):
    nodes.pools.replicas.add(NAMESPACE, CHAIN.tobytes(), "pool-1", 7)
    await nodes.stop("pool-0")
    await until(lambda: nodes.pools.directory.state("pool-0") is DirectoryState.DEGRADED)
    nodes.pools.shrink(Shrink("pool-1", 7))
    await nodes.settled()
    assert await nodes.held("pool-1") == 10


async def test_what_was_there_before_the_copy_stays_when_the_copy_goes(nodes):
    nodes.pools.replicas.add(NAMESPACE, CHAIN.tobytes(), "pool-1", 7)
    nodes.pools.shrink(Shrink("pool-1", 7, keep_blocks=4))
    await nodes.settled()
    assert [await nodes.held(name) for name in NAMES] == [10, 4]


async def test_a_holder_that_could_not_be_told_of_the_others_is_told_later(nodes):
    nodes.pools.replicas.add(NAMESPACE, CHAIN.tobytes(), "pool-1", 7)
    await nodes.stop("pool-1")
    nodes.pools.send_replica_hints()
    await nodes.settled()
    await nodes.start("pool-1")
    await nodes.store("pool-1")
    await nodes.known(*NAMES)
    assert await nodes.told("pool-1") == [0] * 10
    nodes.pools.send_replica_hints()
    await nodes.settled()
    assert await nodes.told("pool-1") == [1] * 10


async def test_a_holder_that_joins_anew_is_told_anew(nodes):
    nodes.pools.replicas.add(NAMESPACE, CHAIN.tobytes(), "pool-1", 7)
    nodes.pools.send_replica_hints()
    await nodes.settled()
    await nodes.stop("pool-1")
    await nodes.start("pool-1")
    nodes.join("pool-1")
    await nodes.store("pool-1")
    await nodes.known(*NAMES)
    nodes.pools.send_replica_hints()
    await nodes.settled()
    assert await nodes.told("pool-1") == [1] * 10


async def test_a_pool_node_that_leaves_before_it_is_told_is_no_error(nodes):
    nodes.pools.replicas.add(NAMESPACE, CHAIN.tobytes(), "pool-1", 7)
    loop, failed = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: failed.append(context))
    nodes.pools.send_replica_hints()
    nodes.pools.remove("pool-1")
    await nodes.settled()
    assert failed == []


async def test_a_copied_prefix_that_the_policy_counts_as_one_no_more_is_forgotten_with_its_holders(nodes):
    nodes.pools.replicas.add(NAMESPACE, CHAIN.tobytes(), "pool-1", 7)
    nodes.pools.remove("pool-1")
    nodes.pools.send_replica_hints()
    await nodes.settled()
    assert len(nodes.pools.replicas) == 0


async def test_events_that_could_not_be_taken_in_leave_a_node_degraded_until_it_is_followed_anew(nodes, monkeypatch):
    directory = nodes.pools.directory
    seen, store = [], directory._table.store

    def fails_once(*arguments):
        monkeypatch.setattr(directory._table, "store", store)
        seen.append(True)
        raise MemoryError

    await nodes.stop("pool-0")
    monkeypatch.setattr(directory._table, "store", fails_once)
    await nodes.start("pool-0")
    await nodes.store("pool-0")
    await until(lambda: seen and directory.state("pool-0") is DirectoryState.DEGRADED)
    await nodes.known("pool-0")


@pytest.mark.parametrize("keeps_fetched", [False, True])
async def test_a_copy_is_made_and_recorded_and_a_prefix_that_is_kept_is_only_recorded(nodes, keeps_fetched):
    client = PoolClient(nodes.target("pool-1"), owner="test", owner_incarnation=1)
    assert await client.evict(NAMESPACE, CHAIN) == len(CHAIN)
    await client.close()
    nodes.pools.start_copy(Copy("pool-0", "pool-1", 10, 7, keeps_fetched), NAMESPACE, CHAIN.tobytes())
    await nodes.settled()
    assert nodes.pools.replicas.within(NAMESPACE, keys_u64(CHAIN)) == {"pool-1": 7}
    assert await nodes.held("pool-1") == (0 if keeps_fetched else 10)
    assert (nodes.core.policy.replication.spent_s > 0) is not keeps_fetched


async def test_of_a_model_with_windows_only_the_last_blocks_are_copied_and_dropped_again(nodes):
    client = PoolClient(nodes.target("pool-1"), owner="test", owner_incarnation=1)
    assert await client.evict(NAMESPACE, CHAIN) == len(CHAIN)
    nodes.pools.start_copy(Copy("pool-0", "pool-1", 9, 7, False), NAMESPACE, CHAIN.tobytes(), WINDOWS)
    await nodes.settled()
    assert [len(await client.inspect(key.tobytes(), kv_namespace=NAMESPACE)) for key in CHAIN] == [0] * 6 + [1] * 3 + [
        0
    ]
    await client.close()
    assert nodes.pools.replicas.within(NAMESPACE, keys_u64(CHAIN)) == {"pool-1": 7}
    await until(lambda: nodes.pools.directory.num_blocks("pool-1") == 3)
    assert nodes.pools.match(NAMESPACE, keys_u64(CHAIN[:9]), WINDOWS)["pool-1"].blocks == 9
    nodes.pools.shrink(Shrink("pool-1", 7, 8))
    await nodes.settled()
    assert await nodes.held("pool-1") == 2


async def test_a_copy_is_over_when_its_target_joins_anew_meanwhile(nodes, tmp_path):
    asked, writers = asyncio.Event(), []

    def say_nothing(_, writer):
        writers.append(writer)
        asked.set()

    silent = await asyncio.start_unix_server(say_nothing, tmp_path / "pool-2.sock")
    nodes.pools._clients["pool-2"] = PoolClient(nodes.target("pool-2"), owner="test", owner_incarnation=1)
    missing = np.random.default_rng(2).integers(0, 256, (10, 16), dtype=np.uint8)
    nodes.pools.start_copy(Copy("pool-2", "pool-1", 10, 7), NAMESPACE, missing.tobytes())
    await asyncio.wait_for(asked.wait(), 30)
    nodes.join("pool-1")
    await nodes.settled()
    assert nodes.core.policy.replication.spent_s > 0
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    silent.close()


def test_very_many_prefixes_have_their_turns_one_after_the_other():
    replicas = CopiedPrefixes()
    rng = np.random.default_rng(2)
    for number in range(7):
        replicas.add(NAMESPACE, rng.bytes(16 * 10), "pool-1", number + 1)
    turns = [replicas.next_batch(25) for _ in range(3)]
    assert [len(turn) for turn in turns] == [3, 3, 1]
    assert len({prefix.name for turn in turns for prefix in turn}) == 7
    assert len(replicas.next_batch(25)) == 3
