"""Events of the blocks in a worker's memory: what a directory makes of them over gRPC is what the worker holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from conductor.directory import WORKERS, Directory, DirectoryState, WindowedBlocks, follow_events
from kvpool import keys_from_bytes, keys_u64
from kvpool.events import PoolEvents
from moonpool_proto.v1.pool_pb2_grpc import add_OwnBlocksServicer_to_server
from rpc.control import start_server
from worker import own_blocks
from worker.own_blocks import OwnBlocks
from worker.policy import SlotPool

NS = b"n" * 16


def key(i: int) -> bytes:
    return i.to_bytes(8, "little") + bytes(8)


@asynccontextmanager
async def served(blocks: OwnBlocks, target: str) -> AsyncIterator[None]:
    server = await start_server(target, lambda s: add_OwnBlocksServicer_to_server(blocks, s))
    try:
        yield
    finally:
        blocks.close()
        await server.stop(0.1)


class Follower:
    """A conductor's directory of one worker, and what it was told."""

    def __init__(self, target: str) -> None:
        self.directory = Directory()
        self.messages: list[PoolEvents] = []
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(
            follow_events(WORKERS, target, self.take, lambda: self.directory.position("w"), on_lost=self.lose)
        )

    def take(self, events: PoolEvents) -> bool:
        self.messages.append(events)
        fits = self.directory.apply("w", events)
        self.changed.set()
        return fits

    def lose(self, reason: str, kind: str) -> None:
        self.directory.mark_degraded("w", malformed=kind == "malformed")
        self.changed.set()

    def holds(self, i: int) -> bool:
        return bool(self.directory.match(NS, keys_u64(keys_from_bytes(key(i)))))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    async def until_it_has(self, blocks: set[int], known: int) -> None:
        """Wait until the directory is exact and has exactly these of the first `known` blocks."""

        def has() -> bool:
            exact = self.directory.state("w") is DirectoryState.EXACT
            return exact and {i for i in range(known) if self.holds(i)} == blocks

        await self.until(has)
        assert self.directory.num_blocks("w") == len(blocks)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Follow = Callable[[str], Follower]


@pytest.fixture
async def follow() -> AsyncIterator[Follow]:
    followers: list[Follower] = []

    def begin(target: str) -> Follower:
        followers.append(Follower(target))
        return followers[-1]

    yield begin
    for follower in followers:
        await follower.stop()


async def test_two_directories_follow_random_changes(tmp_path: Path, follow: Follow) -> None:
    target, rng, held = f"unix:{tmp_path}/w", Random(1), set[int]()
    blocks = OwnBlocks(NS, 1)
    async with served(blocks, target):
        first = follow(target)
        for round_number in range(60):
            for _ in range(rng.randrange(1, 12)):
                i = rng.randrange(40)
                (blocks.discard if i in held else blocks.add)(key(i))
                held ^= {i}
            if round_number == 30:
                second = follow(target)
            if round_number % 7 == 0:
                await first.until_it_has(held, 40)
        await first.until_it_has(held, 40)
        await second.until_it_has(held, 40)
    assert first.directory.snapshots.total() == second.directory.snapshots.total() == 1
    assert not first.directory.resyncs
    assert not first.directory.mismatches


@pytest.mark.parametrize("lasting", [NS, b""], ids=["beside others", "alone"])
async def test_windowed_blocks_are_reported_in_their_namespace(tmp_path: Path, follow: Follow, lasting: bytes) -> None:
    windows = b"w" * 16 if lasting else NS
    target, blocks = f"unix:{tmp_path}/w", OwnBlocks(lasting, 1, window_namespace=windows)
    async with served(blocks, target):
        first = follow(target)

        def reusable() -> int:
            found = first.directory.match(
                NS, keys_u64(keys_from_bytes(b"".join(map(key, range(9))))), WindowedBlocks(windows, 2)
            )
            return found["w"].blocks if found else 0

        for i in range(8):
            blocks.add(key(i))
        for i in (2, 3, 5, 6):
            blocks.add_window(key(i))
        await first.until(lambda: reusable() == 7)
        second = follow(target)
        await second.until(lambda: second.directory.state("w") is DirectoryState.EXACT)
        assert second.directory.num_blocks("w") == first.directory.num_blocks("w") == len(blocks)
        blocks.discard_window(key(5))
        await first.until(lambda: reusable() == 4)
        blocks.discard_window(key(3))
        await first.until(lambda: reusable() == 0)
    assert not first.directory.mismatches


async def test_a_block_in_two_places_is_gone_with_the_last(tmp_path: Path, follow: Follow) -> None:
    target, blocks = f"unix:{tmp_path}/w", OwnBlocks(NS, 1)
    async with served(blocks, target):
        follower = follow(target)
        blocks.add(key(1))
        blocks.add(key(1))
        blocks.add(key(2))
        await follower.until_it_has({1, 2}, 4)
        blocks.discard(key(1))
        blocks.discard(key(2))
        await follower.until_it_has({1}, 4)
        blocks.discard(key(1))
        await follower.until_it_has(set(), 4)


async def test_changes_of_one_moment_are_one_event_and_cancel_out(tmp_path: Path, follow: Follow) -> None:
    target, blocks = f"unix:{tmp_path}/w", OwnBlocks(NS, 1)
    async with served(blocks, target):
        follower = follow(target)
        blocks.add(key(0))
        await follower.until_it_has({0}, 8)
        before = len(follower.messages)
        for i in range(1, 7):
            blocks.add(key(i))
        blocks.discard(key(3))
        blocks.discard(key(0))
        await follower.until_it_has({1, 2, 4, 5, 6}, 8)
        told = [message for message in follower.messages[before:] if message.stored or message.removed]
        assert [(len(m.stored), len(m.removed)) for m in told] == [(1, 1)]


async def test_a_broken_stream_goes_on_where_it_ended_and_a_restarted_worker_begins_anew(
    tmp_path: Path, follow: Follow
) -> None:
    target, blocks = f"unix:{tmp_path}/w", OwnBlocks(NS, 1)
    async with served(blocks, target):
        follower = follow(target)
        blocks.add(key(1))
        await follower.until_it_has({1}, 4)
        await follower.stop()
        follower.directory.mark_degraded("w")
        blocks.add(key(2))
        again = follow(target)
        again.directory = follower.directory
        await again.until_it_has({1, 2}, 4)
        assert again.directory.snapshots.total() == 1
    await again.until(lambda: again.directory.state("w") is DirectoryState.DEGRADED)
    assert again.holds(1)  # until the worker has left, or has another incarnation
    blocks = OwnBlocks(NS, 2)
    blocks.add(key(3))
    async with served(blocks, target):
        await again.until_it_has({3}, 4)


async def test_events_that_are_no_longer_kept_are_replaced_by_a_snapshot(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_blocks, "_LOG_NBYTES", 1)
    target, blocks = f"unix:{tmp_path}/w", OwnBlocks(NS, 1)
    async with served(blocks, target):
        follower = follow(target)
        blocks.add(key(1))
        await follower.until_it_has({1}, 9)
        await follower.stop()
        watcher = follow(target)  # so that each of the following is an event of its own
        for i in range(2, 8):
            blocks.add(key(i))
            await watcher.until_it_has(set(range(1, i + 1)), 9)
        again = follow(target)
        again.directory = follower.directory
        await again.until_it_has(set(range(1, 8)), 9)
        assert again.directory.snapshots["behind"] == 1


async def test_what_a_slot_pool_indexes_and_evicts_is_reported(tmp_path: Path, follow: Follow) -> None:
    target, blocks = f"unix:{tmp_path}/w", OwnBlocks(NS, 1)
    pool = SlotPool(4, on_indexed=blocks.add, on_forgotten=blocks.discard)
    async with served(blocks, target):
        follower = follow(target)
        slots = pool.allocate(3)
        for i, slot in enumerate(slots):
            pool.index(slot, key(i))
        await follower.until_it_has({0, 1, 2}, 9)
        pool.release(slots)
        taken = pool.allocate(3)  # the free slot, and those of the last two blocks
        await follower.until_it_has({0}, 9)
        pool.index(taken[0], key(7))
        pool.quarantine(taken)
        await follower.until_it_has({0}, 9)
    assert len(blocks) == 1
