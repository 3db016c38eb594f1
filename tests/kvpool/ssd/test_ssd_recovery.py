"""Damaged journals and files: what is left is right, what is lost is counted, and no flipped bit is ever served."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import SsdCorrupt
from kvpool.ssd import SsdStore

Open = Callable[..., SsdStore]
PAGE = 4096


@pytest.fixture
def frames(open_store: Open, blocks: Any, ssd_path: Path) -> Path:
    """A folder as a killed process leaves it: its journal has a frame per block 1..5, and one that frees block 2."""
    live = ssd_path / "live"
    live.mkdir()
    store = open_store(live)
    for number in range(1, 6):
        assert blocks.write(store, {number: number}) == [None]
    store.free([2 * PAGE])
    assert blocks.write(store, {6: 2}) == [None]
    left = ssd_path / "left"
    shutil.copytree(live, left)
    return left


def damage(folder: Path, page: int, nbytes: int = 512) -> None:
    with (folder / "journal").open("r+b") as file:
        file.seek(page * PAGE)
        file.write(b"\xa5" * nbytes)


def test_a_torn_end_never_happened(open_store: Open, blocks: Any, frames: Path) -> None:
    damage(frames, 7)
    store = open_store(frames)
    assert blocks.pages(store) == {1: 1, 3: 3, 4: 4, 5: 5}
    assert store.stats().recovery["torn_end"] == 1
    assert store.stats().recovery["lost_frames"] == 0


def test_a_broken_frame_in_the_middle_loses_its_blocks_and_no_other(
    open_store: Open, blocks: Any, frames: Path
) -> None:
    damage(frames, 3)
    store = open_store(frames)
    assert blocks.pages(store) == {1: 1, 4: 4, 5: 5, 6: 2}
    assert store.stats().recovery["lost_frames"] == 1


def test_a_lost_free_brings_back_nothing_that_was_written_over(open_store: Open, blocks: Any, frames: Path) -> None:
    damage(frames, 6)  # frees block 2
    store = open_store(frames)
    assert blocks.pages(store) == {1: 1, 3: 3, 4: 4, 5: 5, 6: 2}
    assert store.stats().recovery["superseded"] == 1
    assert all(blocks.read(store, number, page) is None for number, page in blocks.pages(store).items())


def test_a_freed_block_that_a_damaged_journal_brings_back_is_served_only_if_it_is_whole(
    open_store: Open, blocks: Any, frames: Path
) -> None:
    damage(frames, 6)
    damage(frames, 7)
    store = open_store(frames)
    assert blocks.pages(store)[2] == 2
    assert isinstance(blocks.read(store, 2, 2), SsdCorrupt)  # block 6 lies there


def test_leftovers_of_a_rewrite_are_ignored(open_store: Open, blocks: Any, frames: Path) -> None:
    (frames / "journal.new").write_bytes(b"half a journal" * 1000)
    (frames / "notes.txt").write_text("not ours")
    store = open_store(frames)
    assert blocks.pages(store) == {1: 1, 3: 3, 4: 4, 5: 5, 6: 2}
    assert (frames / "notes.txt").read_text() == "not ours"
    assert not (frames / "journal.new").exists()


def test_no_flipped_bit_of_the_journal_loses_more_than_its_frame_or_makes_a_block_wrong(
    open_store: Open, blocks: Any, frames: Path, ssd_path: Path
) -> None:
    expected = {1: 1, 3: 3, 4: 4, 5: 5, 6: 2}
    journal = (frames / "journal").read_bytes()[: 8 * PAGE]
    rng = np.random.default_rng(4)
    for turn in range(48):
        bit = (
            int(rng.integers(len(journal) * 8))
            if turn % 3
            else int(rng.integers(8)) * PAGE * 8 + int(rng.integers(1600))
        )
        flipped = bytearray(journal)
        flipped[bit // 8] ^= 1 << bit % 8
        folder = ssd_path / "flipped"
        shutil.copytree(frames, folder, dirs_exist_ok=True)
        (folder / "journal").write_bytes(flipped)
        store = open_store(folder)
        found, recovery = blocks.pages(store), store.stats().recovery
        page = bit // 8 // PAGE
        if recovery.get("unreadable_journal"):
            assert (page, found) == (0, {})
        elif recovery["lost_frames"] or recovery["torn_end"]:
            lost = {1: {1}, 3: {3}, 4: {4}, 5: {5}, 7: {6}}.get(page, set())
            assert found == {number: at for number, at in expected.items() if number not in lost}
        else:  # in the zeros behind a header or frame, which say nothing
            assert flipped[: bit // 8] == journal[: bit // 8]
            assert journal[bit // 8] == 0
            assert found == expected
        assert all(blocks.read(store, number, at) is None for number, at in found.items())
        assert store.close()


def test_no_flipped_bit_of_a_block_is_served(open_store: Open, blocks_of: Any, ssd_path: Path) -> None:
    blocks = blocks_of(9000, 8)
    store = open_store()
    blocks.write(store, {1: 1, 2: 14})  # the second lies in two segments
    rng = np.random.default_rng(5)
    for number, first in ((1, 1), (2, 14)):
        for _ in range(20):
            byte, mask = first * PAGE + int(rng.integers(3 * PAGE)), 1 << int(rng.integers(8))
            flip(ssd_path, byte, mask)
            assert isinstance(blocks.read(store, number, first), SsdCorrupt)
            flip(ssd_path, byte, mask)
            assert blocks.read(store, number, first) is None


def flip(folder: Path, byte: int, mask: int) -> None:
    with (folder / f"segment-{byte // (16 * PAGE):05}").open("r+b") as file:
        file.seek(byte % (16 * PAGE))
        (value,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([value ^ mask]))
