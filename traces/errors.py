"""Errors of the package traces.

TraceError
├── TraceNotFound        the file is not there or cannot be opened
├── TraceFormatError     a row (or the container around it) is not what the format says; carries the line number
├── BundledTraceDamaged  the bundled trace's bytes do not have the recorded sha256
└── EmptySelection       sampling or limiting left no request
"""

from __future__ import annotations


class TraceError(Exception):
    """Any failure to read, check or select from a trace."""


class TraceNotFound(TraceError):
    """The trace file is not there or cannot be opened."""


class TraceFormatError(TraceError):
    """A line is not a valid row: names the source, the line (counted from 1), what was found and what was expected."""

    def __init__(self, source: str, line: int, *, found: str, expected: str) -> None:
        super().__init__(f"{source}, line {line}: found {found}; expected {expected}")
        self.source = source
        self.line = line
        self.found = found
        self.expected = expected


class BundledTraceDamaged(TraceError):
    """The bundled trace does not have the checksum it was shipped with."""


class EmptySelection(TraceError):
    """Nothing is left to replay after sampling, --limit and --duration."""
