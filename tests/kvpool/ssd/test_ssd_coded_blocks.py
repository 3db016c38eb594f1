"""Coded blocks in an SSD store: shorter extents, found again, verified, and marked by the folder's version."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import SsdCorrupt, SsdRefused
from kvpool.ssd import SsdEntry, SsdRead, SsdStore, SsdWrite

Open = Callable[..., SsdStore]
PAGE = 4096
LENGTH = 2 * PAGE - 100


@pytest.fixture
def long_blocks(blocks_of: Any) -> Any:
    """Blocks of 4 pages, whose coded forms take 2."""
    return blocks_of(4 * PAGE)


def coded_data(number: int) -> Any:
    data = np.zeros(2 * PAGE, np.uint8)
    data[:LENGTH] = np.random.default_rng(number).integers(0, 256, LENGTH, dtype=np.uint8)
    return data


def coded_entry(blocks: Any, number: int, page: int) -> SsdEntry:
    return replace(blocks.entry(number, page), coded_nbytes=LENGTH)


def write(store: SsdStore, blocks: Any, number: int, page: int) -> Any:
    return store.write([SsdWrite(coded_entry(blocks, number, page), [coded_data(number)])])


def read(store: SsdStore, blocks: Any, number: int, page: int) -> Any:
    target = np.zeros(2 * PAGE, np.uint8)
    entry = blocks.entry(number, page)
    (error,) = store.read([SsdRead(entry.offset, entry.kv_namespace, entry.chain_key, [target])])
    assert error is not None or np.array_equal(target, coded_data(number))
    return error


def version(folder: Path) -> int:
    found: int = struct.unpack_from("<I", (folder / "journal").read_bytes(), 8)[0]
    return found


def test_coded_and_plain_blocks_are_found_again_by_stores_of_either_setting(
    open_store: Open, long_blocks: Any, ssd_path: Path
) -> None:
    store = open_store(coded=True)
    assert write(store, long_blocks, 1, 0) == [None]
    assert long_blocks.write(store, {2: 2}) == [None]  # where the plain block 1 would have ended at 4
    assert (store.coded_nbytes(0), store.coded_nbytes(2 * PAGE), store.coded_nbytes(9 * PAGE)) == (LENGTH, 0, 0)
    assert store.close()
    for coded in (False, True):
        store = open_store(coded=coded)
        assert store.recovered == [coded_entry(long_blocks, 1, 0), long_blocks.entry(2, 2)]
        assert read(store, long_blocks, 1, 0) is None
        assert long_blocks.read(store, 2, 2) is None
        assert store.close()


def test_only_folders_that_may_have_coded_blocks_have_the_version_that_older_releases_reject(
    open_store: Open, long_blocks: Any, ssd_path: Path
) -> None:
    store = open_store()
    assert long_blocks.write(store, {2: 2}) == [None]
    assert store.close()
    assert version(ssd_path) == 1
    store = open_store(coded=True)
    assert version(ssd_path) == 2
    assert write(store, long_blocks, 1, 8) == [None]
    assert store.close()
    store = open_store()
    assert version(ssd_path) == 2
    store.free([8 * PAGE])
    assert store.close()
    assert open_store().close()
    assert version(ssd_path) == 1


def test_a_store_for_plain_blocks_refuses_coded_ones(open_store: Open, long_blocks: Any) -> None:
    (error,) = write(open_store(), long_blocks, 1, 0)
    assert isinstance(error, SsdRefused)
    assert "is coded, but the store was opened for plain ones" in str(error)


def test_arrays_must_fit_the_form_in_which_a_block_is_stored(open_store: Open, long_blocks: Any) -> None:
    store = open_store(coded=True)
    (error,) = store.write([SsdWrite(coded_entry(long_blocks, 1, 0), [np.zeros(4 * PAGE, np.uint8)])])
    assert "expected contiguous uint8 [8192]" in str(error)
    assert write(store, long_blocks, 1, 0) == [None]
    assert "expected contiguous uint8 [8192]" in str(long_blocks.read(store, 1, 0))


@pytest.mark.parametrize("at", [0, PAGE + 7, LENGTH - 1])
def test_a_flipped_bit_or_lost_page_of_a_coded_block_is_corrupt(
    open_store: Open, long_blocks: Any, ssd_path: Path, at: int
) -> None:
    store = open_store(coded=True)
    assert write(store, long_blocks, 1, 4) == [None]
    path = ssd_path / "segment-00000"
    data = bytearray(path.read_bytes())
    data[4 * PAGE + at] ^= 1
    path.write_bytes(data)
    assert isinstance(read(store, long_blocks, 1, 4), SsdCorrupt)
    data[4 * PAGE + at] ^= 1
    data[5 * PAGE : 6 * PAGE] = bytes(PAGE)  # a torn write
    path.write_bytes(data)
    assert isinstance(read(store, long_blocks, 1, 4), SsdCorrupt)
