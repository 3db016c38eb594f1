"""Where processes keep files and shared memory: the run directory, the disk, /dev/shm, anonymous shared memory."""

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonpool.doctor.finding import Check, Level, Needs, Verdict, size_text
from moonpool.run_dir import LONGEST_SOCKET_NAME, default_run_dir

MIB: Final = 1 << 20
GIB: Final = 1 << 30
_MAX_SOCKET_PATH: Final = 107
_PORT_DIGITS: Final = 5
# Two files of 32 MiB for each of a small cluster's nodes.
LEAST_RUN_DIR_NBYTES: Final = 512 * MIB
LEAST_DISK_NBYTES: Final = 5 * GIB
SMALL_SHM_NBYTES: Final = GIB  # Docker gives 64 MiB


@dataclass(frozen=True)
class Folder:
    """A folder and its file system: bytes; `problem` is why no file can be written there, "" if one can."""

    path: str
    total: int
    free: int
    kind: str  # "ext4", "tmpfs", "overlay", ...
    problem: str = ""


def observe_run_dir() -> Folder:
    """Of the folder that run directories are made in."""
    return _folder(default_run_dir("0").parents[1])


def judge_run_dir(seen: Folder, needs: Needs) -> Verdict:
    length = len(os.fsencode(seen.path)) + len(f"/moonpool-{os.getuid()}/") + _PORT_DIGITS + 1 + LONGEST_SOCKET_NAME
    if seen.problem:
        advice = "Set TMPDIR or XDG_RUNTIME_DIR to a folder of your own, or give serve a --run-dir."
        return Level.FAIL, f"{seen.path}: {seen.problem}", advice
    if length > _MAX_SOCKET_PATH:
        advice = "Give serve a shorter --run-dir, such as /tmp/moonpool."
        return Level.FAIL, f"{seen.path} is too long a path for unix sockets", advice
    found = f"{seen.path}, {size_text(seen.free)} free"
    if seen.free < LEAST_RUN_DIR_NBYTES:
        return Level.WARN, found, "Free some, or give serve a --run-dir elsewhere: each node's log takes up to 64 MiB."
    return Level.OK, found, ""


def observe_disk() -> Folder:
    """Of the working directory."""
    return _folder(Path.cwd())


def judge_disk(seen: Folder, needs: Needs) -> Verdict:
    if seen.problem:
        found = f"{seen.path} ({seen.kind}): {seen.problem}"
        return Level.NOTE, found, "Start where reports may be written, or give them a folder with --out."
    found = f"{size_text(seen.free)} free of {size_text(seen.total)} at {seen.path} ({seen.kind})"
    if seen.free < LEAST_DISK_NBYTES:
        return Level.NOTE, found, "Free some before keeping models, reports or KV on this disk."
    return Level.OK, found, ""


def observe_shm() -> Folder:
    """Of /dev/shm."""
    return _folder(Path("/dev/shm"))


def judge_shm(seen: Folder, needs: Needs) -> Verdict:
    if seen.problem:
        return Level.NOTE, seen.problem, "Moonpool does not use it; Ray does: mount it (docker run --shm-size 8g)."
    found = f"{size_text(seen.free)} free of {size_text(seen.total)}"
    if seen.total < SMALL_SHM_NBYTES:
        return Level.NOTE, found, "Moonpool does not use it; for Ray make it larger (docker run --shm-size 8g)."
    return Level.OK, found, ""


@dataclass(frozen=True)
class SharedMemory:
    """Whether anonymous shared memory can be made and mapped; `problem` "" if so."""

    problem: str


def observe_shared_memory() -> SharedMemory:
    """Makes some, as pools and workers do for KV."""
    try:
        descriptor = os.memfd_create("moonpool-doctor")
        try:
            os.ftruncate(descriptor, MIB)
            with mmap.mmap(descriptor, MIB) as memory:
                memory[MIB - 1] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        return SharedMemory(f"{error.strerror} (memfd_create)")
    return SharedMemory("")


def judge_shared_memory(seen: SharedMemory, needs: Needs) -> Verdict:
    if seen.problem:
        advice = "Allow memfd_create and mmap in the container's security profile: KV lives in anonymous shared memory."
        return Level.FAIL, seen.problem, advice
    return Level.OK, "can be made and mapped", ""


def _folder(path: Path) -> Folder:
    kind = file_system(str(path), read_mounts())
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Folder(str(path), 0, 0, kind, str(error.strerror))
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Folder(str(path), usage.total, usage.free, kind, f"no file can be written there ({error.strerror})")
    return Folder(str(path), usage.total, usage.free, kind)


def file_system(path: str, mounts: str) -> str:
    """The kind of the file system that `path` lies in, by the text of /proc/self/mounts; "unknown" without one."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def read_mounts() -> str:
    """The text of /proc/self/mounts, "" where there is none."""
    try:
        return Path("/proc/self/mounts").read_text()
    except OSError:
        return ""


CHECKS: Final = (
    Check("run directory", observe_run_dir, judge_run_dir),
    Check("shared memory", observe_shared_memory, judge_shared_memory),
    Check("/dev/shm", observe_shm, judge_shm),
    Check("disk", observe_disk, judge_disk),
)
