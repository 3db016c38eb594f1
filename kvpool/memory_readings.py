"""Readings of available memory: of the host, and of the control groups (v1 or v2) that limit this process.

Memory that the kernel can take back at once counts as available: clean file cache, not shared memory. A file that does
not exist or cannot be read is skipped, so that other kernels and containers give fewer scopes, not errors.
"""

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from kvpool.policy.elastic import MemoryScope

_PSI_TOTAL = re.compile(r"^(some|full) .*\btotal=(\d+)", re.MULTILINE)
_KIB = re.compile(r"^(\w+):\s+(\d+) kB", re.MULTILINE)


class MemoryReader:
    """Reader of one process's scopes. `root` is the folder that contains proc and sys."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc, self._groups = root / "proc", root / "sys" / "fs" / "cgroup"

    def read(self) -> list[MemoryScope]:
        """Return the host, if it reports its memory, and every control group with a limit."""
        meminfo = {name: int(kib) << 10 for name, kib in _KIB.findall(_text(self._proc / "meminfo"))}
        total = meminfo.get("MemTotal", 0)
        scopes = []
        if total and "MemAvailable" in meminfo:
            some, full = _stalls(self._proc / "pressure" / "memory")
            scopes.append(MemoryScope("host", total, meminfo["MemAvailable"], some, full))
        for hierarchy, _, rest in (line.partition(":") for line in _text(self._proc / "self" / "cgroup").splitlines()):
            controllers, _, path = rest.partition(":")
            if hierarchy == "0" and not controllers:
                scopes += _limited(self._groups, path, _v2_scope, total)
            elif "memory" in controllers.split(","):
                scopes += _limited(self._groups / "memory", path, _v1_scope, total)
        return scopes


def _limited(
    mount: Path, path: str, scope_of: Callable[[Path], MemoryScope | None], total_nbytes: int
) -> list[MemoryScope]:
    """Return the limited groups from the process's own to the root of the mount.

    In a container, the mount may begin with the process's own group, whose path is then not below it.
    """
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts or not (mount / "/".join(parts)).is_dir():
        parts = ()
    folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    found = (scope_of(folder) for folder in folders)
    return [scope for scope in found if scope is not None and (not total_nbytes or scope.total_nbytes < total_nbytes)]


def _v2_scope(folder: Path) -> MemoryScope | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
    current = _number(folder / "memory.current")
    if not limits or current is None:
        return None
    stat = _stat(folder)
    cache = stat.get("active_file", 0) + stat.get("inactive_file", 0)
    some, full = _stalls(folder / "memory.pressure")
    return MemoryScope(_name(folder), min(limits), max(0, min(limits) - current + cache), some, full)


def _v1_scope(folder: Path) -> MemoryScope | None:
    limit, current = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or current is None:
        return None
    stat = _stat(folder)
    cache = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
    return MemoryScope(_name(folder), limit, max(0, limit - current + cache))


def _name(folder: Path) -> str:
    return f"control group {folder}"


def _stalls(path: Path) -> tuple[int, int]:
    """Return the cumulative microseconds in which some and all tasks waited; zeros if they are not reported."""
    totals = dict(_PSI_TOTAL.findall(_text(path)))
    return int(totals.get("some", 0)), int(totals.get("full", 0))


def _stat(folder: Path) -> dict[str, int]:
    fields = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) == 2 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Return the number in the file; None if it is missing or says `max`."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
