"""A line of the log's files: compact JSON. Nothing else."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["json_line"]

_encode = json.JSONEncoder(separators=(",", ":")).encode  # kept: to make one takes longer than most lines


def json_line(row: Mapping[str, Any]) -> bytes:
    """With its end; whatever is not ASCII is escaped."""
    return _encode(row).encode("ascii") + b"\n"
