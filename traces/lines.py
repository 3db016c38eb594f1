"""Lines of a trace file, plain or compressed.

The container (plain, xz, zstd, gzip) is detected by its first bytes, not by the file name.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

import zstandard

from traces.errors import TraceFormatError

_MAGIC: Final = {b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst", b"\x1f\x8b": "gz"}
_MAX_LINE_BYTES = 16 << 20


def numbered_lines(raw: IO[bytes], source: str) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their numbers from 1; a damaged container is reported with the current line."""
    line = 0
    stream = decompressed(raw)
    while True:
        line += 1
        with damage_at(source, line):
            text = stream.readline(_MAX_LINE_BYTES + 1)
        if not text:
            return
        if len(text) > _MAX_LINE_BYTES:
            raise TraceFormatError(
                source, line, found=f"a line of over {_MAX_LINE_BYTES} bytes", expected="one row per line", kind="file"
            )
        if text.strip():
            yield line, text


def decompressed(raw: IO[bytes]) -> IO[bytes] | io.BufferedIOBase:
    """Return the contents of a seekable stream, which the caller closes."""
    raw.seek(0)
    head = raw.read(6)
    raw.seek(0)
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "plain")
    if kind == "xz":
        return lzma.LZMAFile(raw)
    if kind == "gz":
        return gzip.GzipFile(fileobj=raw)
    if kind == "zst":
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        return io.BufferedReader(reader)
    return raw


@contextmanager
def damage_at(source: str, line: int) -> Iterator[None]:
    """Raise TraceFormatError with `line` if the container turns out to be damaged in the block."""
    try:
        yield
    except (lzma.LZMAError, zstandard.ZstdError, zlib.error, EOFError, OSError) as error:
        raise TraceFormatError(
            source,
            line,
            found=f"a damaged or truncated file ({error})",
            expected="a complete compressed file",
            kind="file",
        ) from error
