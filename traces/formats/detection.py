"""Detection of a trace's format by its beginning."""

from __future__ import annotations

from typing import IO

from traces.errors import FormatUnknown, TraceFormatError
from traces.fields import RecordPlace, json_fields, shown
from traces.formats.azure import AzureFormat
from traces.formats.burstgpt import BurstGptFormat
from traces.formats.csv_rows import csv_cells
from traces.formats.sharegpt import ShareGptFormat
from traces.formats.weka import WekaFormat
from traces.lines import damage_at, decompressed, numbered_lines

_HEAD_BYTES = 1 << 16
_WEKA = b'"hash_id_scope"'
_MOONCAKE = {"timestamp", "input_length", "output_length", "hash_ids"}
_BAILIAN = {"chat_id", "parent_chat_id", "hash_ids"}
_AIPERF = {"session_id", "delay", "turns", "text", "texts", "text_input", "messages", "payload", "input_length"}


def detect_format(raw: IO[bytes], source: str) -> str:
    """Return the name of a seekable stream's format. Raises FormatUnknown, or TraceFormatError if it is damaged."""
    stream = decompressed(raw)
    with damage_at(source, 1):
        head = stream.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        return ShareGptFormat.name
    if head.startswith(b"{") and _WEKA in head:
        return WekaFormat.name
    line, text = next(numbered_lines(raw, source), (0, b""))
    if not text:
        raise TraceFormatError(source, 1, found="an empty file", expected="at least one request", kind="file")
    found = _of_object(text, source, line) if head.startswith(b"{") else _of_header(text, source, line)
    if found is None:
        raise FormatUnknown(
            f"the format of {source} is not recognised by line {line}, {shown(text)}; if it is a supported one, name "
            "it with --format"
        )
    return found


def _of_object(text: bytes, source: str, line: int) -> str | None:
    try:
        names = set(json_fields(text, RecordPlace(source, line)).values)
    except TraceFormatError:
        return None
    if names >= _BAILIAN:
        return "bailian"
    # AIPerf's lines of a session add to the conversation; lines of this format contain the whole prompt.
    if names >= _MOONCAKE and not names & {"session_id", "delay"}:
        return "mooncake"
    return "aiperf" if names & _AIPERF else None


def _of_header(text: bytes, source: str, line: int) -> str | None:
    try:
        columns = {cell.strip() for cell in csv_cells(text, RecordPlace(source, line))}
    except TraceFormatError:
        return None
    for each in (AzureFormat, BurstGptFormat):
        if columns >= set(each.required_columns):
            return each.name
    return None
