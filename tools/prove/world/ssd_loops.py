"""The SSD store's loops on simulated disks; `SSD_MODULES` is for `imports.install`, besides `disk_modules.MODULES`.

The compiled loops make system calls themselves, which nothing can intercept. So here the transfers are written in
Python over the simulated `os`; the real loops plan them, compute their checksums and fold their results. Files of the
system itself are left to the real loops.
"""

from __future__ import annotations

import ctypes as real_ctypes
import errno
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tools.prove.world import scheduler
from tools.prove.world.disk import FIRST_FD
from tools.prove.world.disk_modules import os, running_disk
from tools.prove.world.stored_files import PAGE_NBYTES


class _Library(real_ctypes.CDLL):
    """A library whose asynchronous I/O is simulated."""

    def syscall(self, number: int, *args: Any) -> int:
        """As syscall(2)."""
        from kvpool.ssd.async_kernels import SYSTEM_CALLS

        disk = running_disk()
        if disk is None or SYSTEM_CALLS is None or number not in (SYSTEM_CALLS.setup, SYSTEM_CALLS.destroy):
            return int(self["syscall"](number, *args))
        if number == SYSTEM_CALLS.setup:
            if not disk.has_async_io:
                real_ctypes.set_errno(errno.EAGAIN)
                return -1
            args[1]._obj.value = disk.world.next_number()
        return 0


class _LoadedLater(ModuleType):
    """A role's module that is loaded from its own source when it is first used, with some of its names replaced."""

    def __init__(self, name: str, replace: Callable[[Any], Mapping[str, Any]]) -> None:
        super().__init__(name)
        self._replace = replace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loaded" in self.__dict__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        file = Path(__file__).parents[3].joinpath(*self.__name__.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(self.__name__, file)
        assert spec is not None
        assert spec.loader is not None
        self._loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._loaded)
        names = {name: value for name, value in vars(self._loaded).items() if not name.startswith("__")}
        self.__dict__.update(names | dict(self._replace(self._loaded)))
        return getattr(self, name)


class _Transfers:
    """`transfer` and `plan` of the SSD store in Python; `real` is the module with the compiled ones."""

    def __init__(self, real: Any) -> None:
        from numba import from_dtype, types

        from jit.compiling import compiled

        self._real, self._kernels = real, real.kernels()
        runs = types.Array(from_dtype(real.IOVEC), 1, "C")
        self._checksum = compiled(real.xxh64.py_func, types.uint64(runs))

    def kernels(self) -> Any:
        """Return the kernels, as `kvpool.ssd.kernels.kernels`."""
        return self._kernels._replace(plan=self._plan, transfer=self.transfer)

    def _plan(self, offsets: Any, first_run: Any, runs: Any, segment_nbytes: int, pieces: Any, piece_runs: Any) -> Any:
        num_pieces, num_runs = self._kernels.plan(offsets, first_run, runs, segment_nbytes, pieces, piece_runs)
        if num_pieces:
            self._forget_addresses(pieces[:num_pieces], piece_runs["nbytes"][:num_runs], segment_nbytes)
        return num_pieces, num_runs

    def _forget_addresses(self, pieces: Any, sizes: Any, segment_nbytes: int) -> None:
        """Decide which pieces are direct by sizes alone: addresses differ from run to run."""
        first, start, nbytes = pieces["first_run"], pieces["offset"], pieces["nbytes"]
        is_whole = np.add.reduceat(sizes, first) == nbytes
        is_even = np.add.reduceat(sizes % PAGE_NBYTES, first) == 0
        is_inside = start // segment_nbytes == (start + nbytes - 1) // segment_nbytes
        pieces["is_direct"] = is_whole & is_even & is_inside & (pieces["num_runs"] <= self._real.MAX_RUNS)

    def transfer(
        self, pieces: Any, piece_runs: Any, fds: Any, segment_nbytes: int, write: bool, bounce: int, cursor: Any
    ) -> None:
        """Transfer pieces, as the compiled `transfer`."""
        if fds[0] < FIRST_FD:
            self._kernels.transfer(pieces, piece_runs, fds, segment_nbytes, write, bounce, cursor)
            return
        clock = scheduler.world()
        while (index := int(cursor[0])) < len(pieces):
            cursor[0] += 1
            piece = pieces[index]
            first, nbytes = int(piece["first_run"]), int(piece["nbytes"])
            runs = piece_runs[first : first + int(piece["num_runs"])]
            began_ns = clock.now_ns
            perform = self._write if write else self._read
            piece["status"] = perform(piece, runs, fds, segment_nbytes, nbytes)
            piece["latency_ns"] = clock.now_ns - began_ns

    def read_async(
        self, pieces: Any, piece_runs: Any, fds: Any, segment_nbytes: int, context: int, queue: Any, cursor: Any
    ) -> None:
        """Read pieces, as the compiled loop of `kvpool.ssd.async_kernels`, but one at a time."""
        self.transfer(pieces, piece_runs, fds, segment_nbytes, False, 0, cursor)

    def _write(self, piece: Any, runs: Any, fds: Any, segment_nbytes: int, nbytes: int) -> int:
        data = _gathered(runs).ljust(nbytes, b"\0")
        piece["checksum"] = self._checksum_of(data)
        if piece["is_direct"]:  # the device reads the memory later
            scheduler.world().point()
            data = _gathered(runs)
        return self._perform(fds, segment_nbytes, int(piece["offset"]), nbytes, memoryview(data))

    def _read(self, piece: Any, runs: Any, fds: Any, segment_nbytes: int, nbytes: int) -> int:
        data = bytearray(nbytes)
        status = self._perform(fds, segment_nbytes, int(piece["offset"]), nbytes, memoryview(data), is_read=True)
        if status:
            return status
        at = 0
        for address, length in runs.tolist():
            real_ctypes.memmove(address, bytes(data[at : at + length]), length)
            at += length
        if piece["is_direct"]:  # the device wrote the memory before
            scheduler.world().point()
            data = bytearray(_gathered(runs))
        piece["checksum"] = self._checksum_of(data)
        return 0

    def _checksum_of(self, data: bytes | bytearray) -> int:
        memory = np.frombuffer(data, np.uint8)
        address = memory.__array_interface__["data"][0]
        return int(self._checksum(np.array([(address, len(data))], self._real.IOVEC)))

    def _perform(
        self, fds: Any, segment_nbytes: int, at: int, nbytes: int, data: memoryview, *, is_read: bool = False
    ) -> int:
        status = self._once(fds, segment_nbytes, at, nbytes, data, is_read)
        return self._once(fds, segment_nbytes, at, nbytes, data, is_read) if status == self._real.SHORT else status

    def _once(self, fds: Any, segment_nbytes: int, at: int, nbytes: int, data: memoryview, is_read: bool) -> int:
        done = 0
        while done < nbytes:
            index, offset = divmod(at + done, segment_nbytes)
            part = data[done : done + min(nbytes - done, segment_nbytes - offset)]
            fd = int(fds[index])
            try:
                got = int(os.preadv(fd, [part], offset) if is_read else os.pwrite(fd, part, offset))
            except OSError as error:
                return error.errno or errno.EIO
            if got < len(part):
                return int(self._real.SHORT)
            done += len(part)
        return 0


def _gathered(runs: Any) -> bytes:
    return b"".join([real_ctypes.string_at(address, nbytes) for address, nbytes in runs.tolist()])


@functools.cache
def _transfers(real: Any) -> _Transfers:
    return _Transfers(real)


def _replaced_kernels(real: Any) -> Mapping[str, Any]:
    return {"kernels": functools.cache(lambda: _transfers(real).kernels())}


def _replaced_async_kernels(real: Any) -> Mapping[str, Any]:
    return {"async_kernel": lambda: _transfers(_kernels._loaded).read_async}


_kernels = _LoadedLater("kvpool.ssd.kernels", _replaced_kernels)

_ctypes = ModuleType("ctypes", real_ctypes.__doc__)
vars(_ctypes).update({name: value for name, value in vars(real_ctypes).items() if not name.startswith("__")})
vars(_ctypes)["CDLL"] = _Library

SSD_MODULES: dict[str, ModuleType] = {
    "ctypes": _ctypes,
    "kvpool.ssd.kernels": _kernels,
    "kvpool.ssd.async_kernels": _LoadedLater("kvpool.ssd.async_kernels", _replaced_async_kernels),
}
"""Replacements by name."""
