"""Checks of storage: the run directory, the disk, /dev/shm, anonymous shared memory, and the folder of the SSD tier."""

import mmap
import os
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from moonpool.cluster_view.formatting import size_text
from moonpool.doctor.checks import Check, Level, Needs, Verdict, read_text
from moonpool.supervision.run_dir import LONGEST_SOCKET_NAME, default_run_dir

MIB: Final = 1 << 20
GIB: Final = 1 << 30
_MAX_SOCKET_PATH: Final = 107
_PORT_DIGITS: Final = 5
_MOUNTS: Final = Path("/proc/self/mounts")
# Two files of 32 MiB for each of a small cluster's nodes.
LEAST_RUN_DIR_NBYTES: Final = 512 * MIB
LEAST_DISK_NBYTES: Final = 5 * GIB
SMALL_SHM_NBYTES: Final = GIB  # Docker's default is 64 MiB


@dataclass(frozen=True)
class Folder:
    """A folder and its file system, sizes in bytes; `problem` is "" if files can be written."""

    path: str
    total: int
    free: int
    kind: str  # "ext4", "tmpfs", "overlay", ...
    problem: str = ""


def observe_run_dir() -> Folder:
    """Examine the folder for run directories."""
    return _folder(default_run_dir("0").parents[1])


def judge_run_dir(seen: Folder, needs: Needs) -> Verdict:
    length = len(os.fsencode(seen.path)) + len(f"/moonpool-{os.getuid()}/") + _PORT_DIGITS + 1 + LONGEST_SOCKET_NAME
    if seen.problem:
        advice = "Set TMPDIR or XDG_RUNTIME_DIR to a folder of this user, or choose another --run-dir for serve."
        return Level.FAIL, f"{seen.path}: {seen.problem}", advice
    if length > _MAX_SOCKET_PATH:
        advice = "Choose a shorter --run-dir for serve, such as /tmp/moonpool."
        return Level.FAIL, f"{seen.path} is too long a path for unix sockets", advice
    found = f"{seen.path}, {size_text(seen.free)} free"
    if seen.free < LEAST_RUN_DIR_NBYTES:
        return (
            Level.WARN,
            found,
            "Free space, or choose another --run-dir for serve: the log of each node takes up to 64 MiB.",
        )
    return Level.OK, found, ""


def observe_disk() -> Folder:
    """Examine the working directory."""
    return _folder(Path.cwd())


def judge_disk(seen: Folder, needs: Needs) -> Verdict:
    if seen.problem:
        found = f"{seen.path} ({seen.kind}): {seen.problem}"
        return Level.NOTE, found, "Start commands in a writable folder, or choose one for their reports with --out."
    found = f"{size_text(seen.free)} free of {size_text(seen.total)} at {seen.path} ({seen.kind})"
    if seen.free < LEAST_DISK_NBYTES:
        return Level.NOTE, found, "Free space before storing models, reports or KV on this disk."
    return Level.OK, found, ""


def observe_shm() -> Folder:
    """Examine /dev/shm."""
    return _folder(Path("/dev/shm"))


def judge_shm(seen: Folder, needs: Needs) -> Verdict:
    if seen.problem:
        return Level.NOTE, seen.problem, "Only Ray needs it: mount it (docker run --shm-size 8g)."
    found = f"{size_text(seen.free)} free of {size_text(seen.total)}"
    if seen.total < SMALL_SHM_NBYTES:
        return Level.NOTE, found, "Only Ray needs it: for Ray make it larger (docker run --shm-size 8g)."
    return Level.OK, found, ""


@dataclass(frozen=True)
class SharedMemoryProbe:
    """Result of creating and mapping anonymous shared memory; `problem` is "" on success."""

    problem: str


def observe_shared_memory() -> SharedMemoryProbe:
    """Create and map anonymous shared memory, as pool nodes and workers do for KV."""
    try:
        descriptor = os.memfd_create("moonpool-doctor")
        try:
            os.ftruncate(descriptor, MIB)
            with mmap.mmap(descriptor, MIB) as memory:
                memory[MIB - 1] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        return SharedMemoryProbe(f"{error.strerror} (memfd_create)")
    return SharedMemoryProbe("")


def judge_shared_memory(seen: SharedMemoryProbe, needs: Needs) -> Verdict:
    if seen.problem:
        advice = (
            "Allow memfd_create and mmap in the container's security profile: KV is stored in anonymous shared memory."
        )
        return Level.FAIL, seen.problem, advice
    return Level.OK, "can be created and mapped", ""


def _folder(path: Path) -> Folder:
    kind = file_system(str(path), read_text(_MOUNTS))
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Folder(str(path), 0, 0, kind, str(error.strerror))
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Folder(str(path), usage.total, usage.free, kind, f"cannot write files ({error.strerror})")
    return Folder(str(path), usage.total, usage.free, kind)


def file_system(path: str, mounts: str) -> str:
    """Return the type of the file system of `path` from the text of /proc/self/mounts, or "unknown"."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


CHECKS: Final = (
    Check("run directory", observe_run_dir, judge_run_dir),
    Check("shared memory", observe_shared_memory, judge_shared_memory),
    Check("/dev/shm", observe_shm, judge_shm),
    Check("disk", observe_disk, judge_disk),
)


_IN_MEMORY: Final = ("tmpfs", "ramfs")
_DEFAULT_NBYTES: Final = 4 * GIB  # of --pool-ssd-bytes
_SLOW_SYNC_S: Final = 0.05
_PAGE_NBYTES: Final = 4096
_NUM_WRITES: Final = 8


@dataclass(frozen=True)
class SsdFolder:
    """Folder for an SSD tier. `problem` is "" if it is usable; `sync_s` is the median time of a durable 4 KiB write."""

    path: str
    kind: str = ""
    free: int = 0
    is_direct: bool = False
    sync_s: float = 0.0
    problem: str = ""


def checks(folder: Path | None) -> tuple[Check, ...]:
    """Return the check of the folder for a pool node's SSD tier; None if none was given."""
    return (Check("pool SSD", partial(observe_ssd, folder), judge_ssd),)


def observe_ssd(folder: Path | None) -> SsdFolder | None:
    """Write a few pages to a temporary file in the folder, and measure how long each takes to become durable."""
    if folder is None:
        return None
    path = folder.absolute()
    if not path.is_dir():
        return SsdFolder(str(path), problem="is not a folder" if path.exists() else "does not exist")
    kind = file_system(str(path.resolve()), read_text(_MOUNTS))
    try:
        free = shutil.disk_usage(path).free
        with tempfile.NamedTemporaryFile(dir=path, prefix=".moonpool-doctor-") as file:
            is_direct, sync_s = _try(file.name)
    except OSError as error:
        return SsdFolder(str(path), kind, problem=f"cannot be written: {error.strerror}")
    return SsdFolder(str(path), kind, free, is_direct, sync_s)


def judge_ssd(seen: SsdFolder | None, needs: Needs) -> Verdict:
    if seen is None:
        return Level.NOTE, "no folder given", "To check a folder, give it: --pool-ssd-dir /mnt/nvme/moonpool."
    where = f"{seen.path} ({seen.kind})" if seen.kind else seen.path
    if seen.problem:
        advice = "Create the folder on the SSD, and give this user write access."
        return Level.FAIL, f"{where} {seen.problem}", advice
    if seen.kind in _IN_MEMORY:
        advice = "Choose a folder on a disk, or give the memory to the pool itself with --pool-bytes."
        return Level.FAIL, f"{where} is in memory", advice
    io = "direct I/O" if seen.is_direct else "no direct I/O"
    found = f"{where}, {size_text(seen.free)} free, {io}, durable 4 KiB writes take {seen.sync_s * 1e3:.3g} ms"
    if seen.free < _DEFAULT_NBYTES:
        return Level.WARN, found, "Free space, or set --pool-ssd-bytes to less than the free space."
    if not seen.is_direct:
        return (
            Level.WARN,
            found,
            "Use ext4 or xfs on a local disk: without direct I/O, the page cache takes additional memory.",
        )
    if seen.sync_s > _SLOW_SYNC_S:
        return Level.WARN, found, "Use a local SSD: from a disk this slow, many blocks will not be loaded in time."
    return Level.OK, found, ""


def _try(path: str) -> tuple[bool, float]:
    """Return (True if direct I/O works, median seconds of a durable write)."""
    with mmap.mmap(-1, _PAGE_NBYTES) as page:
        page.write(b"\x5a" * _PAGE_NBYTES)
        with suppress(OSError):
            return True, _sync_s(path, page, os.O_DIRECT)
        return False, _sync_s(path, page, 0)


def _sync_s(path: str, page: mmap.mmap, flags: int) -> float:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    try:
        times = []
        for i in range(_NUM_WRITES):
            began = time.perf_counter()
            os.pwrite(file, page, i * _PAGE_NBYTES)
            os.fdatasync(file)
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    finally:
        os.close(file)
