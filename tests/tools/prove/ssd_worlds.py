"""The production SSD store and SSD tier on simulated disks: one world per seed, with crashes and faulty disks.

`python ssd_worlds.py SCENARIO FIRST END` runs the seeds FIRST..END and prints one JSON object per seed: `problems`,
which must be empty, `digest` of the world's events, and counts. Scenarios are `store` and `tier`, with an ending for
what is wrong besides crashes:

    lies              syncs return without effect
    flip              bits flip in what is stored
    errors            reads, writes and syncs fail; the disk of a store may be full
    lossy-errors      and a failed sync of a store loses other threads' writes
    stall             the disk does not answer for a while
    new               the tier creates its own folder
    unsynced          the store does not sync its data: a defect
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import mmap
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parents[3] / "proto")]

from tools.prove import imports  # noqa: E402
from tools.prove.world import basics, clock, disk_modules, ssd_loops  # noqa: E402
from tools.prove.world.disk import SimDisk  # noqa: E402
from tools.prove.world.process import Process  # noqa: E402
from tools.prove.world.scheduler import World, set_world  # noqa: E402

imports.install(
    {
        **basics.REPLACED,
        **disk_modules.MODULES,
        **ssd_loops.SSD_MODULES,
    }
)

import numpy as np  # noqa: E402

from kvpool import KvGroup, KvSpec, digest  # noqa: E402
from kvpool.config import PoolNodeConfig  # noqa: E402
from kvpool.errors import SsdCorrupt, SsdIoError  # noqa: E402
from kvpool.policy import PoolCore, PutRequest  # noqa: E402
from kvpool.ssd import SsdConfig, SsdEntry, SsdRead, SsdStore, SsdWrite  # noqa: E402
from kvpool.ssd.folder import Segments  # noqa: E402
from kvpool.ssd_tier import SsdTier  # noqa: E402
from settings.keys import assemble  # noqa: E402

PAGE = 4096
NAMESPACE = b"namespace".ljust(16, b"\0")
PAGES_EACH, CLIENTS = 20, 3


def spec_of(*group_nbytes: int) -> KvSpec:
    """Return a spec whose groups' slots take so many bytes."""
    groups = [KvGroup("full", 0, (g,), 1, nbytes // 8, "uint8") for g, nbytes in enumerate(group_nbytes)]
    return KvSpec(tuple(groups), 4)


class Trial:
    """One seed: its world and disk, and what is true of the blocks, numbered in the order of their writes."""

    def __init__(self, seed: int, scenario: str) -> None:
        self.seed, self.scenario = seed, scenario
        self.rng = random.Random(f"trial {scenario} {seed}")
        self.world = World(seed)
        set_world(self.world)
        self.disk = SimDisk(self.world, "host")
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()

    @property
    def is_harmed(self) -> bool:
        """True if the disk may lose or damage what is durable."""
        return self.scenario.endswith(("lies", "flip"))

    def expect(self, condition: bool, problem: str) -> None:
        """Record a problem unless the condition holds."""
        if not condition:
            self.problems.append(f"{self.world.now_ns / 1e9:.6f} {problem}")

    def live(self, number: int, main: Callable[[], Any], limit_s: float, crash_s: float | None) -> None:
        """Run a process until it ends, or kill it, or crash its machine, at `crash_s`."""
        process = Process(self.world, f"life-{number}", "host")
        process.start(main)
        if crash_s is not None:
            self.world.at(crash_s, lambda: self.end(process))
        ended = self.world.run(lambda: process.is_dead, limit_s)
        self.expect(ended, f"life {number} hangs")
        self.expect(process.exit is None, f"life {number} ends with {process.exit!r}")

    def end(self, process: Process) -> None:
        """Kill the process, or crash the machine; harm the disk's contents if the scenario says so."""
        if process.is_dead:
            return
        self.counts["crashes"] += 1
        if self.rng.random() < 0.3:
            process.end("is killed")
        else:
            self.disk.crash(self.rng)
        if self.scenario.endswith("flip"):
            for _ in range(self.rng.choice((1, 3, 20))):
                self.world.tell("disk", self.disk.flip(self.rng))

    def outcome(self) -> dict[str, Any]:
        """Return the seed's results."""
        return {
            "seed": self.seed,
            "problems": self.problems,
            "digest": f"{self.world.digest} after {self.world.now_ns} ns and {self.world.num_steps} steps",
            "steps": self.world.num_steps,
            "counts": dict(self.counts),
        }


class StoreTrial(Trial):
    """Threads write, free and read blocks of a store, each in its own part of the space."""

    def __init__(self, seed: int, scenario: str) -> None:
        super().__init__(seed, scenario)
        self.disk.make_folders("/disk/pool")
        self.disk.has_async_io, self.disk.has_direct_io = self.rng.random() < 0.8, self.rng.random() < 0.9
        self.spec = spec_of(*self.rng.choice(((4096, 2400), (4096, 4096), (200, 100), (400,) * 8)))
        self.step = -(-self.spec.block_nbytes // PAGE)
        self.sure: dict[int, int] = {}  # number to page: durable blocks
        self.written: dict[int, int] = {}  # all that the store was asked to write
        self.failed: set[int] = set()  # those whose write returned an error
        self.freed: set[int] = set()
        self.gone: set[int] = set()  # those whose free is durable, too
        self.next_number = 1
        self.config = SsdConfig(
            Path("/disk/pool"),
            nbytes=CLIENTS * PAGES_EACH * PAGE,
            owner_id="node",
            segment_nbytes=15 * PAGE,
            read_depth=self.rng.choice((1, 2, 4)),
            write_depth=self.rng.choice((1, 3)),
            min_journal_nbytes=1 << 16,
        )

    def run(self) -> None:
        """Run a few lives, and a last one without a fault that reads everything."""
        for number in range(self.rng.randint(2, 4)):
            self.live(number, self._main, 60.0, self.rng.choice((0.004, 0.03, 0.08)) * self.rng.random())
        self._repair()
        self.live(99, self._look, 60.0, None)

    def _repair(self) -> None:
        self.disk.lies = self.disk.full = False
        self.disk.read_errors = self.disk.write_errors = 0.0

    async def _main(self) -> None:
        self._repair()
        if self.scenario.endswith("lies"):
            self.disk.lies = self.rng.random() < 0.7
        store = await self._open()
        if self.scenario.endswith("errors"):
            self.disk.read_errors, self.disk.write_errors = self.rng.choice(((0.0, 0.05), (0.05, 0.05), (0.0, 0.5)))
            self.disk.full = self.rng.random() < 0.1
            self.disk.loses_writes = "lossy" in self.scenario
        await asyncio.gather(*(asyncio.to_thread(self._work, store, client) for client in range(CLIENTS)))

    async def _look(self) -> None:
        store = await self._open()
        self.expect(await asyncio.to_thread(store.close), "the store does not close")

    async def _open(self) -> SsdStore:
        store = await asyncio.to_thread(SsdStore.open, self.config)
        found = {int.from_bytes(entry.chain_key): entry.offset // PAGE for entry in store.recovered}
        self.world.tell("store", f"recovers {found}, {sorted(store.stats().recovery.items())}")
        for entry in store.recovered:
            number = int.from_bytes(entry.chain_key)
            self.expect(self.written.get(number) == entry.offset // PAGE, f"block {number} was never written there")
            self.expect(entry == self.entry(number, entry.offset // PAGE), f"the facts of block {number} are wrong")
        if not self.is_harmed:
            lost = self.sure.keys() - found.keys()
            self.expect(not lost, f"durable blocks are lost: {sorted(lost)}")
            self.expect(not self.gone & found.keys(), f"freed blocks are back: {sorted(self.gone & found.keys())}")
            self.expect(not store.stats().recovery.get("lost_frames"), "committed frames are lost")
        good = await asyncio.to_thread(self.read, store, found)
        self.counts["recovered_failed"] += len(self.failed & found.keys())
        self.counts["recovered"] += len(good)
        self.counts["torn"] += store.stats().recovery.get("torn_end", 0)
        await asyncio.to_thread(store.free, [page * PAGE for number, page in found.items() if number not in good])
        self.sure = {number: page for number, page in found.items() if number in good}
        self.freed -= good
        self.freed |= found.keys() - good
        return store

    def _work(self, store: SsdStore, client: int) -> None:
        rng = random.Random(f"{self.seed} {client} {self.next_number}")
        first = client * PAGES_EACH
        held = {n: page for n, page in self.sure.items() if first <= page < first + PAGES_EACH}
        while True:
            if len(held) > 6 or (held and rng.random() < 0.3):
                gone = rng.sample(sorted(held), rng.randint(1, min(3, len(held))))
                for number in gone:
                    self.sure.pop(number, None)
                store.free([held.pop(number) * PAGE for number in gone])
                self.freed.update(gone)
                if rng.random() < 0.2:
                    self._sync_frees(store)
            clear = [
                page
                for page in range(first, first + PAGES_EACH - self.step + 1, self.step)
                if page not in held.values()
            ]
            pages = rng.sample(clear, min(len(clear), rng.randint(1, 3)))
            chosen = {self.next_number + i: page for i, page in enumerate(pages)}
            self.next_number += len(chosen)
            self.write(store, chosen, held)
            if held and rng.random() < 0.5:
                number = rng.choice(sorted(held))
                self.read(store, {number: held[number]})

    def write(self, store: SsdStore, pages: dict[int, int], held: dict[int, int]) -> None:
        """Write blocks; those that are durable come into `held`."""
        freed = set(self.freed)
        self.written |= pages
        results = store.write([SsdWrite(self.entry(n, page), self.data(n)) for n, page in pages.items()])
        for (number, page), error in zip(pages.items(), results, strict=True):
            if error is None:
                self.sure[number] = held[number] = page
                self.gone |= freed
                self.counts["sealed"] += 1
            else:
                self.counts[type(error).__name__] += 1
                self.expect(self.scenario.endswith("errors") and isinstance(error, SsdIoError), f"a write: {error!r}")
                self.freed.add(number)
                self.failed.add(number)

    def read(self, store: SsdStore, pages: dict[int, int]) -> set[int]:
        """Read blocks, all at once, and check their bytes. Returns those that are right."""
        targets = {number: [np.zeros_like(part) for part in self.data(number)] for number in pages}
        results = store.read([SsdRead(page * PAGE, NAMESPACE, n.to_bytes(16), targets[n]) for n, page in pages.items()])
        good = set()
        for (number, page), error in zip(pages.items(), results, strict=True):
            if error is None:
                same = all(np.array_equal(*pair) for pair in zip(targets[number], self.data(number), strict=True))
                self.expect(same, f"block {number} at page {page} is served with wrong bytes")
                good.add(number)
            else:
                self.counts[type(error).__name__] += 1
                may_fail = self.scenario.endswith("errors") and type(error) is SsdIoError
                may_differ = self.is_harmed or number in self.failed
                is_expected = may_fail or (may_differ and isinstance(error, SsdCorrupt))
                self.expect(is_expected, f"reading block {number}: {error!r}")
        return good

    def _sync_frees(self, store: SsdStore) -> None:
        freed = set(self.freed)
        store.sync_frees()
        if not self.scenario.endswith("errors"):
            self.gone |= freed

    def entry(self, number: int, page: int) -> SsdEntry:
        """Return the facts of a block, which follow from its number."""
        digests = tuple(number.to_bytes(8, "little") for _ in self.spec.groups)
        return SsdEntry(page * PAGE, NAMESPACE, number.to_bytes(16), bytes(16), self.spec, number % 3, digests)

    def data(self, number: int) -> list[Any]:
        """Return the bytes of a block, which follow from its number."""
        data = random.Random(number).randbytes(self.spec.block_nbytes)
        ends = np.cumsum([self.spec.slot_nbytes(g) for g in range(self.spec.num_groups)])[:-1]
        return [part.copy() for part in np.split(np.frombuffer(data, np.uint8), ends)]


class TierTrial(Trial):
    """A pool's policy core and arena with the SSD tier: blocks are put, written back, evicted, loaded and pinned."""

    def __init__(self, seed: int, scenario: str) -> None:
        super().__init__(seed, scenario)
        self.spec = spec_of(*self.rng.choice(((4096, 4096), (6144,), (1024, 3072))))
        self.compression = self.rng.choice(("off", "auto"))
        if scenario != "tier-new":
            self.disk.make_folders("/disk/pool-0")
        self.core: PoolCore | None = None
        self.tier: SsdTier | None = None
        self.published = 0
        self.chains: list[list[bytes]] = []
        self.durable: set[bytes] = set()  # keys of the blocks that were on the SSD when the process died

    def run(self) -> None:
        """Run a few lives, the last one without an end from outside."""
        for number in range(self.rng.randint(1, 3)):
            self.live(number, self._main, 120.0, self.rng.choice((0.02, 0.3, 1.0)) * self.rng.random())
        self.disk.lies = False
        self.live(99, self._main, 120.0, None)

    def end(self, process: Process) -> None:
        if self.core is not None:
            self.durable = self._on_ssd(self.core)
        super().end(process)
        self.disk.stalled, self.disk.read_errors, self.disk.write_errors = False, 0.0, 0.0

    def _on_ssd(self, core: PoolCore) -> set[bytes]:
        keys = [key for chain in self.chains for key in chain]
        found = [core.store.find(NAMESPACE, key) for key in keys]
        return {key for key, block in zip(keys, found, strict=True) if block and block.ssd_offset is not None}

    async def _main(self) -> None:
        self.disk.lies = self.scenario.endswith("lies") and self.rng.random() < 0.7
        config = assemble(
            PoolNodeConfig,
            node_id="pool-0",
            listen="host:1",
            pool_bytes=1 << 18,
            pool_ssd_dir=disk_modules.MODULES["pathlib"].Path("/disk"),
            pool_ssd_bytes=1 << 20,
            pool_ssd_depth=4,
            pool_ssd_compression=self.compression,
        )
        core = self.core = PoolCore(config.limits, 1)
        arena = np.frombuffer(mmap.mmap(-1, config.limits.arena_nbytes), np.uint8)
        counters: defaultdict[str, float] = defaultdict(float)
        self.tier = None
        tier = self.tier = await SsdTier.open(config, core, arena, self._publish, counters)
        self.counts["restored"] += len(self._on_ssd(core))
        if not self.is_harmed:
            lost = self.durable - self._on_ssd(core)
            self.expect(not lost, f"{len(lost)} of {len(self.durable)} durable blocks are lost")
        if self.scenario.endswith("stall"):
            self.world.at(0.3 * self.rng.random(), lambda: setattr(self.disk, "stalled", True))
            self.world.at(0.3 + self.rng.choice((0.5, 5.0, 30.0)), lambda: setattr(self.disk, "stalled", False))
        elif self.scenario.endswith("errors"):
            self.disk.read_errors = self.disk.write_errors = self.rng.choice((0.02, 0.2))
        for _ in range(25):
            await self._step(core, tier, arena)
        self.disk.read_errors = self.disk.write_errors = 0.0
        began = clock.time.monotonic()
        await tier.close()
        self.expect(clock.time.monotonic() - began < 30.0, "the tier closes late")
        self.problems += [f"after close: {problem}" for problem in core.validate()]
        self.counts["corrupt"] += int(counters["ssd_corrupt_blocks"])
        self.counts["written"] += int(counters["written_blocks"])
        self.expect(self.is_harmed or not counters["ssd_corrupt_blocks"], "blocks are corrupt")
        self.durable = self._on_ssd(core)

    def _publish(self) -> None:
        assert self.core is not None
        if self.core.log.seq != self.published:
            self.published = self.core.log.seq
            if self.tier is not None:
                self.tier.write_back.wake()

    async def _step(self, core: PoolCore, tier: SsdTier, arena: Any) -> None:
        action = self.rng.random()
        if action < 0.5:
            self._put(core, arena)
        elif action < 0.6 and not self.scenario.endswith("stall"):
            await tier.write_back.write_everything()
            core.flush(clock.time.monotonic_ns(), None, dram_only=True)
            self._publish()
        if self.chains:
            chain = self.rng.choice(self.chains)
            began = clock.time.monotonic()
            await tier.loader.bring(NAMESPACE, chain, tails=False, wait_s=1.0)
            self.expect(clock.time.monotonic() - began < 1.5, "a load is waited for too long")
            grant = core.pin(
                clock.time.monotonic_ns(), NAMESPACE, chain, owner="worker", owner_incarnation=1, lease_ns=10**9
            )
            if grant is not None:
                self.counts["served"] += len(grant.blocks)
                self.counts["served_from_ssd"] += grant.num_from_ssd
                self.world.tell("tier", f"serves {[block.chain_key.hex() for block in grant.blocks]}")
                for block in grant.blocks:
                    same = np.array_equal(self._bytes_of(arena, block.offsets), self._data(block.chain_key))
                    self.expect(same, f"block {block.chain_key.hex()} is served with wrong bytes")
                core.unpin(grant.lease_id)
        await asyncio.sleep(self.rng.random() * 0.05)

    def _put(self, core: PoolCore, arena: Any) -> None:
        salt = len(self.chains).to_bytes(8)
        chain = [salt + (i + 1).to_bytes(8) for i in range(self.rng.randint(1, 5))]
        request = PutRequest(NAMESPACE, self.spec, chain, [bytes(16), *chain[:-1]], (), 1.0)
        new = core.add(clock.time.monotonic_ns(), request)
        if not new.blocks:
            return
        self.chains.append(chain)
        digests = []
        for block, offsets in zip(new.blocks, new.offsets, strict=True):
            data, at = self._data(block.chain_key), 0
            for g, offset in enumerate(offsets):
                size = self.spec.slot_nbytes(g)
                arena[offset : offset + size] = data[at : at + size]
                at += size
            full = np.array([self.spec.block_tokens], np.int32)
            digests.append(
                tuple(
                    digest.layer_digests_at(arena, np.array([offset], np.int64), self.spec, g, full).tobytes()
                    for g, offset in enumerate(offsets)
                )
            )
        core.settle_new(new, core.seal_new(new, digests))
        self._publish()

    def _bytes_of(self, arena: Any, offsets: tuple[int, ...]) -> Any:
        return np.concatenate([arena[at : at + self.spec.slot_nbytes(g)] for g, at in enumerate(offsets)])

    def _data(self, chain_key: bytes) -> Any:
        """Return the bytes of a block, which follow from its key."""
        rng = random.Random(chain_key)
        return np.frombuffer(rng.randbytes(self.spec.block_nbytes), np.uint8)


def main(scenario: str, first: int, end: int) -> Iterator[dict[str, Any]]:
    """Run the seeds of a scenario."""
    kinds = {"store": StoreTrial, "tier": TierTrial}
    if scenario == "store-unsynced":  # a store with a defect, which must be found
        Segments.sync = lambda segments, index: None  # type: ignore[method-assign]
    for seed in range(first, end):
        trial = kinds[scenario.partition("-")[0]](seed, scenario)
        trial.run()
        yield trial.outcome()


if __name__ == "__main__":
    faulthandler.enable()
    logging.disable()
    for outcome in main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])):
        print(json.dumps(outcome), flush=True)
    os._exit(0)  # threads of dead processes are not unwound
