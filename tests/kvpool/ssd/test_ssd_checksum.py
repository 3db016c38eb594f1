"""The checksum in the journal is made of XXH64, as the kernels' module says, so that any tool can check a folder."""

from pathlib import Path

import numpy as np
import pytest

from kvpool.ssd.disk import Disk, IoBatch, IoThreads

MIB = 1 << 20
# By the xxhash library, seed 0, of bytes 0, 1, ... 250, 0, 1, ... of this length with zeros up to whole pages; beyond
# one MiB of the sums of each MiB, with zeros up to 32 bytes.
SUMS = {
    1: 0xAC869B6F32D8BBDB,
    4096: 0x122A8C8D994AD3EC,
    5000: 0x8D541C76E85CEF2E,
    1048576: 0x89AC0399C4464A31,
    1048577: 0x5FD76AE1CA31281E,
    5251880: 0x25D24498EA6DF630,
}


@pytest.mark.parametrize(("nbytes", "expected"), SUMS.items())
def test_the_checksum_is_xxh64_however_its_memory_is_cut(ssd_path: Path, nbytes: int, expected: int) -> None:
    data = (np.arange(nbytes) % 251).astype(np.uint8)
    disk, threads = Disk(), IoThreads(2, "ssd-test")
    fds = np.array([disk.open(ssd_path / "file", create=True)], np.int32)
    start = data.ctypes.data
    for cut in (nbytes, nbytes // 3):
        memory = [(start, cut), (start + cut, nbytes - cut)] if cut < nbytes else [(start, nbytes)]
        for write in (True, False):
            outcome = disk.start(threads, IoBatch([0], [memory], 8 * MIB), fds, write=write).finish()
            assert (outcome.status.tolist(), outcome.sums.tolist()) == ([0], [expected])
    threads.stop()
    disk.close(int(fds[0]))
