"""A small file system per host on a loop device, for the pool node's SSD folder and the conductor's files."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

from tools.soak.namespaces import run_tool

DISK_NBYTES = 192 << 20
_BALLAST = "ballast"
SSD = "ssd"


class HostDisk:
    """One host's disk at `folder`; `missing` is the reason why it is a plain folder, "" if it is a file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing = ""
        self._image = folder.with_suffix(".img")

    def open(self) -> None:
        """Create and mount the file system."""
        self.folder.mkdir()
        try:
            with self._image.open("wb") as image:
                image.truncate(DISK_NBYTES)
            run_tool("mkfs.ext4", "-q", "-m", "0", str(self._image))
            run_tool("mount", "-o", "loop", str(self._image), str(self.folder))
        except OSError as error:
            self.missing = f"no file system can be mounted: {error}"
        for below in (SSD, "state", "decisions"):
            (self.folder / below).mkdir()

    def close(self) -> None:
        """Unmount and remove it."""
        if not self.missing:
            run_tool("umount", "-l", str(self.folder), check=False)
        self._image.unlink(missing_ok=True)

    def fill(self) -> None:
        """Leave no room."""
        if self.missing:
            raise OSError(self.missing)
        fd = os.open(self.folder / _BALLAST, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            end, step = 0, 8 << 20
            while step >= 4096:
                try:
                    os.posix_fallocate(fd, end, step)
                    end += step
                except OSError:
                    step //= 2
        finally:
            os.close(fd)

    def free(self) -> None:
        """Remove what `fill` wrote."""
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def corrupt(self, below: str, rng: random.Random, num_flips: int) -> int:
        """Flip bits at random places of the files in a subfolder. Returns the number of flipped bits."""
        files = [path for path in sorted((self.folder / below).rglob("*")) if path.is_file() and path.stat().st_size]
        flipped = 0
        for _ in range(num_flips if files else 0):
            with contextlib.suppress(OSError), rng.choice(files).open("r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if not size:
                    continue  # a journal that has just begun
                at = rng.randrange(size)
                old = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([old[0] ^ 1 << rng.randrange(8)]), at)
                os.fsync(file.fileno())
                flipped += 1
        return flipped
