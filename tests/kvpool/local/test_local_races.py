"""Readers beside a pool node that evicts, writes and dies at any moment: they find what is right, or nothing."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool import KvGroup, KvSpec, layer_digests
from kvpool.local import LocalPoolClient, index_layout
from kvpool.local.block_copy import MappedBytes, SpecLayout
from kvpool.local.index_reading import BlockReader, BlockTarget, MappedIndex, match_blocks
from kvpool.local.shared_index import SharedIndex
from messenger.memory import PeerMemory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from index_process import NUM_BLOCKS, NUM_LAYERS, Block  # noqa: E402
from writer_process import NAMESPACE, SPEC, bytes_of, chain_of  # noqa: E402

sys.path.pop(0)


@pytest.mark.parametrize("verify", [True, False])
async def test_eviction_under_a_readers_feet_never_gives_other_bytes(
    start_process: Any, local_socket_at: Any, tmp_path: Path, verify: bool
) -> None:
    node = await start_process(f"unix:{tmp_path}/p.sock")
    door = await local_socket_at(node.target)
    (tmp_path / "progress").write_bytes(bytes(8))
    writer = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "writer_process.py"), door, str(tmp_path / "progress")
    )
    pool = LocalPoolClient(door, owner="reader", owner_incarnation=1)
    landing, offsets = np.zeros(SPEC.block_nbytes, np.uint8), np.zeros((1, 1), np.int64)
    done, rng, found, missed = np.memmap(tmp_path / "progress", np.uint64), np.random.default_rng(0), 0, 0
    try:
        async with asyncio.timeout(60):
            while int(done[0]) < 40:
                await asyncio.sleep(0.05)
            while found < 200 or missed < 200:
                # A tiny arena: these have just left it, or are about to.
                i = int(done[0]) - int(rng.integers(8, 20))
                if pool.get(NAMESPACE, SPEC, chain_of(i), landing, offsets, verify=verify):
                    assert np.array_equal(landing, bytes_of(i))
                    found += 1
                else:
                    missed += 1
                if (found + missed) % 64 == 0:
                    await asyncio.sleep(0)
    finally:
        writer.kill()
        await writer.wait()
        pool.close()
    assert pool.corrupt_blocks == 0
    await node.end(signal.SIGTERM)


class Reader:
    """Looks into an index as `LocalPoolClient` does, with an arena of its own; block i lies at 64 * i."""

    def __init__(self, index: NDArray[np.uint8]) -> None:
        self.words = index.view(np.uint64)
        at = index_layout.AT_BUCKETS, index_layout.AT_ENTRIES, index_layout.AT_ENTRY_WORDS
        self.shape = np.array([self.words[i] for i in at], np.int64)
        self.index = MappedIndex(self.words, self.shape)
        spec = KvSpec((KvGroup("full", 0, tuple(range(NUM_LAYERS)), kv_heads=1, head_dim=1, dtype="float32"),), 1)
        self.layout = SpecLayout(spec)

    def find(self, i: int) -> bool:
        name = key = np.full(2, int.from_bytes(bytes([i + 1]) * 8, "little"), np.uint64)
        return bool(match_blocks(self.index, name, key.reshape(1, 2))[0])

    def get(self, i: int, verify: bool = False, *memory: NDArray[np.uint8]) -> tuple[int, int]:
        """A get from an arena to a landing place, by default of nothing but zeros."""
        name = key = np.full(2, int.from_bytes(bytes([i + 1]) * 8, "little"), np.uint64)
        zeros = np.zeros(64 * NUM_BLOCKS + 8 * NUM_LAYERS, np.uint8), np.zeros(8 * NUM_LAYERS, np.uint8)
        arena, landing = memory or zeros
        target = BlockTarget(MappedBytes.of(landing), np.zeros((1, 1), np.int64))
        blocks = BlockReader(MappedBytes.of(arena), None)
        return blocks.get(self.index, name, key.reshape(1, 2), self.layout, target, verify=verify)


def test_a_writer_killed_in_mid_update_leaves_misses_and_no_torn_entry() -> None:
    for _ in range(3):
        ours, theirs = socket.socketpair()
        args = [sys.executable, str(HERE / "index_process.py"), str(theirs.fileno())]
        with subprocess.Popen(args, pass_fds=[theirs.fileno()]) as writer, ours:
            theirs.close()
            data, fds, _, _ = socket.recv_fds(ours, 8, 1)
            index = PeerMemory(fds[0], int.from_bytes(data, "little"))
            reader = Reader(index.array)
            try:
                for _ in range(50):
                    assert all(reader.find(i) for i in range(NUM_BLOCKS // 2, NUM_BLOCKS))
            finally:
                writer.kill()
        whole = [reader.get(i) for i in range(NUM_BLOCKS)]
        assert whole[NUM_BLOCKS // 2 :] == [(1, index_layout.FOUND)] * (NUM_BLOCKS // 2)
        assert {why for _, why in whole} <= {index_layout.FOUND, index_layout.MISSING}
        for i in range(NUM_BLOCKS):
            if whole[i][0]:
                entry = entry_of(reader, i)
                assert entry[index_layout.ENTRY_OFFSETS] == 64 * i
                assert entry[index_layout.ENTRY_OFFSETS + 1 :].tolist() == [i + 1] * NUM_LAYERS


def test_an_entry_left_half_written_is_a_miss() -> None:
    index = SharedIndex(7)
    index.apply([(True, Block(i)) for i in range(4)])  # type: ignore[misc]
    reader = Reader(index.memory.array)
    assert reader.find(2)
    at = place_of(reader, 2)
    reader.words[at + index_layout.ENTRY_VERSION] += np.uint64(1)
    assert not reader.find(2)
    assert reader.get(2) == (0, index_layout.MISSING)
    assert reader.find(3)
    index.close()


def test_buckets_left_half_moved_hide_nothing_that_stands_and_end_the_search_for_what_does_not() -> None:
    index = SharedIndex(7)
    index.apply([(True, Block(i)) for i in range(4)])  # type: ignore[misc]
    reader = Reader(index.memory.array)
    reader.words[index_layout.AT_BUCKETS_VERSION] += np.uint64(1)
    assert all(reader.find(i) for i in range(4))
    assert not reader.find(50)
    index.close()


@pytest.mark.parametrize("verify", [True, False])
def test_a_block_that_leaves_while_it_is_copied_is_a_miss(verify: bool) -> None:
    nbytes = 48 << 20
    spec = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=1 << 20, dtype="float32"),), nbytes >> 23)
    index, leaving = SharedIndex(7), Block(0)
    arena, landing = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    leaving.digests = (layer_digests(arena.reshape(1, -1), spec, 0, np.full(1, spec.block_tokens, np.int32)).tobytes(),)
    index.apply([(True, leaving)])  # type: ignore[list-item]
    reader = Reader(index.memory.array)
    reader.layout = SpecLayout(spec)

    cleared = threading.Event()

    def get() -> tuple[int, int]:
        landing[:] = 0
        cleared.set()
        return reader.get(0, verify, arena, landing)

    conclusive = 0
    with ThreadPoolExecutor(1) as thread:
        for _ in range(200):
            cleared.clear()
            getting = thread.submit(get)
            while not cleared.is_set() or not landing[:: 1 << 20].any():
                pass
            index.apply([(False, leaving)])  # type: ignore[list-item]
            before_its_end = not landing[:: 1 << 14].all()
            done = getting.result()
            index.apply([(True, leaving)])  # type: ignore[list-item]
            if before_its_end:
                assert done == (0, index_layout.MISSING)
                conclusive += 1
                if conclusive == 5:
                    break
    assert conclusive
    assert get() == (1, index_layout.FOUND)
    index.close()


def test_an_index_that_was_replaced_or_closed_gives_nothing() -> None:
    index = SharedIndex(7, num_entries=4)
    index.apply([(True, Block(i)) for i in range(4)])  # type: ignore[misc]
    old = Reader(index.memory.array)
    assert old.get(1) == (1, index_layout.FOUND)
    index.apply([(True, Block(4))])  # type: ignore[list-item]
    assert old.get(1) == (0, index_layout.STALE)
    new = Reader(index.memory.array)
    assert [new.get(i) for i in range(5)] == [(1, index_layout.FOUND)] * 5
    words = new.words
    index.close()
    assert words[index_layout.AT_STATE] == index_layout.CLOSED
    assert new.get(1) == (0, index_layout.STALE)


def test_an_entry_that_points_outside_of_the_arena_is_never_followed() -> None:
    index = SharedIndex(7)
    index.apply([(True, Block(i)) for i in range(4)])  # type: ignore[misc]
    reader = Reader(index.memory.array)
    reader.words[place_of(reader, 2) + index_layout.ENTRY_OFFSETS] = np.uint64(1 << 62)
    assert reader.get(2) == (0, index_layout.CORRUPT)
    index.close()


def place_of(reader: Reader, i: int) -> int:
    """Where the entry of block i starts."""
    buckets, entries, entry_words = reader.shape.tolist()
    for entry in range(entries):
        at = int(index_layout.HEADER_WORDS + buckets + entry * entry_words)
        if reader.words[at + index_layout.ENTRY_KEY : at + index_layout.ENTRY_SHAPE].tobytes() == bytes([i + 1]) * 32:
            return at
    raise AssertionError(f"block {i} has no entry")


def entry_of(reader: Reader, i: int) -> NDArray[np.uint64]:
    at = place_of(reader, i)
    return reader.words[at : at + index_layout.ENTRY_OFFSETS + 1 + NUM_LAYERS]
