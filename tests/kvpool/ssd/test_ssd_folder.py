"""Folders that cannot be used: a clear error that says what to do, and nothing in them is changed."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvpool.errors import SsdFolderError, SsdForeign, SsdInUse
from kvpool.ssd import SsdConfig, SsdStore

Open = Callable[..., SsdStore]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.fixture
def filled(open_store: Open, blocks: Any, ssd_path: Path) -> dict[str, bytes]:
    """Return the folder's files after a store with two blocks was closed."""
    store = open_store()
    blocks.write(store, {1: 1, 2: 2})
    assert store.close()
    return contents(ssd_path)


def test_a_missing_folder_is_named(open_store: Open, ssd_path: Path) -> None:
    with pytest.raises(SsdFolderError, match=r"missing does not exist: create it"):
        open_store(ssd_path / "missing")
    assert not (ssd_path / "missing").exists()


def test_a_file_is_no_folder(open_store: Open, ssd_path: Path) -> None:
    (ssd_path / "file").touch()
    with pytest.raises(SsdFolderError, match="is not a directory"):
        open_store(ssd_path / "file")


def test_memory_is_no_disk(open_store: Open) -> None:
    with pytest.raises(SsdFolderError, match=r"/dev/shm is on tmpfs, which is in memory"):
        open_store(Path("/dev/shm"))


def test_a_folder_that_cannot_be_written_is_named(open_store: Open, ssd_path: Path) -> None:
    if os.geteuid() == 0:
        folder = Path("/proc/sys")  # where not even root may make a file
    else:
        folder = ssd_path
        folder.chmod(0o555)
    try:
        with pytest.raises(SsdFolderError, match=r"cannot be written: .*Give this user write permission"):
            open_store(folder)
    finally:
        ssd_path.chmod(0o755)


def test_a_disk_that_is_too_small_is_told_before_anything_is_made(open_store: Open, ssd_path: Path) -> None:
    free = shutil.disk_usage(ssd_path).free
    with pytest.raises(SsdFolderError, match=r"GiB free, .* GiB are needed"):
        open_store(nbytes=(free // 4096 + (1 << 18)) * 4096, segment_nbytes=1 << 30)
    assert not list(ssd_path.glob("segment-*"))


def test_a_folder_in_use_names_its_holder(open_store: Open) -> None:
    open_store()
    with pytest.raises(SsdInUse, match=rf"pid {os.getpid()}"):
        open_store()


@pytest.mark.parametrize("field", [{"owner_id": "other"}, {"cluster": "other"}])
def test_another_nodes_or_clusters_folder_is_refused_and_left_alone(
    open_store: Open, ssd_path: Path, filled: dict[str, bytes], field: dict[str, str]
) -> None:
    with pytest.raises(SsdForeign, match=r"'other'.*Nothing was changed"):
        open_store(**field)
    assert contents(ssd_path) == filled


def test_another_versions_folder_is_refused_and_left_alone(
    open_store: Open, ssd_path: Path, filled: dict[str, bytes]
) -> None:
    journal = bytearray(filled["journal"])
    struct.pack_into("<I", journal, 8, 3)
    (length,) = struct.unpack_from("<I", journal, 12)
    journal[16:32] = blake3(bytes(journal[:16] + journal[32 : 32 + length])).digest(length=16)
    (ssd_path / "journal").write_bytes(journal)
    with pytest.raises(SsdForeign, match="version 3 of the format, expected 1 or 2"):
        open_store()
    assert contents(ssd_path) == filled | {"journal": bytes(journal)}


@pytest.mark.parametrize("damage", ["flipped", "empty", "short"])
def test_a_journal_with_an_unreadable_header_is_kept_aside_and_the_store_starts_empty(
    open_store: Open, blocks: Any, ssd_path: Path, filled: dict[str, bytes], damage: str
) -> None:
    flipped = filled["journal"][:10] + b"\1" + filled["journal"][11:]
    (ssd_path / "journal").write_bytes({"flipped": flipped, "empty": b"", "short": flipped[:100]}[damage])
    kept = (ssd_path / "journal").read_bytes()
    store = open_store()
    assert store.recovered == []
    assert store.stats().recovery["unreadable_journal"] == 1
    assert (ssd_path / "journal-unreadable.1").read_bytes() == kept
    assert blocks.write(store, {3: 1}) == [None]
    assert store.close()
    assert blocks.pages(open_store()) == {3: 1}


def test_a_journal_alone_cannot_bring_back_blocks_whose_files_are_gone(
    open_store: Open, blocks: Any, ssd_path: Path
) -> None:
    store = open_store()
    blocks.write(store, {1: 1, 2: 17, 3: 40})
    assert store.close()
    (ssd_path / "segment-00000").unlink()
    os.truncate(ssd_path / "segment-00001", 4096)
    again = open_store()
    assert blocks.pages(again) == {3: 40}
    assert again.stats().recovery["missing_files"] == 2
    assert blocks.read(again, 3, 40) is None


def test_the_space_may_grow_and_shrink_between_runs(open_store: Open, blocks: Any, ssd_path: Path) -> None:
    store = open_store()
    blocks.write(store, {1: 1, 2: 60})
    assert store.close()
    larger = open_store(nbytes=100 * 4096, segment_nbytes=1 << 20)  # the folder keeps its segments' size
    assert blocks.pages(larger) == {1: 1, 2: 60}
    assert blocks.write(larger, {3: 99}) == [None]
    assert larger.close()
    smaller = open_store(nbytes=20 * 4096)
    assert blocks.pages(smaller) == {1: 1}
    assert smaller.stats().recovery["outside"] == 2
    assert sorted(path.name for path in ssd_path.glob("segment-*")) == ["segment-00000", "segment-00001"]
    assert (ssd_path / "segment-00001").stat().st_size == 4 * 4096


@pytest.mark.parametrize(
    "fields",
    [
        {"nbytes": 0},
        {"nbytes": 5000},
        {"segment_nbytes": 100},
        {"owner_id": ""},
        {"read_depth": 0},
        {"write_depth": 999},
    ],
    ids=str,
)
def test_impossible_configurations_are_refused(ssd_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(SsdFolderError, match=r"expected|needs"):
        SsdConfig(**{"dir": ssd_path, "nbytes": 4096, "owner_id": "node", **fields})


def test_what_is_on_the_ssd_can_be_read_by_its_user_alone(filled: dict[str, bytes], ssd_path: Path) -> None:
    assert filled
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in ssd_path.iterdir()} == dict.fromkeys(
        [*filled, "lock"], "0o0"
    )
