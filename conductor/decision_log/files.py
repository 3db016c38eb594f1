"""Log files of JSON lines in a folder: rotated by size, compressed when closed, the oldest removed.

A file is named STEM-NUMBER.jsonl, with increasing numbers that are never reused; a closed file becomes
STEM-NUMBER.jsonl.zst. Lines are written in batches and not synced to disk: they survive a killed process, but a power
failure may lose the last seconds.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import zstandard

_encode = json.JSONEncoder(separators=(",", ":")).encode  # creating an encoder takes longer than encoding most lines


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return compact JSON as one ASCII line, including the newline."""
    return _encode(row).encode("ascii") + b"\n"


_NAME = re.compile(r"-(\d{6,})\.jsonl(\.zst)?")
_PIECE = 1 << 20
_PACKED_PIECE = 1 << 16
_LONGEST_LINE = 64 << 20


class LinesLost(OSError):
    """This many lines could not be written; earlier lines are intact. `__cause__` is the reason."""

    def __init__(self, count: int, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause))
        self.count = count


class LineFiles:
    """Files of one stem with a single writer. `max_files` closed files are kept in addition to the open one."""

    def __init__(
        self, folder: Path, stem: str, max_bytes: int, max_files: int, head: Callable[[], bytes] | None = None
    ) -> None:
        """`head()` returns each file's first line. A file is created when its first line is written."""
        self._folder = folder
        self._stem = stem
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._head = head
        self._fd = -1
        self._path: Path | None = None
        self._nbytes = 0

    def write(self, lines: list[bytes]) -> None:
        """Append lines that end with a newline. Raises LinesLost; later calls may succeed."""
        batch: list[bytes] = []
        nbytes = done = waiting = 0
        try:
            for line in lines:
                is_full = self._nbytes + nbytes + len(line) > self._max_bytes
                if self._fd < 0 or (is_full and self._nbytes + nbytes > 0):
                    self._append(b"".join(batch))
                    done, waiting = done + waiting, 0
                    self.turn_over()
                    batch = [] if self._head is None else [self._head()]
                    nbytes = sum(map(len, batch))
                batch.append(line)
                nbytes, waiting = nbytes + len(line), waiting + 1
            self._append(b"".join(batch))
        except OSError as error:
            raise LinesLost(len(lines) - done, error) from error

    def turn_over(self) -> None:
        """Close the file and open the next; compress closed files and remove the oldest. Raises OSError."""
        self.close()
        self.tidy()
        numbers = numbered(self._folder, self._stem)
        self._path = self._folder / f"{self._stem}-{max(numbers, default=0) + 1:06}.jsonl"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._nbytes = 0

    def tidy(self) -> None:
        """Compress closed files and remove the oldest. Files that cannot be compressed are left uncompressed."""
        kept = numbered(self._folder, self._stem)
        for number in sorted(kept)[: max(0, len(kept) - self._max_files)]:
            kept.pop(number).unlink(missing_ok=True)
        for path in kept.values():
            if path.suffix == ".jsonl" and path != self._path:
                with contextlib.suppress(OSError):
                    _compress(path)

    def close(self) -> None:
        """Close the open file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            # Remove the incomplete line; only a killed process leaves one, at the end of its last file.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._nbytes)
                os.lseek(self._fd, self._nbytes, os.SEEK_SET)
            if not self._nbytes and self._path is not None:
                # Even the header is missing: remove the file, so that the next attempt creates it again.
                with contextlib.suppress(OSError):
                    self._path.unlink()
                self.close()
            raise
        self._nbytes += len(data)


def numbered(folder: Path, stem: str) -> dict[int, Path]:
    """Return the files of a stem by number; while a file is being compressed, the uncompressed one."""
    found: dict[int, Path] = {}
    for path in folder.glob(f"{stem}-*"):
        name = _NAME.fullmatch(path.name.removeprefix(stem))
        if name is not None and (int(name[1]) not in found or path.suffix == ".jsonl"):
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line without newline) of a plain or compressed file. Raises OSError.

    An incomplete last line, without newline, is left out.
    """
    with open_file(path) as pieces:
        number, rest = 0, b""
        for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                number += 1
                yield number, line
            if len(rest) > _LONGEST_LINE:
                raise OSError(0, f"line {number + 1} is longer than {_LONGEST_LINE} bytes")


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Iterator[bytes]]:
    """Open a plain or compressed file as an iterator of chunks; finds the file even if it was compressed meanwhile.

    Raises OSError, also for a damaged compressed file.
    """
    packed = path.with_name(path.name + ".zst")
    try:
        raw = path.open("rb")
    except FileNotFoundError:
        if not packed.exists():
            raise
        raw = packed.open("rb")
    with raw:
        yield _unpacked(raw) if raw.name.endswith(".zst") else iter(lambda: raw.read(_PIECE), b"")


def _unpacked(raw: IO[bytes]) -> Iterator[bytes]:
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        while packed := raw.read(_PACKED_PIECE):
            yield stream.decompress(packed)
    except zstandard.ZstdError as error:
        raise OSError(0, f"damaged: {error}") from error
    if not stream.eof:
        raise OSError(0, "damaged: its end is missing")


def _compress(path: Path) -> None:
    packed, part = path.with_name(path.name + ".zst"), path.with_name(path.name + ".part")
    try:
        with path.open("rb") as source, part.open("wb") as target:
            os.fchmod(target.fileno(), 0o600)
            zstandard.ZstdCompressor(level=3).copy_stream(source, target)
        part.replace(packed)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    path.unlink()
