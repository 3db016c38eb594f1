"""Corruption of a disk's files."""

import random
from pathlib import Path

from tools.chaos.disks import HostDisk


def test_one_bit_is_flipped_per_place_and_empty_files_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    (folder / "ssd" / "pool-0").mkdir(parents=True)
    for name, size in (("segment", 4096), ("journal", 0)):
        (folder / "ssd" / "pool-0" / name).write_bytes(bytes(size))
    (folder / "other").write_bytes(bytes(100))
    assert HostDisk(folder).corrupt("ssd", random.Random(1), 1) == 1
    content = (folder / "ssd" / "pool-0" / "segment").read_bytes()
    assert sum(byte.bit_count() for byte in content) == 1
    assert (folder / "other").read_bytes() == bytes(100)


def test_a_file_that_was_emptied_meanwhile_is_skipped(tmp_path: Path) -> None:
    class Truncating(random.Random):
        """Empties the chosen file before its size is read."""

        def choice(self, files: list[Path]) -> Path:  # type: ignore[override]
            files[0].write_bytes(b"")
            return files[0]

    folder = tmp_path / "disk"
    (folder / "ssd").mkdir(parents=True)
    (folder / "ssd" / "journal").write_bytes(b"abc")
    assert HostDisk(folder).corrupt("ssd", Truncating(1), 3) == 0
