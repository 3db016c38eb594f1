"""Common parts of the pool's tests: specs, the digest's reference in plain integers, chains, nodes and workers."""

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conductor.directory import POOL_NODES, Directory, DirectoryState, Match, follow_events
from kvpool import (
    KvGroup,
    KvSpec,
    Lease,
    PoolClient,
    PoolEvents,
    PoolNodeConfig,
    PutTicket,
    chain_keys,
    chain_seed,
    keys_u64,
    kv_namespace,
    layer_digests,
    parent_keys,
)
from kvpool.node import PoolNode
from kvpool.server import serve_pool_node
from kvpool.ssd.folder import IN_MEMORY, file_system
from messenger import Messenger, MessengerConfig, SharedMemory
from settings.keys import assemble

MASK = (1 << 64) - 1


def two_group_spec(block_tokens: int = 4) -> KvSpec:
    full = KvGroup("full", 0, (0, 2), kv_heads=2, head_dim=4, dtype="float32")
    window = KvGroup("window", 6, (1, 3, 4), kv_heads=1, head_dim=6, dtype="float16")
    return KvSpec((full, window), block_tokens)


def reference_digests(slot: bytes, spec: KvSpec, g: int, start: int, stop: int) -> list[int]:
    """The definition in kvpool.digest, word by word, on Python integers."""
    row_nbytes, heads = spec.token_row_nbytes(g), spec.groups[g].kv_heads
    row_words = -(-row_nbytes // 4)
    digests = []
    for layer in range(spec.num_layers(g)):
        total = 0
        for h in range(heads):
            for p in range(2):
                for t in range(start, stop):
                    at = layer * spec.layer_nbytes(g) + ((h * 2 + p) * spec.block_tokens + t) * row_nbytes
                    row = slot[at : at + row_nbytes].ljust(row_words * 4, b"\0")
                    for w in range(row_words):
                        word = int.from_bytes(row[4 * w : 4 * w + 4], "little")
                        index = ((h * 2 + p) * spec.block_tokens + t) * row_words + w
                        x = ((index << 32 | word) + 0x9E3779B97F4A7C15) & MASK
                        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
                        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
                        total += x ^ x >> 31
        digests.append(total & MASK)
    return digests


def make_chain(num_blocks: int, salt: str = "", block_tokens: int = 4) -> NDArray[np.uint8]:
    ids = np.arange(num_blocks * block_tokens, dtype=np.int32)
    return chain_keys(chain_seed(salt, "tokenizer", block_tokens), ids, block_tokens)


@pytest.fixture(scope="session")
def spec() -> KvSpec:
    """Two groups, one of them windowed, with rows that are and rows that are not a multiple of 4 bytes long."""
    return two_group_spec()


@pytest.fixture(scope="session")
def chain_of() -> Callable[..., NDArray[np.uint8]]:
    return make_chain


@pytest.fixture(scope="session")
def digest_reference() -> Callable[[bytes, KvSpec, int, int, int], list[int]]:
    return reference_digests


PoolStarter = Callable[..., Any]


@dataclass
class RunningPool:
    """A pool node served in this process's loop, over real sockets."""

    target: str
    stop: asyncio.Event
    task: "asyncio.Task[None]"

    async def end(self) -> None:
        self.stop.set()
        await self.task


@pytest.fixture
async def start_pool(tmp_path: Path) -> AsyncIterator[PoolStarter]:
    """Start pool nodes; at the end each must validate as at rest (or be ended by the test) and is stopped."""
    running: list[RunningPool] = []

    async def start(node_id: str = "pool", listen: str = "", **fields: Any) -> RunningPool:
        config = assemble(
            PoolNodeConfig,
            node_id=node_id,
            listen=listen or f"unix:{tmp_path}/{node_id}.sock",
            **{
                "pool_bytes": 1 << 20,
                "pool_policy": "lru",  # what leaves next can be told at a glance
                "sweep_s": 0.02,
                "heartbeat_s": 0.1,
                "report_s": 0.05,
                "messenger": assemble(MessengerConfig, shm_dir=tmp_path),
                **fields,
            },
        )
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        task = asyncio.create_task(serve_pool_node(config, stop, ready.set_result))
        await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        pool = RunningPool(ready.result(), stop, task)
        running.append(pool)
        return pool

    yield start
    for pool in running:
        if not pool.task.done():
            client = PoolClient(pool.target, owner="checker", owner_incarnation=1)
            report = await client.validate()
            await client.close()
            await pool.end()
            assert report["ok"], report


@pytest.fixture
def ssd_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not in memory, wherever pytest's own folders are."""
    for parent in (tmp_path, Path("/var/tmp"), Path.cwd()):
        if file_system(parent) not in IN_MEMORY:
            path = Path(tempfile.mkdtemp(prefix="ssd-", dir=parent))
            yield path
            shutil.rmtree(path)
            return
    pytest.skip("every folder here is in memory")


@pytest.fixture
def pool_nodes(monkeypatch: pytest.MonkeyPatch) -> list[PoolNode]:
    """The nodes that `start_pool` starts, from inside, in order: to damage what they hold."""
    started: list[PoolNode] = []
    begin = PoolNode.start

    async def start_and_tell(self: PoolNode) -> Any:
        started.append(self)
        return await begin(self)

    monkeypatch.setattr(PoolNode, "start", start_and_tell)
    return started


class PoolProcess:
    """A pool node in a process of its own."""

    def __init__(self, target: str, process: asyncio.subprocess.Process) -> None:
        self.target, self.process = target, process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), 20)
        # The loop closes the pipe only after its end was read.
        assert self.process.stdout is not None
        await self.process.stdout.read()
        return code


@pytest.fixture
async def start_process(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[PoolProcess]]]:
    """Start pool nodes as processes, called "p", with further arguments of pool_process.py; none outlives the test."""
    started: list[PoolProcess] = []

    async def start(listen: str, *args: str) -> PoolProcess:
        script = Path(__file__).with_name("pool_process.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), "p", listen, str(tmp_path), *args, stdout=asyncio.subprocess.PIPE
        )
        started.append(PoolProcess(listen, process))
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip() == listen
        return started[-1]

    yield start
    for each in started:
        if each.process.returncode is None:
            await each.end(signal.SIGKILL)


class Follower:
    """A directory fed by one node's stream, as a conductor does it."""

    def __init__(self, target: str) -> None:
        self.directory = Directory()
        self.snapshots = 0
        self.losses: list[str] = []
        self.task = asyncio.create_task(
            follow_events(
                POOL_NODES, target, self.take, lambda: self.directory.position("p"), on_lost=self.lose, silence_s=2
            )
        )

    def take(self, events: PoolEvents) -> bool:
        self.snapshots += events.snapshot_begin
        return self.directory.apply("p", events)

    def lose(self, reason: str, kind: str) -> None:
        self.losses.append(reason)
        self.directory.mark_degraded("p", malformed=kind == "malformed")

    def holds(
        self, ns: bytes, chain: Any, n: int, ssd: int = 0, state: DirectoryState = DirectoryState.EXACT
    ) -> Callable[[], Any]:
        """Return True if it holds `n` leading blocks, `ssd` of them on SSD only."""

        async def so() -> bool:
            held = self.directory.match(ns, keys_u64(chain)).get("p", Match(0, 0))
            return self.directory.state("p") is state and held == Match(n, ssd)

        return so


@pytest.fixture
async def follow() -> AsyncIterator[Callable[[str], Follower]]:
    followers: list[Follower] = []

    def start(target: str) -> Follower:
        followers.append(Follower(target))
        return followers[-1]

    yield start
    for follower in followers:
        follower.task.cancel()
        await asyncio.gather(follower.task, return_exceptions=True)
        assert follower.directory.validate() == []


class Worker:
    """A process's side of the pool: a messenger with memory of its own, and clients."""

    def __init__(self, name: str, transport: str, run_dir: Path, spec: KvSpec) -> None:
        self.name, self.spec, self.ns = name, spec, kv_namespace("weights", spec)
        self.messenger = Messenger(
            assemble(MessengerConfig, transport=transport, shm_dir=run_dir), node_id=name, incarnation=1
        )
        self.messenger.start()
        self.memory = SharedMemory.create(1 << 20, "worker")
        self.region = self.messenger.register(self.memory)
        self.clients: list[PoolClient] = []
        self.byte_values = 256  # of the KV that it writes; fewer can be compressed

    def client(self, target: str) -> PoolClient:
        self.clients.append(PoolClient(target, owner=self.name, owner_incarnation=1))
        return self.clients[-1]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        self.messenger.close()
        self.memory.close()

    def slots(self, n: int) -> list[NDArray[np.uint8]]:
        """Per group: views [n, slot_nbytes] of this worker's memory, one after the other."""
        views, at = [], 0
        for g in range(self.spec.num_groups):
            nbytes = self.spec.slot_nbytes(g)
            views.append(self.memory.array[at : at + n * nbytes].reshape(n, nbytes))
            at += n * nbytes
        return views

    def slices(self, n: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        rows, at = [], 0
        for g in range(self.spec.num_groups):
            nbytes = self.spec.slot_nbytes(g)
            rows += [(at + i * nbytes, int(offsets[g, i]), nbytes) for i in range(n)]
            at += n * nbytes
        return np.array(rows, np.int64).reshape(-1, 3)

    def digests(self, n: int) -> list[NDArray[np.uint64]]:
        valid = np.full(n, self.spec.block_tokens, np.int32)
        return [layer_digests(view, self.spec, g, valid) for g, view in enumerate(self.slots(n))]

    async def allocate(self, client: PoolClient, chain: NDArray[np.uint8], ttl_s: float = 30) -> PutTicket:
        return await client.allocate(self.ns, self.spec, chain, parent_keys(chain), ttl_s=ttl_s)

    async def write(self, ticket: PutTicket, seed: int) -> list[NDArray[np.uint8]]:
        """Fill memory with random KV and write it to the ticket's slots; returns what was written."""
        n = len(ticket.new_blocks)
        rng = np.random.default_rng(seed)
        for view in self.slots(n):
            view[:] = rng.integers(0, self.byte_values, view.shape, dtype=np.uint8)
        peer = self.messenger.connect(ticket.endpoint)
        assert ticket.key is not None
        await asyncio.wrap_future(peer.write(ticket.key, self.region, self.slices(n, ticket.offsets)))
        return [view.copy() for view in self.slots(n)]

    async def put(self, client: PoolClient, chain: NDArray[np.uint8], seed: int = 0) -> list[NDArray[np.uint8]]:
        ticket = await self.allocate(client, chain)
        written = await self.write(ticket, seed)
        assert await client.seal(ticket, self.digests(len(ticket.new_blocks))) == len(ticket.new_blocks)
        return written

    async def read(self, lease: Lease) -> list[NDArray[np.uint8]]:
        self.memory.array[:] = 0
        peer = self.messenger.connect(lease.endpoint)
        slices = self.slices(lease.num_blocks, lease.offsets)
        await asyncio.wrap_future(peer.read(lease.key, self.region, slices))
        return [view.copy() for view in self.slots(lease.num_blocks)]


@pytest.fixture
async def start_worker(tmp_path: Path, spec: KvSpec) -> AsyncIterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(transport: str = "auto") -> Worker:
        workers.append(Worker(f"w{len(workers)}", transport, tmp_path, spec))
        return workers[-1]

    yield start
    for worker in workers:
        await worker.close()


@pytest.fixture
async def worker(start_worker: Callable[..., Worker]) -> Worker:
    return start_worker()


async def poll_until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10) -> None:
    """Ask again and again until it is so; fails after `timeout_s`."""
    for _ in range(int(timeout_s * 100)):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not so within {timeout_s} s")


@pytest.fixture(scope="session")
def until() -> Callable[..., Awaitable[None]]:
    return poll_until
