"""Simulated disks: what survives crashes, faults, and the production SSD store and tier on them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.prove.world.disk import FIRST_FD, SimDisk
from tools.prove.world.disk_modules import MODULES
from tools.prove.world.process import Process
from tools.prove.world.scheduler import World, set_world

PAGE, SECTOR = 4096, 512
OLD, NEW = b"o" * PAGE, b"n" * PAGE
SEEDS = range(40)
sim_os: Any = MODULES["os"]
sim_path: Any = MODULES["pathlib"]
sim_fcntl: Any = MODULES["fcntl"]
sim_open: Any = MODULES["builtins"].open  # type: ignore[attr-defined]


class Machine:
    """A host with a disk, on which functions run as processes."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        set_world(self.world)
        self.disk = SimDisk(self.world, "host")
        self.rng = random.Random(seed)

    def run(self, function: Callable[[], Any], *, host: str = "host") -> Any:
        """Run a function in a new process of the host, and return its result."""
        process, results = self.start(function, host=host)
        assert self.world.run(lambda: bool(results), 100.0)
        process.end("ends")
        result = results[0]
        if isinstance(result, BaseException):
            raise result
        return result

    def start(self, function: Callable[[], Any], *, host: str = "host") -> tuple[Process, list[Any]]:
        """Start a function in a new process; its result, or its error, will be in the list."""
        process, results = Process(self.world, "process", host), list[Any]()

        def main() -> None:
            try:
                results.append(function())
            except Exception as error:
                results.append(error)

        self.world.spawn(process, main, "main")
        return process, results

    def crash(self) -> None:
        self.disk.crash(self.rng)


@pytest.fixture
def machine() -> Iterator[Machine]:
    yield Machine()
    set_world(None)


@pytest.fixture
def machines() -> Iterator[Iterator[Machine]]:
    """Machines, one after the other, each in a world of its own."""
    yield map(Machine, SEEDS)
    set_world(None)


def write_file(path: str, data: bytes, *, flags: int = 0, sync: bool = False, sync_folder: bool = False) -> None:
    fd = sim_os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    assert fd >= FIRST_FD
    assert sim_os.pwrite(fd, data, 0) == len(data)
    if sync:
        sim_os.fdatasync(fd)
    sim_os.close(fd)
    if sync_folder:
        folder = sim_os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
        sim_os.fsync(folder)
        sim_os.close(folder)


def test_what_was_synced_survives_a_crash_and_what_was_not_survives_in_parts(machines: Iterator[Machine]) -> None:
    states: Counter[str] = Counter()
    for machine in machines:
        machine.run(lambda: write_file("/disk/a", OLD * 4, sync=True, sync_folder=True))
        machine.run(lambda: write_file("/disk/a", NEW * 2))
        machine.crash()
        data = machine.disk.contents()["/disk/a"]
        assert data[2 * PAGE :] == OLD * 2
        for at in (0, PAGE):
            sectors = {data[i : i + SECTOR] for i in range(at, at + PAGE, SECTOR)}
            assert sectors <= {OLD[:SECTOR], NEW[:SECTOR]}
            states["torn" if len(sectors) == 2 else "old" if sectors == {OLD[:SECTOR]} else "new"] += 1
    assert min(states[each] for each in ("old", "new", "torn")) > 3


def test_a_sync_covers_all_that_was_written_before_it_began(machines: Iterator[Machine]) -> None:
    for machine in machines:
        machine.run(lambda: write_file("/disk/a", OLD, sync_folder=True))
        machine.run(lambda: write_file("/disk/a", NEW, sync=True))
        machine.crash()
        assert machine.disk.contents() == {"/disk/a": NEW}


def test_a_synchronous_write_needs_no_sync(machines: Iterator[Machine]) -> None:
    for machine in machines:
        machine.run(lambda: write_file("/disk/a", NEW, flags=os.O_DSYNC, sync_folder=True))
        machine.crash()
        assert machine.disk.contents() == {"/disk/a": NEW}


def test_a_write_that_follows_the_begin_of_a_sync_is_not_covered_by_it(machines: Iterator[Machine]) -> None:
    lost = 0
    for machine in machines:
        machine.run(lambda: write_file("/disk/a", OLD, sync=True, sync_folder=True))
        _, synced = machine.start(lambda: write_file("/disk/a", b"", sync=True))
        machine.world.run(lambda: False, 0.0003)
        _, written = machine.start(lambda: write_file("/disk/a", NEW))
        machine.world.at(1.0, lambda: None)  # something to wait for
        machine.world.run(lambda: False, 0.5)
        assert synced
        assert written
        machine.crash()
        lost += machine.disk.contents()["/disk/a"] != NEW
    assert lost > len(SEEDS) / 2


def test_names_are_durable_only_after_a_sync_of_their_folder(machines: Iterator[Machine]) -> None:
    found: Counter[tuple[str, ...]] = Counter()
    for machine in machines:
        machine.run(lambda: write_file("/disk/a", OLD, sync=True, sync_folder=True))
        machine.run(lambda: write_file("/disk/b", NEW, sync=True))
        machine.run(lambda: sim_os.rename("/disk/b", "/disk/a"))
        machine.crash()
        contents = machine.disk.contents()
        assert contents.get("/disk/a") in (OLD, NEW)
        found[tuple(contents) if contents["/disk/a"] == OLD else ("renamed",)] += 1
    assert len(found) == 3
    assert min(found.values()) > 2


def test_a_removed_file_may_return_until_its_folder_is_synced(machines: Iterator[Machine]) -> None:
    returned = 0
    for machine in machines:
        machine.run(lambda: write_file("/disk/a", OLD, sync=True, sync_folder=True))
        machine.run(lambda: sim_os.unlink("/disk/a"))
        assert machine.disk.contents() == {}
        machine.crash()
        returned += bool(machine.disk.contents())
    assert 3 < returned < len(SEEDS) - 3


def test_a_new_size_that_was_not_synced_may_be_lost(machines: Iterator[Machine]) -> None:
    sizes: set[int] = set()

    def cut() -> None:
        fd = sim_os.open("/disk/a", os.O_RDWR)
        sim_os.ftruncate(fd, 100)
        sim_os.posix_fallocate(fd, 0, 3 * PAGE)

    for machine in machines:
        machine.run(lambda: write_file("/disk/a", OLD * 2, sync=True, sync_folder=True))
        machine.run(cut)
        assert machine.disk.contents()["/disk/a"] == OLD[:100].ljust(3 * PAGE, b"\0")
        machine.crash()
        sizes.add(len(machine.disk.contents()["/disk/a"]))
    assert sizes == {2 * PAGE, 100, 3 * PAGE}


def test_a_killed_process_loses_no_writes_and_holds_no_lock(machine: Machine) -> None:
    def lock() -> None:
        fd = sim_os.open("/disk/lock", os.O_RDWR | os.O_CREAT)
        sim_fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sim_os.pwrite(fd, b"mine", 0)

    process, locked = machine.start(lock)
    assert machine.world.run(lambda: bool(locked), 1.0)
    with pytest.raises(BlockingIOError):
        machine.run(lock)
    process.end("is killed")
    assert machine.disk.contents() == {"/disk/lock": b"mine"}
    machine.run(lock)


def test_a_crash_ends_the_processes_of_its_machine_and_no_others(machine: Machine) -> None:
    SimDisk(machine.world, "other")
    mine, other = (machine.start(lambda: machine.world.park(5.0), host=host)[0] for host in ("host", "other"))
    machine.world.run(lambda: False, 1.0)
    machine.crash()
    assert (mine.is_dead, other.is_dead) == (True, False)


def test_each_host_has_a_disk_of_its_own(machine: Machine) -> None:
    other = SimDisk(machine.world, "other")
    machine.run(lambda: write_file("/disk/a", OLD))
    machine.run(lambda: write_file("/disk/b", NEW), host="other")
    assert (list(machine.disk.contents()), list(other.contents())) == (["/disk/a"], ["/disk/b"])


def test_a_disk_that_lies_makes_nothing_durable(machines: Iterator[Machine]) -> None:
    lost = 0
    for machine in machines:
        machine.disk.lies = True
        machine.run(lambda: write_file("/disk/a", NEW, sync=True, sync_folder=True))
        machine.crash()
        lost += machine.disk.contents().get("/disk/a") != NEW
    assert lost > len(SEEDS) / 2


def test_a_full_disk_fails_what_needs_space_and_only_that(machine: Machine) -> None:
    def append() -> int:
        fd = sim_os.open("/disk/a", os.O_RDWR)
        return int(sim_os.pwrite(fd, NEW * 2, PAGE))

    machine.run(lambda: write_file("/disk/a", OLD * 2))
    machine.disk.full = True
    machine.run(lambda: write_file("/disk/a", NEW * 2))
    assert machine.run(append) == PAGE
    assert machine.run(lambda: sim_os.statvfs("/disk").f_bavail) == 0
    for fail in (lambda: write_file("/disk/a", NEW * 3), lambda: write_file("/disk/b", NEW)):
        with pytest.raises((OSError, AssertionError)) as caught:
            machine.run(fail)
        assert isinstance(caught.value, AssertionError) or caught.value.errno == errno.ENOSPC
    machine.disk.full = False
    assert machine.run(append) == 2 * PAGE


def test_a_disk_has_no_more_space_than_its_capacity(machine: Machine) -> None:
    machine.disk.capacity_nbytes = 4 * PAGE

    def fill() -> int:
        fd = sim_os.open("/disk/a", os.O_RDWR | os.O_CREAT)
        sim_os.posix_fallocate(fd, 0, 3 * PAGE)
        with pytest.raises(OSError, match="No space"):
            sim_os.posix_fallocate(fd, 0, 5 * PAGE)
        return int(sim_os.pwrite(fd, OLD * 3, 2 * PAGE))

    assert machine.run(fill) == 2 * PAGE


def test_reads_and_direct_writes_fail_with_their_probabilities(machine: Machine) -> None:
    def read() -> None:
        sim_os.pread(sim_os.open("/disk/a", os.O_RDONLY), PAGE, 0)

    machine.run(lambda: write_file("/disk/a", OLD))
    machine.disk.read_errors = 1.0
    with pytest.raises(OSError, match="Input/output"):
        machine.run(read)
    machine.disk.read_errors, machine.disk.write_errors = 0.0, 1.0
    machine.run(read)
    machine.run(lambda: write_file("/disk/a", NEW))
    with pytest.raises(OSError, match="Input/output"):
        machine.run(lambda: write_file("/disk/a", NEW, flags=os.O_DIRECT))
    with pytest.raises(OSError, match="Input/output"):
        machine.run(lambda: write_file("/disk/a", NEW, sync=True))


@pytest.mark.parametrize("loses_writes", [True, False])
def test_a_failed_sync_loses_writes_for_good_as_on_linux(machines: Iterator[Machine], loses_writes: bool) -> None:
    lost = 0
    for machine in machines:
        machine.disk.loses_writes = loses_writes
        machine.run(lambda: write_file("/disk/a", OLD, sync=True, sync_folder=True))
        machine.disk.write_errors = 1.0
        with pytest.raises(OSError, match="Input/output"):
            machine.run(lambda: write_file("/disk/a", NEW, sync=True))
        machine.disk.write_errors = 0.0
        machine.run(lambda: write_file("/disk/a", b"", sync=True))
        machine.crash()
        lost += machine.disk.contents()["/disk/a"] == OLD
    assert (lost > 5) == loses_writes


def test_a_flip_changes_one_bit_of_what_is_stored(machine: Machine) -> None:
    assert machine.disk.flip(machine.rng) == ""
    machine.run(lambda: write_file("/disk/a", OLD * 3, sync=True, sync_folder=True))
    where = machine.disk.flip(machine.rng)
    data = machine.disk.contents()["/disk/a"]
    changed = [at for at in range(len(data)) if data[at] != OLD[0]]
    assert where.startswith(f"/disk/a byte {changed[0]} bit ")
    assert len(changed) == 1
    assert (data[changed[0]] ^ OLD[0]).bit_count() == 1


def test_operations_take_time_and_a_slow_disk_takes_more(machine: Machine) -> None:
    def duration_s() -> float:
        began = machine.world.now_ns
        for _ in range(30):
            write_file("/disk/a", OLD, sync=True)
        return (machine.world.now_ns - began) / 1e9

    usual = machine.run(duration_s)
    machine.disk.slow = 10.0
    assert 0.015 < usual < 0.1
    assert machine.run(duration_s) > 5 * usual


def test_a_stalled_disk_answers_when_it_is_no_longer_stalled(machine: Machine) -> None:
    machine.disk.stalled = True
    _, written = machine.start(lambda: write_file("/disk/a", OLD))
    machine.world.at(20.0, lambda: None)
    machine.world.run(lambda: False, 10.0)
    assert not written
    machine.disk.stalled = False
    assert machine.world.run(lambda: bool(written), 1.0)


def test_other_threads_run_while_one_waits_for_the_disk(machine: Machine) -> None:
    order: list[str] = []

    def note(name: str) -> None:
        write_file(f"/disk/{name}", OLD, sync=True)
        order.append(name)

    for name in "abcdef":
        machine.start(lambda name=name: note(name))  # type: ignore[misc]
    assert machine.world.run(lambda: len(order) == 6, 0.02), "one after the other, they take longer"
    assert order != sorted(order)


def test_the_standard_library_works_on_simulated_files(machine: Machine, tmp_path: Path) -> None:
    def work() -> list[str]:
        folder = sim_path.Path("/disk/one/two")
        folder.mkdir(parents=True, mode=0o700)
        (folder / "b.txt").write_text("x\ny\n")
        with sim_open("/disk/one/two/b.txt", "a") as file:
            file.write("z")
        with sim_open("/disk/one/two/b.txt", "r+b") as file:
            file.seek(2)
            file.write(b"Y")
        assert (folder / "b.txt").read_text().splitlines() == ["x", "Y", "z"]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.is_dir()
        assert sim_os.path.exists("/disk/one/two/b.txt")
        assert not sim_os.path.isfile("/disk/one/two")
        (folder / "b.txt").rename(folder / "c.txt")
        assert [path.name for path in folder.glob("c.*")] == ["c.txt"]
        assert MODULES["glob"].glob("/disk/one/*/c.txt") == ["/disk/one/two/c.txt"]
        assert str((folder / ".." / "two").resolve(strict=True)) == "/disk/one/two"
        sim_os.makedirs("/disk/three/four")
        MODULES["shutil"].copyfile(folder / "c.txt", "/disk/three/c.txt")  # type: ignore[attr-defined]
        below = sim_os.open("/disk/three", os.O_RDONLY | os.O_DIRECTORY)
        sim_os.unlink("c.txt", dir_fd=below)
        MODULES["shutil"].rmtree("/disk/three")  # type: ignore[attr-defined]
        (sim_path.Path(tmp_path) / "real").write_text("real")
        return [str(path) for path in sorted(sim_path.Path("/disk").rglob("*"))]

    assert machine.run(work) == ["/disk/one", "/disk/one/two", "/disk/one/two/c.txt"]
    assert (tmp_path / "real").read_text() == "real"


def test_a_process_has_its_own_descriptors_and_rights(machine: Machine) -> None:
    machine.run(lambda: write_file("/disk/a", OLD))

    def work() -> None:
        fd = sim_os.open("/disk/a", os.O_RDONLY)
        with pytest.raises(OSError, match="Bad file descriptor"):
            sim_os.pwrite(fd, NEW, 0)
        sim_os.close(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            sim_os.pread(fd, PAGE, 0)
        with pytest.raises(FileExistsError):
            sim_os.open("/disk/a", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with pytest.raises(FileNotFoundError):
            sim_os.stat("/disk/b")
        with pytest.raises(NotADirectoryError):
            sim_os.open("/disk/a/b", os.O_RDONLY)

    machine.run(work)


def test_a_process_can_signal_simulated_processes_only(machine: Machine) -> None:
    sleeper, _ = machine.start(lambda: machine.world.park(100.0))
    number = FIRST_FD

    def work() -> None:
        nonlocal number
        number = sim_os.getpid()
        sim_os.setpriority(os.PRIO_PROCESS, os.getpid(), 19)
        with pytest.raises(ProcessLookupError):
            sim_os.kill(os.getpid(), 9)
        sim_os.kill(number - 1, 9)

    machine.run(work)
    assert number > 1 << 22
    assert sleeper.is_dead
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


# The production SSD store and tier

WORLDS = Path(__file__).parent / "ssd_worlds.py"


class Results:
    """Results of a scenario's seeds."""

    def __init__(self, lines: str) -> None:
        self.seeds = [json.loads(line) for line in lines.splitlines()]
        self.problems = [f"seed {each['seed']}: {problem}" for each in self.seeds for problem in each["problems"]]
        self.digests = {each["seed"]: each["digest"] for each in self.seeds}
        self.counts: Counter[str] = Counter()
        for each in self.seeds:
            self.counts.update(each["counts"])


def worlds(scenario: str, first: int, end: int, *, hash_seed: int = 0) -> Results:
    """Run seeds of a scenario in a process of its own."""
    done = subprocess.run(
        [sys.executable, WORLDS, scenario, str(first), str(end)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = Results(done.stdout)
    assert len(results.seeds) == end - first
    return results


def test_the_store_loses_no_durable_block_in_any_crash() -> None:
    results = worlds("store", 0, 120)
    assert not results.problems
    assert results.counts["crashes"] > 300
    assert results.counts["recovered"] > 2000
    assert results.counts["torn"] > 0


def test_a_store_that_does_not_sync_its_data_is_found_out() -> None:
    problems = worlds("store-unsynced", 0, 8).problems
    assert any("SsdCorrupt" in problem for problem in problems)
    assert not any("wrong bytes" in problem for problem in problems)


def test_a_store_on_a_failing_disk_loses_no_durable_block() -> None:
    results = worlds("store-errors", 0, 50)
    assert not results.problems
    assert results.counts["SsdIoError"] > 500


def test_a_store_seals_no_block_whose_bytes_a_failed_sync_lost() -> None:
    assert not worlds("store-lossy-errors", 0, 20).problems


@pytest.mark.parametrize("scenario", ["store-lies", "store-flip"])
def test_a_store_never_serves_wrong_bytes_from_a_disk_that_lies_or_rots(scenario: str) -> None:
    results = worlds(scenario, 0, 40)
    assert not results.problems
    assert results.counts["SsdCorrupt"] > 15
    assert results.counts["recovered"] > 300


def test_the_tier_restores_all_durable_blocks_after_any_crash() -> None:
    results = worlds("tier", 0, 30)
    assert not results.problems
    assert results.counts["crashes"] > 40
    assert results.counts["restored"] > 500
    assert results.counts["served_from_ssd"] > 500


def test_a_tier_whose_folder_is_new_restores_all_durable_blocks_after_any_crash() -> None:
    assert not worlds("tier-new", 0, 8).problems


def test_the_tier_serves_no_wrong_bytes_from_a_disk_whose_bits_flip() -> None:
    results = worlds("tier-flip", 0, 15)
    assert not results.problems
    assert results.counts["corrupt"] > 5


def test_the_tier_serves_no_wrong_bytes_from_a_disk_that_lies() -> None:
    results = worlds("tier-lies", 0, 12)
    assert not results.problems
    assert results.counts["served_from_ssd"] > 100


def test_the_tier_outlasts_a_disk_that_stalls() -> None:
    results = worlds("tier-stall", 0, 15)
    assert not results.problems
    assert results.counts["served"] > 300


def test_the_tier_outlasts_a_disk_that_fails() -> None:
    results = worlds("tier-errors", 0, 12)
    assert not results.problems
    assert results.counts["served"] > 300


@pytest.mark.parametrize("scenario", ["store-errors", "tier"])
def test_a_seed_always_gives_the_same_events(scenario: str) -> None:
    first = worlds(scenario, 0, 6, hash_seed=1).digests
    again = worlds(scenario, 3, 6, hash_seed=2).digests
    assert again == {seed: first[seed] for seed in range(3, 6)}
    assert len(set(first.values())) == 6
