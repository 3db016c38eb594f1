"""A node's log on disk: appended line by line, bounded in size."""

import errno
from pathlib import Path
from typing import BinaryIO


class LogFile:
    """Holds at most two files of `limit_nbytes`: the current one, and PATH.1 before it."""

    def __init__(self, path: Path, *, limit_nbytes: int = 32 << 20) -> None:
        self.path = path
        self._limit_nbytes = limit_nbytes
        self._file: BinaryIO = path.open("wb", buffering=0)

    def write(self, line: str) -> None:
        """Append one line; a full disk loses it, and must not stop the cluster."""
        try:
            self._file.write(line.encode(errors="replace") + b"\n")
            if self._file.tell() >= self._limit_nbytes:
                self._turn_over()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _turn_over(self) -> None:
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        successor = self.path.open("wb", buffering=0)
        self._file.close()
        self._file = successor

    def close(self) -> None:
        """Close the file; further lines are an error."""
        self._file.close()
