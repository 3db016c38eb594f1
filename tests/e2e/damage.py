"""Damage to the memory of running processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

_APART_NBYTES = 256
_MOST_NBYTES = 64 << 20


@contextlib.contextmanager
def memory_of(pid: int, name: str) -> Iterator[tuple[BinaryIO, range]]:
    """A running process's memory, and the addresses in it of what it shares as `name`. Nobody else may map that for
    writing; damage comes from within."""
    spans = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if f"memfd:{name}" in line and "w" in line.split()[1]
    ]
    assert spans, f"process {pid} has no memory called {name}"
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        yield memory, range(spans[0][0], spans[-1][1])


def flip_a_bit_per(step_nbytes: int, pool_pid: int) -> None:
    """Flip a bit at every `step_nbytes` of all of a pool node's memory, except in bytes that are zero."""
    with memory_of(pool_pid, "moonpool-arena") as (memory, arena):
        for at in range(arena.start, arena.stop, step_nbytes):
            memory.seek(at)
            byte = memory.read(1)
            if byte != b"\0":
                memory.seek(at)
                memory.write(bytes([byte[0] ^ 16]))


def flip_bits(pool_pid: int) -> None:
    """Flip a bit in each 256 bytes of a pool node's blocks, as far as they are not zero."""
    with memory_of(pool_pid, "moonpool-arena") as (memory, arena):
        memory.seek(arena.start)
        stored = np.frombuffer(memory.read(min(len(arena), _MOST_NBYTES)), dtype=np.uint8)
        used = np.flatnonzero(stored)
        for at in used[np.unique(used // _APART_NBYTES, return_index=True)[1]].tolist():
            memory.seek(arena.start + at)
            memory.write(bytes([stored[at] ^ 1]))
