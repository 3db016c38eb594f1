"""Compilation of the CPU kernels into numba's cache, so that the processes of a cluster only load them.

    python -m moonpool.kernel_compilation

Several processes share the work, the longest part first; a process imports only the modules that it compiles.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[1]
KERNELS: Final = (  # modules whose functions numba compiles and caches
    "conductor/directory/kernels.py",
    "conductor/directory/window_kernels.py",
    "conductor/policy/kernels.py",
    "conductor/policy/lengths.py",
    "conductor/policy/placement/decode.py",
    "engine/kernels.py",
    "engine/sampling_kernels.py",
    "kvpool/digest_kernels.py",
    "kvpool/local/copy_kernels.py",
    "kvpool/local/index_kernels.py",
    "kvpool/plane_kernels.py",
    "kvpool/policy/eviction/reuse.py",
    "kvpool/policy/eviction/shadow_kernels.py",
    "kvpool/ssd/async_kernels.py",
    "kvpool/ssd/kernels.py",
    "messenger/native/grant_slots.py",
    "messenger/native/responder_loop.py",
    "messenger/native/unit_digests.py",
    "messenger/native/socket_io.py",
    "messenger/shm/kernels.py",
    "worker/paced/kernels.py",
)


@dataclass(frozen=True)
class CompiledKernels:
    """Numba's cache of compiled CPU kernels: `num_compiled` of `num_modules` modules are up to date."""

    num_modules: int
    num_compiled: int
    is_writable: bool


def observe_kernels() -> CompiledKernels:
    """Look for numba's index files in its cache folders; loads no kernel."""
    sources = [_ROOT / name for name in KERNELS]
    is_writable = all(_can_write(cache_folder(source, os.environ)) for source in sources)
    return CompiledKernels(len(sources), sum(_is_compiled(source) for source in sources), is_writable)


def _is_compiled(source: Path) -> bool:
    indices = list(cache_folder(source, os.environ).rglob(f"{source.stem}.*.nbi"))
    return bool(indices) and max(path.stat().st_mtime for path in indices) >= source.stat().st_mtime


def cache_folder(source: Path, environ: Mapping[str, str]) -> Path:
    """Return numba's cache folder for `source`: NUMBA_CACHE_DIR, __pycache__ beside it, or the user's cache folder."""
    if chosen := environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    beside = source.parent / "__pycache__"
    if _can_write(beside):
        return beside
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def _can_write(folder: Path) -> bool:
    """Return True if files can be created in the folder, or the folder itself can."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


async def compile_missing(show: Callable[[str], None]) -> None:
    """Compile what the cache lacks before several processes do so at once, each by itself.

    Does nothing if the cache is complete, or cannot be written. If it fails, the processes compile by themselves.
    """
    seen = observe_kernels()
    if seen.num_compiled == seen.num_modules or not seen.is_writable:
        return
    show("Compiling the CPU kernels, once for this installation; this takes about a minute")
    compiling = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "moonpool.kernel_compilation"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _, errors = await compiling.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(compiling.pid, signal.SIGKILL)
        raise
    if compiling.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        show(f"compiling failed, the processes try again: {''.join(last)}")


def engine() -> None:
    from engine import load_model
    from settings.worker import BUNDLED_MODEL

    load_model(BUNDLED_MODEL).warm_up()


def directory() -> None:
    from conductor.directory import table
    from conductor.policy.kernels import prefill_kernels
    from conductor.policy.lengths import length_kernels
    from conductor.policy.placement.decode import decode_kernels

    table.warm_up()
    prefill_kernels()
    decode_kernels()
    length_kernels()


def owner() -> None:
    from messenger import UnitSection
    from messenger.native.grant_slots import GrantSlots
    from messenger.native.responder_loop import responder_loop
    from messenger.native.socket_io import receive_rows
    from messenger.native.unit_digests import UnitDigests

    GrantSlots()
    responder_loop()
    receive_rows()
    UnitDigests([UnitSection(0, 4, 1)], 4)


def ssd() -> None:
    from kvpool.ssd.async_kernels import async_kernel
    from kvpool.ssd.kernels import kernels

    async_kernel()
    kernels()


def host_door() -> None:
    from kvpool.local.copy_kernels import copy_kernel, digest_kernel
    from kvpool.local.index_kernels import index_kernels

    index_kernels()
    copy_kernel()
    digest_kernel()


def eviction() -> None:
    from kvpool.policy.eviction.shadows import Shadows

    Shadows()


def small_ones() -> None:
    from kvpool import digest
    from kvpool.plane_kernels import kernels as plane_kernels
    from messenger.shm.kernels import copy_rows, page_kernels
    from worker.paced.kernels import kernels as paced_kernels

    digest.warm_up()
    plane_kernels()
    paced_kernels()
    copy_rows()
    page_kernels()


PARTS: tuple[Callable[[], None], ...] = (engine, directory, owner, eviction, host_door, ssd, small_ones)


def main() -> None:
    """Compile all kernels."""
    began_s = time.monotonic()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(PARTS))) as processes:
        for done in [processes.submit(part) for part in PARTS]:
            done.result()
    print(f"kernels compiled in {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
