"""The folder that a pool node is to keep its SSD tier in: whether it can, and how soon a write is durable."""

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

from moonpool.doctor.finding import Check, Level, Needs, Verdict, size_text
from moonpool.doctor.storage import GIB, file_system, read_mounts

_IN_MEMORY: Final = ("tmpfs", "ramfs")
_DEFAULT_NBYTES: Final = 4 * GIB  # of --pool-ssd-bytes
_SLOW_SYNC_S: Final = 0.05
_PAGE_NBYTES: Final = 4096
_NUM_WRITES: Final = 8


@dataclass(frozen=True)
class SsdFolder:
    """`problem`: why nothing can be kept there, "" if it can. `sync_s`: median of durable writes of one page."""

    path: str
    kind: str = ""
    free: int = 0
    is_direct: bool = False
    sync_s: float = 0.0
    problem: str = ""


def checks(folder: Path | None) -> tuple[Check, ...]:
    """Of the folder that was named, if any."""
    return (Check("pool SSD", partial(observe_ssd, folder), judge_ssd),)


def observe_ssd(folder: Path | None) -> SsdFolder | None:
    """Writes a few pages to a file of its own there, and removes it."""
    if folder is None:
        return None
    path = folder.absolute()
    if not path.is_dir():
        return SsdFolder(str(path), problem="is no folder" if path.exists() else "does not exist")
    kind = file_system(str(path.resolve()), read_mounts())
    try:
        free = shutil.disk_usage(path).free
        with tempfile.NamedTemporaryFile(dir=path, prefix=".moonpool-doctor-") as file:
            is_direct, sync_s = _try(file.name)
    except OSError as error:
        return SsdFolder(str(path), kind, problem=f"cannot be written: {error.strerror}")
    return SsdFolder(str(path), kind, free, is_direct, sync_s)


def judge_ssd(seen: SsdFolder | None, needs: Needs) -> Verdict:
    if seen is None:
        return Level.NOTE, "no folder was named", "To look at one, name it: --pool-ssd-dir /mnt/nvme/moonpool."
    where = f"{seen.path} ({seen.kind})" if seen.kind else seen.path
    if seen.problem:
        advice = "Make it, on the disk that is to hold the tier, with rights for this user."
        return Level.FAIL, f"{where} {seen.problem}", advice
    if seen.kind in _IN_MEMORY:
        advice = "Name a folder on a disk, or give the memory to the pool itself with --pool-bytes."
        return Level.FAIL, f"{where} is memory", advice
    io = "direct I/O" if seen.is_direct else "no direct I/O"
    found = f"{where}, {size_text(seen.free)} free, {io}, a page is durable after {seen.sync_s * 1e3:.3g} ms"
    if seen.free < _DEFAULT_NBYTES:
        return Level.WARN, found, "Make room, or give --pool-ssd-bytes a value below what is free."
    if not seen.is_direct:
        return (
            Level.WARN,
            found,
            "Use ext4 or xfs on a local disk: the page cache would be in between, and take memory.",
        )
    if seen.sync_s > _SLOW_SYNC_S:
        return Level.WARN, found, "Use a local SSD: from a disk so slow much is not loaded in time."
    return Level.OK, found, ""


def _try(path: str) -> tuple[bool, float]:
    """(whether direct I/O works, median seconds of a durable write)."""
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
