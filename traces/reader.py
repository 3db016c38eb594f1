"""Reader of Mooncake's JSONL traces, plain or compressed, with a check of every row; includes the bundled trace.

The container (plain, xz, zstd, gzip) is detected by its first bytes, not by the file name. The bundled trace is
Mooncake's conversation trace (license: data/NOTICE).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import IO, Final

import zstandard

from traces.errors import BundledTraceDamaged, TraceFormatError, TraceNotFound
from traces.row import BLOCK_TOKENS, Trace, TraceRow

_MAGIC: Final = {b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst", b"\x1f\x8b": "gz"}
_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_SHOWN = 80
_MAX_LINE_BYTES = 16 << 20


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read and check a whole trace file. Raises TraceNotFound or TraceFormatError."""
    try:
        with path.open("rb") as raw:
            return read_stream(raw, source=str(path), block_tokens=block_tokens)
    except OSError as error:
        raise TraceNotFound(f"cannot open the trace {path}: {error.strerror or error}") from error


def read_stream(raw: IO[bytes], *, source: str, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read and check a trace from a seekable binary stream; `source` names it in errors."""
    rows: list[TraceRow] = []
    order: list[int] = []
    unchained = 0
    chain: dict[int, tuple[int, int]] = {}
    previous_ms = 0
    for line, text in _numbered_lines(raw, source):
        row = parse_row(text, index=len(rows), source=source, line=line, block_tokens=block_tokens)
        if row.timestamp_ms < previous_ms:
            order.append(line)
        previous_ms = max(previous_ms, row.timestamp_ms)
        unchained += not _is_chained(row.hash_ids, chain)
        rows.append(row)
    if not rows:
        raise TraceFormatError(source, 1, found="no row", expected="at least one JSON object")
    notices = []
    if order:
        notices.append(
            f"{len(order)} rows have an earlier timestamp than the row before them (first: line {order[0]}); the rows "
            "were sorted by time"
        )
        rows.sort(key=lambda row: row.timestamp_ms)
    if unchained:
        notices.append(
            f"{unchained} rows use an id with a different predecessor than earlier rows do: "
            "their reuse is counted only up to the end of the common prefix"
        )
    return Trace(source=source, rows=tuple(rows), block_tokens=block_tokens, notices=tuple(notices))


def parse_row(text: bytes, *, index: int, source: str, line: int, block_tokens: int = BLOCK_TOKENS) -> TraceRow:
    """Parse one line of a trace. Raises TraceFormatError with `line`."""

    def bad(found: str, expected: str) -> TraceFormatError:
        return TraceFormatError(source, line, found=found, expected=expected)

    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(f"{_shown(text)} ({error})", "one JSON object per line") from error
    if not isinstance(row, dict):
        raise bad(_shown(row), "a JSON object")
    for name in _FIELDS:
        if name not in row:
            raise bad(f"no {name!r} among {_shown(sorted(row))}", f"the fields {', '.join(_FIELDS)}")
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        if not _is_int(row[name]) or row[name] < least:
            raise bad(f"{name} {_shown(row[name])}", f"an integer, at least {least}")
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(_is_int(i) and i >= 0 for i in ids):
        raise bad(f"hash_ids {_shown(ids)}", "a list of non-negative integers")
    blocks = -(-row["input_length"] // block_tokens)
    if len(ids) != blocks:
        raise bad(
            f"{len(ids)} hash_ids for an input_length of {row['input_length']}",
            f"{blocks}: one id per {block_tokens} tokens, the last may be partial",
        )
    if len(set(ids)) != len(ids):
        raise bad(f"hash_ids with a repeated id: {_shown(ids)}", "ids of chained hashes, different within a row")
    return TraceRow(index, row["timestamp"], row["input_length"], row["output_length"], tuple(ids))


def _numbered_lines(raw: IO[bytes], source: str) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their numbers from 1; a damaged container is reported with the current line."""
    line = 0
    lines = iter(_decompressed(raw))
    while True:
        line += 1
        try:
            text = next(lines)
        except StopIteration:
            return
        except (lzma.LZMAError, zstandard.ZstdError, zlib.error, EOFError, OSError) as error:
            raise TraceFormatError(
                source, line, found=f"a damaged or truncated file ({error})", expected="a complete compressed file"
            ) from error
        if len(text) > _MAX_LINE_BYTES:
            raise TraceFormatError(
                source, line, found=f"a line of over {_MAX_LINE_BYTES} bytes", expected="one row per line"
            )
        if text.strip():
            yield line, text


def _decompressed(raw: IO[bytes]) -> Iterable[bytes]:
    head = raw.read(6)
    raw.seek(0)
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "plain")
    stream: IO[bytes] | io.BufferedIOBase
    if kind == "xz":
        stream = lzma.LZMAFile(raw)  # noqa: SIM115 - the caller closes `raw`
    elif kind == "gz":
        stream = gzip.GzipFile(fileobj=raw)
    elif kind == "zst":
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        stream = io.BufferedReader(reader)
    else:
        stream = raw
    return iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b"")


def _is_chained(ids: tuple[int, ...], chain: dict[int, tuple[int, int]]) -> bool:
    """Return True if every id follows the same predecessor as before; records new ids in `chain`."""
    chained, parent = True, -1
    for position, block_id in enumerate(ids):
        chained &= chain.setdefault(block_id, (position, parent)) == (position, parent)
        parent = block_id
    return chained


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


CONVERSATION = "conversation"
CONVERSATION_SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
_FILE = "conversation_trace.jsonl.xz"


def load_trace(name_or_path: str) -> Trace:
    """Load the bundled trace for the name `conversation`, otherwise the file of that path. Raises TraceError."""
    return load_conversation() if name_or_path == CONVERSATION else read_trace(Path(name_or_path))


def load_conversation() -> Trace:
    """Load the bundled conversation trace after checking its bytes. Raises BundledTraceDamaged."""
    packed = resources.files("traces").joinpath("data", _FILE).read_bytes()
    return conversation_from(packed)


def conversation_from(packed: bytes) -> Trace:
    """Parse the conversation trace from its xz bytes. Raises BundledTraceDamaged unless they are exactly that trace."""
    try:
        plain = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise BundledTraceDamaged(f"the bundled trace {_FILE} cannot be unpacked ({error}); reinstall") from error
    found = hashlib.sha256(plain).hexdigest()
    if found != CONVERSATION_SHA256:
        raise BundledTraceDamaged(
            f"the bundled trace {_FILE} has sha256 {found}, expected {CONVERSATION_SHA256}; reinstall"
        )
    return read_stream(io.BytesIO(plain), source=CONVERSATION)
