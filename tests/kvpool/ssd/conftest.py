"""Common parts of the SSD store's tests: blocks whose bytes follow from their number, a folder on a disk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec
from kvpool.errors import SsdError
from kvpool.ssd import SsdConfig, SsdEntry, SsdRead, SsdStore, SsdWrite
from kvpool.ssd.disk import Disk

PAGE = 4096
NAMESPACE = b"namespace".ljust(16, b"\0")


def spec_of(*group_nbytes: int) -> KvSpec:
    """A spec whose groups' slots take so many bytes, multiples of 8."""
    groups = [
        KvGroup("full", 0, (g,), kv_heads=1, head_dim=nbytes // 8, dtype="uint8")
        for g, nbytes in enumerate(group_nbytes)
    ]
    return KvSpec(tuple(groups), 4)


@dataclass(frozen=True)
class Blocks:
    """Blocks by number: the number gives address and bytes."""

    spec: KvSpec

    def data(self, number: int) -> list[Any]:
        rng = np.random.default_rng([number, self.spec.block_nbytes])
        return [rng.integers(0, 256, self.spec.slot_nbytes(g), dtype=np.uint8) for g in range(self.spec.num_groups)]

    def entry(self, number: int, page: int) -> SsdEntry:
        key = number.to_bytes(16, "big")
        digests = tuple(number.to_bytes(8, "little") for _ in self.spec.groups)
        return SsdEntry(page * PAGE, NAMESPACE, key, bytes(16), self.spec, number % 3, digests, number / 4)

    def write(self, store: SsdStore, pages: Mapping[int, int]) -> list[SsdError | None]:
        """Write blocks, number to page; the results in the same order."""
        return store.write([SsdWrite(self.entry(number, page), self.data(number)) for number, page in pages.items()])

    def read(self, store: SsdStore, number: int, page: int) -> SsdError | None:
        """Read one block; it must be right if there is no error."""
        targets = [np.zeros(self.spec.slot_nbytes(g), np.uint8) for g in range(self.spec.num_groups)]
        (error,) = store.read([SsdRead(page * PAGE, NAMESPACE, number.to_bytes(16, "big"), targets)])
        if error is None:
            self.check(number, targets)
        return error

    def check(self, number: int, targets: Sequence[Any]) -> None:
        for got, expected in zip(targets, self.data(number), strict=True):
            assert np.array_equal(got, expected), f"block {number} is wrong"

    def pages(self, store: SsdStore) -> dict[int, int]:
        """The blocks that the store recovered, number to page. Each must be as it was written."""
        found = {}
        for entry in store.recovered:
            number, page = int.from_bytes(entry.chain_key, "big"), entry.offset // PAGE
            assert entry == self.entry(number, page)
            found[number] = page
        assert len(found) == len(store.recovered)
        return found


class UnsyncedDisk(Disk):
    """For tests that crash nothing: what was written is found again without any sync."""

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


@pytest.fixture
def blocks() -> Blocks:
    """Blocks of one page, of two groups that are no multiple of a page."""
    return Blocks(spec_of(2048, 1200))


@pytest.fixture(scope="session")
def blocks_of() -> Callable[..., Blocks]:
    """`blocks_of(bytes of group 0, ...)`"""
    return lambda *group_nbytes: Blocks(spec_of(*group_nbytes))


@pytest.fixture
def ssd_path(ssd_dir: Path) -> Path:
    """A folder for one store."""
    return ssd_dir


@pytest.fixture
def unsynced_disk() -> Disk:
    return UnsyncedDisk()


@pytest.fixture
def open_store(ssd_path: Path) -> Iterator[Callable[..., SsdStore]]:
    """Open stores of 64 pages in segments of 16; those still open at the end are closed."""
    opened: list[SsdStore] = []

    def start(path: Path | None = None, disk: Disk | None = None, **fields: Any) -> SsdStore:
        fields = {"nbytes": 64 * PAGE, "segment_nbytes": 16 * PAGE, "min_journal_nbytes": 1 << 16, **fields}
        config = SsdConfig(path or ssd_path, owner_id=fields.pop("owner_id", "node"), **fields)
        opened.append(SsdStore.open(config, disk or UnsyncedDisk()))
        return opened[-1]

    yield start
    for store in opened:
        assert store.close()
