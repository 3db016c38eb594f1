"""Writer of traces in the replayer's own format, Mooncake's JSONL, plain or compressed."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import zstandard

from traces.errors import EmptySelection, TraceUnwritable
from traces.row import TraceRow


def write_trace(rows: Iterable[TraceRow], path: Path, *, overwrite: bool = False) -> int:
    """Write rows that are in order of time, the first one at 0 ms; return their number.

    The suffix (.xz, .zst, .gz) determines the container. The file appears when it is complete: after any failure,
    what was there before is unchanged. Raises TraceUnwritable, EmptySelection if there is no row, and errors of `rows`.
    """
    if path.exists() and not path.is_file():
        raise TraceUnwritable(f"cannot write {path}: it is not a regular file; choose another name")
    if path.exists() and not overwrite:
        raise TraceUnwritable(f"{path} exists; choose another name, or give --overwrite to replace it")
    count, first_ms = 0, 0
    with _replaced(path) as file:
        for row in rows:
            first_ms = row.timestamp_ms if count == 0 else first_ms
            with _unwritable(path):
                file.write(row_line(row, first_ms))
            count += 1
        if not count:
            raise EmptySelection(f"there is no request to write to {path}")
    return count


def row_line(row: TraceRow, first_ms: int = 0) -> bytes:
    """Return a row as a line, with the time since `first_ms`."""
    fields = {
        "timestamp": row.timestamp_ms - first_ms,
        "input_length": row.input_length,
        "output_length": row.output_length,
        "hash_ids": row.hash_ids,
    }
    if row.session:
        fields["session"] = row.session
    return json.dumps(fields).encode() + b"\n"


@contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes] | io.BufferedIOBase]:
    """Yield a temporary file in the same folder, which replaces `path` after the block and is removed if it fails."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with _unwritable(path):
        raw = partial.open("xb")
    try:
        file = _compressed(raw, path.suffix)
        yield file
        with _unwritable(path):
            if file is not raw:
                file.close()  # which writes the container's end
            raw.flush()
            os.fsync(raw.fileno())
            raw.close()
            partial.replace(path)
    except BaseException:
        with suppress(OSError):  # what is still buffered
            raw.close()
        partial.unlink(missing_ok=True)
        raise


def _compressed(raw: IO[bytes], suffix: str) -> IO[bytes] | io.BufferedIOBase:
    if suffix == ".xz":
        return lzma.LZMAFile(raw, "w")
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="wb", mtime=0)
    if suffix == ".zst":
        return zstandard.ZstdCompressor().stream_writer(raw, closefd=False)
    return raw


@contextmanager
def _unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceUnwritable(f"cannot write {path}: {error.strerror or error}") from error
