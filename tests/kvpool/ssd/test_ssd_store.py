"""Guarantees of an SSD store to its caller when nothing fails."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import SsdClosed, SsdNotStored, SsdRefused
from kvpool.ssd import SsdRead, SsdStore, SsdWrite, extent_nbytes

Open = Callable[..., SsdStore]
MIB = 1 << 20


def test_blocks_are_read_as_they_were_written_and_found_again_by_a_restart(open_store: Open, blocks: Any) -> None:
    store = open_store()
    pages = {number: 60 - number for number in range(20)}
    assert blocks.write(store, pages) == [None] * 20
    assert [blocks.read(store, number, page) for number, page in pages.items()] == [None] * 20
    assert store.close()
    again = open_store()
    assert blocks.pages(again) == pages
    assert [blocks.read(again, number, page) for number, page in pages.items()] == [None] * 20


@pytest.mark.parametrize(
    "sizes",
    [(4096,), (65536,), (8, 4096, 4088), (12288, 4096), (3 * MIB + 8, MIB), (2 * MIB, 2 * MIB), (8,) * 70],
    ids=lambda sizes: "+".join(map(str, sizes[:3])),
)
@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "shifted"])
def test_groups_of_any_size_and_alignment_cross_pieces_and_segments(
    open_store: Open, blocks_of: Any, sizes: tuple[int, ...], shift: int
) -> None:
    blocks = blocks_of(*sizes)
    space = 2 * extent_nbytes(blocks.spec) + 8192
    store = open_store(nbytes=space, segment_nbytes=5 * 4096 if space < MIB else 77 * 4096)
    memory = np.zeros(2 * (sum(sizes) + 8192 * len(sizes)), np.uint8)
    at = -memory.ctypes.data % 4096 + shift

    def placed() -> list[Any]:
        nonlocal at
        arrays = []
        for nbytes in sizes:
            arrays.append(memory[at : at + nbytes])
            at += -(-nbytes // 4096) * 4096
        return arrays

    sources = placed()
    for source, data in zip(sources, blocks.data(1), strict=True):
        source[:] = data
    entry = blocks.entry(1, 1)
    assert store.write([SsdWrite(entry, sources)]) == [None]
    targets = placed()
    assert store.read([SsdRead(4096, entry.kv_namespace, entry.chain_key, targets)]) == [None]
    blocks.check(1, targets)
    # The other block's place, right behind it, is free: nothing was written beyond the extent.
    assert blocks.write(store, {2: 1 + extent_nbytes(blocks.spec) // 4096}) == [None]
    assert blocks.read(store, 1, 1) is None


def test_what_is_freed_is_gone_at_once_and_after_a_restart(open_store: Open, blocks: Any) -> None:
    store = open_store()
    blocks.write(store, {1: 1, 2: 2, 3: 3})
    store.free([2 * 4096, 9 * 4096])
    assert isinstance(blocks.read(store, 2, 2), SsdNotStored)
    assert store.stats().num_freed == 1
    assert store.close()
    again = open_store()
    assert blocks.pages(again) == {1: 1, 3: 3}
    assert blocks.write(again, {4: 2}) == [None]
    assert blocks.read(again, 4, 2) is None


def test_what_is_freed_is_gone_after_a_crash_once_it_was_settled(open_store: Open, blocks: Any, ssd_path: Path) -> None:
    store = open_store()
    assert blocks.write(store, {1: 0, 2: 2}) == [None, None]
    store.free([0])
    for name, found in (("before", {1: 0, 2: 2}), ("after", {2: 2})):
        # What a crash leaves: the folder as it is now, its store open.
        crashed = open_store(shutil.copytree(ssd_path, ssd_path / name, ignore=lambda *_: ["before"]))
        assert blocks.pages(crashed) == found
        store.sync_frees()


def test_a_block_is_never_given_in_the_place_of_another(open_store: Open, blocks: Any) -> None:
    store = open_store()
    blocks.write(store, {1: 1})
    store.free([4096])
    blocks.write(store, {2: 1})
    assert isinstance(blocks.read(store, 1, 1), SsdNotStored)
    assert blocks.read(store, 2, 1) is None


def test_one_bad_request_fails_alone(open_store: Open, blocks: Any, blocks_of: Any) -> None:
    store = open_store()
    good, other = blocks.data(1), blocks_of(4096)
    readonly = [array.copy() for array in good]
    for array in readonly:
        array.flags.writeable = False
    results = store.write(
        [
            SsdWrite(blocks.entry(1, 1), readonly),
            SsdWrite(blocks.entry(2, 1), good),  # over the first
            SsdWrite(blocks.entry(3, 64), good),  # beyond the end
            SsdWrite(other.entry(4, 4), good),  # another spec's sources
            SsdWrite(blocks.entry(5, 5), [np.zeros((2, n), np.uint8)[:, ::2] for n in (2048, 1200)]),
            SsdWrite(blocks.entry(6, 6), good),
        ]
    )
    assert [type(result) for result in results] == [type(None), *[SsdRefused] * 4, type(None)]
    assert "free that first" in str(results[1])
    key = blocks.entry(1, 1).chain_key
    reads = [SsdRead(4096, blocks.entry(1, 1).kv_namespace, key, targets) for targets in (readonly, good[:1], good)]
    assert [type(result) for result in store.read(reads)] == [SsdRefused, SsdRefused, type(None)]
    assert store.stats().writes.errors == {"refused": 4}
    assert store.stats().reads.errors == {"refused": 2}


def test_many_threads_share_commits_and_lose_nothing(open_store: Open, blocks: Any) -> None:
    store = open_store()

    def work(worker: int) -> None:
        for turn in range(12):
            first = 100 * worker + 2 * turn
            pages = {first: 4 * worker + turn % 2, first + 1: 4 * worker + 2 + turn % 2}
            assert blocks.write(store, pages) == [None, None]
            for number, page in pages.items():
                assert blocks.read(store, number, page) is None
            if turn < 11:
                store.free([page * 4096 for page in pages.values()])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert store.stats().num_compactions > 0
    assert store.close()
    assert sorted(blocks.pages(open_store())) == sorted(100 * worker + 22 + i for worker in range(8) for i in (0, 1))


def test_a_block_freed_while_it_is_written_is_forgotten(open_store: Open, blocks: Any, unsynced_disk: Any) -> None:
    store: SsdStore

    class FreeingDisk(type(unsynced_disk)):  # type: ignore[misc]
        def start(self, *arguments: Any, write: bool) -> Any:
            if write:
                store.free([4096])
            return super().start(*arguments, write=write)

    store = open_store(disk=FreeingDisk())
    assert blocks.write(store, {1: 1, 2: 2}) == [None, None]
    assert isinstance(blocks.read(store, 1, 1), SsdNotStored)
    assert store.close()
    assert blocks.pages(open_store()) == {2: 2}


def test_the_journal_stays_small_whatever_is_written(open_store: Open, blocks: Any, ssd_path: Path) -> None:
    store = open_store()
    for number in range(100):
        store.free([0])
        assert blocks.write(store, {number: 0}) == [None]
    stats = store.stats()
    assert stats.num_compactions >= 5
    assert stats.journal_nbytes <= 18 * 4096
    assert store.close()
    assert blocks.pages(open_store()) == {99: 0}


def test_statistics_count_blocks_bytes_and_latencies(open_store: Open, blocks_of: Any) -> None:
    blocks = blocks_of(2 * MIB + 8)
    store = open_store(nbytes=16 * MIB)
    blocks.write(store, {1: 0, 2: 1024})
    blocks.read(store, 1, 0)
    stats = store.stats()
    assert (stats.num_entries, stats.entries_nbytes) == (2, 2 * (2 * MIB + 4096))
    assert (stats.writes.num_blocks, stats.writes.num_ios, stats.writes.nbytes) == (2, 6, 2 * (2 * MIB + 4096))
    assert (stats.reads.num_blocks, stats.reads.num_ios, stats.reads.nbytes) == (1, 3, 2 * MIB + 4096)
    assert 0 < stats.reads.p50_s <= stats.reads.p99_s
    assert stats.reads.io_s > 0
    assert stats.reads.num_in_flight == stats.writes.num_in_flight == 0


def test_a_closed_store_answers_so_and_leaves_no_thread(open_store: Open, blocks: Any) -> None:
    before = threading.active_count()
    store = open_store()
    blocks.write(store, {1: 1})
    assert store.close()
    assert isinstance(blocks.read(store, 1, 1), SsdClosed)
    assert isinstance(blocks.write(store, {2: 2})[0], SsdClosed)
    for thread in threading.enumerate():
        if thread.name.startswith("ssd-"):
            thread.join(10)
    assert threading.active_count() == before
    assert store.close()
