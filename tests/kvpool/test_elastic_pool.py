"""An elastic pool node beside a process that takes memory: it grows, yields within 2 s, and loses nothing.

The control group is made of files whose numbers are measured: the memory of the pool's arena and of a child process.
"""

import asyncio
import dataclasses
import functools
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool.elastic
from kvpool import KvGroup, KvSpec, PoolClient, kv_namespace, layer_digests, parent_keys
from kvpool.errors import PoolConfigError
from kvpool.local import LocalPoolClient, PutStatus, RegisteredBlocks
from kvpool.memory_readings import MemoryReader
from kvpool.node import PoolNode
from kvpool.policy import elastic
from messenger import Endpoint, Messenger, SharedMemory
from settings.keys import InvalidSetting, assemble
from settings.kvpool import PoolSettings

MIB = 1 << 20
SPEC = KvSpec((KvGroup("full", 0, tuple(range(8)), 8, 64, "float16"),), 16)  # blocks of 256 KiB
NS = kv_namespace("weights", SPEC)
LEAST, MOST, LIMIT = 32 * MIB, 96 * MIB, 160 * MIB
PER_PUT = 16


class ControlGroup:
    """Files of a machine with one limited control group, in which `members` give their memory in bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.members: list[Callable[[], int]] = []
        self._group = root / "sys" / "fs" / "cgroup" / "pool"
        for folder in (root / "proc" / "self", root / "proc" / "pressure", self._group):
            folder.mkdir(parents=True)
        (root / "proc" / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n")
        (root / "proc" / "self" / "cgroup").write_text("0::/pool\n")
        (self._group / "memory.max").write_text(f"{LIMIT}\n")
        (self._group / "memory.high").write_text("max\n")
        (self._group / "memory.stat").write_text(f"anon 1\nshmem {MIB}\ninactive_file {MIB}\nactive_file {MIB}\n")
        self.stall(0)
        self.measure()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_measuring)
        self._thread.start()

    @property
    def used_nbytes(self) -> int:
        return sum(member() for member in self.members)

    def measure(self) -> None:
        self._replace(self._group / "memory.current", f"{self.used_nbytes + 2 * MIB}\n")  # and the cache

    def stall(self, total_us: int) -> None:
        text = "".join(f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total_us}\n" for kind in ("some", "full"))
        self._replace(self.root / "proc" / "pressure" / "memory", text)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _keep_measuring(self) -> None:
        while not self._ended.wait(0.02):
            self.measure()

    def _replace(self, path: Path, text: str) -> None:
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlGroup]:
    monkeypatch.setattr(elastic, "_GROWTH_PERIOD_NS", 10**8)
    monkeypatch.setattr(kvpool.elastic, "_PERIOD_S", 0.1)
    made = ControlGroup(tmp_path / "machine")
    yield made
    made.end()


_TAKE = """
import os, sys
rss = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
taken = bytes([1]) * (int(sys.argv[1]) - rss)
print(flush=True)
sys.stdin.read()
"""


class Neighbour:
    """A process that takes `nbytes` of memory."""

    def __init__(self, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def used_nbytes(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        self._process.communicate()


class Host:
    """A client in the pool node's host that puts and reads blocks with random bytes."""

    def __init__(self, node: PoolNode, chain_of: Callable[..., Any]) -> None:
        self._pool = LocalPoolClient(node.local_socket, owner="host", owner_incarnation=1)
        self._memory = SharedMemory.create(PER_PUT * SPEC.block_nbytes, "host")
        self._region = self._pool.register_memory(self._memory)
        self._offsets = np.arange(PER_PUT, dtype=np.int64)[None] * SPEC.slot_nbytes(0)
        self._chain_of = chain_of
        self.digests: dict[int, np.ndarray] = {}  # per prompt

    def chain(self, prompt: int) -> np.ndarray:
        return self._chain_of(PER_PUT, str(prompt), SPEC.block_tokens)  # type: ignore[no-any-return]

    def put(self, prompt: int) -> None:
        rng, chain = np.random.default_rng(prompt), self.chain(prompt)
        self._memory.array[:] = rng.integers(0, 256, self._memory.nbytes, np.uint8)
        status = self._pool.put(
            NS, SPEC, chain, parent_keys(chain), RegisteredBlocks(self._region, self._offsets, None)
        )
        assert {PutStatus(each) for each in status} <= {PutStatus.STORED, PutStatus.EXISTS}
        self.digests[prompt] = self._digests_of(self._memory.array)

    def get(self, prompt: int) -> int:
        """Return the number of leading blocks that are in memory; they must have the right bytes."""
        landing = np.zeros(self._memory.nbytes, np.uint8)
        num = self._pool.get(NS, SPEC, self.chain(prompt), landing, self._offsets)
        assert np.array_equal(self._digests_of(landing)[:num], self.digests[prompt][:num])
        return num

    def _digests_of(self, array: np.ndarray) -> np.ndarray:
        full = np.full(PER_PUT, SPEC.block_tokens, np.int32)
        return layer_digests(array.reshape(PER_PUT, -1), SPEC, 0, full)

    def close(self) -> None:
        self._pool.close()
        self._memory.close()


async def fill(node: PoolNode, host: Host, prompts: range, until: Any) -> None:
    async def is_grown() -> bool:
        return bool(node.core.resizing.usable_nbytes == MOST)

    await until(is_grown)
    for prompt in prompts:
        await asyncio.to_thread(host.put, prompt)


async def take_and_time(node: PoolNode, group: ControlGroup, left_nbytes: int, most_resident: int) -> Neighbour:
    """Start a process that takes all but `left_nbytes`, and check that the pool has at most so much 2 s later."""
    began = time.monotonic()
    neighbour = await asyncio.to_thread(Neighbour, LIMIT - group.used_nbytes - left_nbytes)
    group.members.append(neighbour.used_nbytes)
    while node.memory.resident_nbytes > most_resident:
        await asyncio.sleep(0.01)
        assert time.monotonic() - began < 2, f"{node.memory.resident_nbytes / MIB} MiB are left after 2 s"
    return neighbour


async def test_it_grows_into_idle_memory_and_yields_what_a_neighbour_takes(
    start_pool, pool_nodes, group, ssd_dir, chain_of, until
) -> None:
    pool = await start_pool(
        pool_bytes=MOST, pool_min_bytes=LEAST, pool_ssd_dir=ssd_dir, pool_ssd_bytes=2 * MOST, files_root=group.root
    )
    (node,) = pool_nodes
    group.members.append(lambda: node.memory.resident_nbytes)
    host = await asyncio.to_thread(Host, node, chain_of)
    client = PoolClient(pool.target, owner="reader", owner_incarnation=1)
    assert LEAST <= (await client.state())["tiers"]["dram"]["capacity_bytes"] < MOST
    prompts = range(22)  # 88 MiB
    await fill(node, host, prompts, until)
    await asyncio.to_thread(host.get, 0)  # used last: it stays, wherever it lies
    lease = await client.pin(NS, host.chain(20), lease_s=30)
    assert lease is not None
    slots = lease.offsets.copy()

    neighbour = await take_and_time(node, group, 6 * MIB, node.memory.resident_nbytes - 8 * MIB)
    assert node.core.totals()["lost_blocks"] == 0
    assert await asyncio.to_thread(host.get, 0) == PER_PUT

    async def is_written_ahead() -> bool:  # as far as it ever is: up to half of the least size may wait for the SSD
        store = node.core.store
        return (store.index.num_sealed - store.ssd.num_copies) * SPEC.block_nbytes <= LEAST // 2

    await until(is_written_ahead)
    more = await take_and_time(node, group, -8 * MIB, LEAST + PER_PUT * SPEC.block_nbytes)

    async def is_least() -> bool:
        return bool(node.core.resizing.usable_nbytes == LEAST)

    await until(is_least)
    # The lease is honoured: its slots lie where they were, and hold what was put.
    assert np.array_equal(lease.offsets, slots)
    assert [block.offsets[0] for block in node.core.leases[lease.lease_id].copies] == slots[0].tolist()
    assert np.array_equal(
        layer_digests(
            np.stack([node.memory.array[at : at + SPEC.block_nbytes] for at in slots[0]]),
            SPEC,
            0,
            np.full(PER_PUT, SPEC.block_tokens, np.int32),
        ),
        host.digests[20],
    )
    await client.unpin(lease)

    async def is_vacated() -> bool:
        return not node.core.resizing.has_high_slots and node.memory.resident_nbytes <= LEAST

    await until(is_vacated, 2)
    assert node.core.totals()["lost_blocks"] == 0
    assert node.counters["yields"] >= 1
    assert node.counters["yielded_bytes"] >= 50 * MIB
    for prompt in prompts:
        found = await client.pin(NS, host.chain(prompt), lease_s=30, wait_s=30)
        assert found is not None
        assert found.num_blocks == PER_PUT, "a block that the SSD could keep was lost"
        assert await asyncio.to_thread(host.get, prompt) == PER_PUT
        await client.unpin(found)

    group.end()
    for each in (neighbour, more):
        await asyncio.to_thread(each.end)
    await asyncio.to_thread(host.close)
    await client.close()


async def test_stalls_alone_make_it_yield_and_hot_blocks_move_down(
    start_pool, pool_nodes, group, chain_of, until
) -> None:
    """No SSD: the coldest blocks are dropped at once."""
    await start_pool(pool_bytes=MOST, pool_min_bytes=LEAST, files_root=group.root)
    (node,) = pool_nodes
    host = await asyncio.to_thread(Host, node, chain_of)
    await fill(node, host, range(22), until)
    hot = range(16, 22)  # put last: they lie highest
    for prompt in hot:
        await asyncio.to_thread(host.get, prompt)
    ticks = itertools.count()
    async with asyncio.timeout(30):
        while node.memory.resident_nbytes > LEAST:
            group.stall(60_000 * next(ticks))
            await asyncio.sleep(0.1)
    assert [await asyncio.to_thread(host.get, prompt) for prompt in hot] == [PER_PUT] * len(hot)
    assert node.counters["moved_blocks"] >= PER_PUT * len(hot) / 2
    assert sum([await asyncio.to_thread(host.get, prompt) for prompt in range(16)]) <= 2 * PER_PUT
    await asyncio.to_thread(host.close)


async def test_reads_through_the_shared_index_are_right_while_blocks_move(
    start_pool, pool_nodes, group, chain_of, until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_QUIET_NS", 10**8)
    await start_pool(pool_bytes=MOST, pool_min_bytes=LEAST, files_root=group.root)
    (node,) = pool_nodes
    host = await asyncio.to_thread(Host, node, chain_of)
    writer = await asyncio.to_thread(Host, node, chain_of)
    await fill(node, host, range(22), until)
    ended = threading.Event()
    found: list[int] = []

    def read() -> None:
        while not ended.is_set():
            found.extend(host.get(prompt) for prompt in range(22))

    reading = asyncio.create_task(asyncio.to_thread(read))
    taken = [0]
    group.members.append(lambda: taken[0] + node.memory.resident_nbytes)

    async def is_size(nbytes: int) -> bool:
        return bool(node.core.resizing.usable_nbytes == nbytes)

    for _ in range(2):
        taken[0] = LIMIT - LEAST
        await until(functools.partial(is_size, LEAST))
        taken[0] = 0
        await until(functools.partial(is_size, MOST))
        for prompt in range(22):  # to the units that were returned
            await asyncio.to_thread(writer.put, prompt)
    ended.set()
    await reading
    assert node.counters["moved_blocks"]
    assert max(found) == PER_PUT
    for each in (host, writer):
        await asyncio.to_thread(each.close)


async def test_a_fixed_pool_keeps_its_size_under_pressure(start_pool, pool_nodes, group, chain_of) -> None:
    group.members.append(lambda: LIMIT)
    await start_pool(pool_bytes=MOST, pool_min_bytes=MOST, files_root=group.root)
    (node,) = pool_nodes
    assert node.elastic is None
    assert node.core.resizing.usable_nbytes == MOST
    assert node.core.staging.writes_ahead is False


def test_memory_readings_name_every_limit_and_leave_out_what_is_missing(tmp_path: Path) -> None:
    assert MemoryReader(tmp_path).read() == []
    group = ControlGroup(tmp_path / "machine")
    group.end()
    host, own = MemoryReader(group.root).read()
    assert (host.name, host.total_nbytes, host.available_nbytes) == ("host", 16 << 30, 12 << 30)
    assert (own.total_nbytes, own.available_nbytes) == (LIMIT, LIMIT)
    pool = group.root / "sys" / "fs" / "cgroup" / "pool"
    (pool / "memory.high").write_text(f"{LIMIT // 2}\n")
    (pool / "memory.pressure").write_text("some avg10=1.00 avg60=0 avg300=0 total=7\nfull avg10=0 total=3\n")
    own = MemoryReader(group.root).read()[1]
    assert (own.total_nbytes, own.some_stalled_us, own.full_stalled_us) == (LIMIT // 2, 7, 3)
    # Version 1, in a container: the mount begins with the own group.
    (group.root / "proc" / "self" / "cgroup").write_text("4:memory:/kubepods/pod7\n0::/\n")
    first = group.root / "sys" / "fs" / "cgroup" / "memory"
    first.mkdir()
    for name, text in {
        "memory.limit_in_bytes": str(LIMIT),
        "memory.usage_in_bytes": str(100 * MIB),
        "memory.stat": f"total_inactive_file {10 * MIB}\ntotal_active_file {5 * MIB}\n",
    }.items():
        (first / name).write_text(text)
    (own,) = MemoryReader(group.root).read()[1:]
    assert (own.total_nbytes, own.available_nbytes) == (LIMIT, LIMIT - 85 * MIB)


def test_this_machine_is_read() -> None:
    host = MemoryReader().read()[0]
    assert host.name == "host"
    assert 0 < host.available_nbytes < host.total_nbytes


async def test_an_elastic_pool_is_refused_where_its_memory_is_pinned(
    start_pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Messenger.start

    def start_with_rdma(self: Messenger) -> Endpoint:
        self._endpoint = dataclasses.replace(start(self), rdma=True)
        return self._endpoint

    monkeypatch.setattr(Messenger, "start", start_with_rdma)
    with pytest.raises(PoolConfigError, match="pool_min_bytes below pool_bytes conflicts with rdma"):
        await start_pool(pool_min_bytes=1 << 16)


def test_wrong_minimums_are_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"--pool-min-bytes must be at most --pool-bytes \(1073741824\)"):
        assemble(PoolSettings, pool_min_bytes=2 << 30)
    with pytest.raises(InvalidSetting, match="conflicts with --pool-hugepages on"):
        assemble(PoolSettings, pool_min_bytes=1 << 20, pool_hugepages="on")


def test_returnable_memory_gives_pages_back_and_peers_cannot_map_it_for_writing() -> None:
    memory = SharedMemory.create(8 * MIB, "returnable", returnable=True)
    memory.array[:] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, 8 * MIB)
    mapped = mmap.mmap(memory.fd, 8 * MIB, prot=mmap.PROT_READ)
    memory.release(4 * MIB - 100, 2 * MIB)
    assert memory.resident_nbytes == 6 * MIB + 4096
    assert (mapped[4 * MIB - 1], mapped[4 * MIB + 1], mapped[6 * MIB]) == (1, 0, 1)
    memory.close()
