"""The trace that comes with the project: Mooncake's conversation trace (data/NOTICE says whose it is)."""

from __future__ import annotations

import hashlib
import io
import lzma
from importlib import resources
from pathlib import Path

from traces.errors import BundledTraceDamaged
from traces.reader import read_stream, read_trace
from traces.row import Trace

CONVERSATION = "conversation"
CONVERSATION_SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
_FILE = "conversation_trace.jsonl.xz"


def load_trace(name_or_path: str) -> Trace:
    """The bundled trace for the word `conversation`, else the file of that path. Raises TraceError."""
    return load_conversation() if name_or_path == CONVERSATION else read_trace(Path(name_or_path))


def load_conversation() -> Trace:
    """The bundled conversation trace, its bytes checked. Raises BundledTraceDamaged."""
    packed = resources.files("traces").joinpath("data", _FILE).read_bytes()
    return conversation_from(packed)


def conversation_from(packed: bytes) -> Trace:
    """The conversation trace from its xz bytes. Raises BundledTraceDamaged unless they hold exactly that trace."""
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
