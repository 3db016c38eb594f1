"""Reader of Mooncake's JSONL traces, plain or compressed, with a check of every row; includes the bundled trace.

The bundled trace is Mooncake's conversation trace (license: data/NOTICE).
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Final

from traces.errors import BundledTraceDamaged, ProblemKind, TraceFormatError, TraceNotFound
from traces.fields import is_integer, shown
from traces.lines import numbered_lines
from traces.row import BLOCK_TOKENS, Trace, TraceRow

_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")


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
    chain = IdChain()
    previous_ms = 0
    for line, text in numbered_lines(raw, source):
        row = parse_row(text, index=len(rows), source=source, line=line, block_tokens=block_tokens)
        if row.timestamp_ms < previous_ms:
            order.append(line)
        previous_ms = max(previous_ms, row.timestamp_ms)
        unchained += not chain.follow(row.hash_ids)
        rows.append(row)
    if not rows:
        raise TraceFormatError(source, 1, found="no row", expected="at least one JSON object", kind="file")
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
    """Parse one line of a trace; other fields than a row's are ignored. Raises TraceFormatError with `line`."""

    def bad(found: str, expected: str, kind: ProblemKind = "value") -> TraceFormatError:
        return TraceFormatError(source, line, found=found, expected=expected, kind=kind)

    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(f"{shown(text)} ({error})", "one JSON object per line", "syntax") from error
    if not isinstance(row, dict):
        raise bad(shown(row), "a JSON object", "syntax")
    for name in _FIELDS:
        if name not in row:
            raise bad(f"no {name!r} among {shown(sorted(row))}", f"the fields {', '.join(_FIELDS)}", "missing")
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        if not is_integer(row[name]) or row[name] < least:
            raise bad(f"{name} {shown(row[name])}", f"an integer, at least {least}")
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(is_integer(i) and i >= 0 for i in ids):
        raise bad(f"hash_ids {shown(ids)}", "a list of non-negative integers")
    blocks = -(-row["input_length"] // block_tokens)
    if len(ids) != blocks:
        raise bad(
            f"{len(ids)} hash_ids for an input_length of {row['input_length']}",
            f"{blocks}: one id per {block_tokens} tokens, the last may be partial",
            "ids",
        )
    if len(set(ids)) != len(ids):
        raise bad(f"hash_ids with a repeated id: {shown(ids)}", "ids of chained hashes, different within a row", "ids")
    session = row.get("session", "")
    if not isinstance(session, str):
        raise bad(f"session {shown(session)}", "the name of a session, or no such field")
    return TraceRow(index, row["timestamp"], row["input_length"], row["output_length"], tuple(ids), session)


class IdChain:
    """Predecessor and position of every id seen, to find ids that are not those of chained hashes."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def follow(self, ids: tuple[int, ...]) -> bool:
        """Record a row's ids; return True if each follows the same predecessor as before."""
        chained, parent = True, -1
        for position, block_id in enumerate(ids):
            chained &= self._seen.setdefault(block_id, (position, parent)) == (position, parent)
            parent = block_id
        return chained


CONVERSATION = "conversation"
CONVERSATION_SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
_FILE = "conversation_trace.jsonl.xz"


def load_trace(name_or_path: str) -> Trace:
    """Load the bundled trace for the name `conversation`, otherwise the file of that path. Raises TraceError."""
    return load_conversation() if name_or_path == CONVERSATION else read_trace(Path(name_or_path))


def bundled_file() -> Traversable:
    """Return the file of the bundled conversation trace."""
    return resources.files("traces").joinpath("data", _FILE)


def load_conversation() -> Trace:
    """Load the bundled conversation trace after checking its bytes. Raises BundledTraceDamaged."""
    return conversation_from(bundled_file().read_bytes())


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
