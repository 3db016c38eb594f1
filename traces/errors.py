"""Errors of the package traces.

TraceError
├── TraceNotFound        the file does not exist or cannot be opened
├── TraceFormatError     a row or the container is malformed; carries the line number
├── BundledTraceDamaged  the bundled trace's bytes do not have the recorded sha256
└── EmptySelection       sampling or limiting left no request
"""

from __future__ import annotations


class TraceError(Exception):
    """Any failure to read, check or select from a trace."""


class TraceNotFound(TraceError):
    """The trace file does not exist or cannot be opened."""


class TraceFormatError(TraceError):
    """A line is not a valid row; the message names the source, the line (from 1), what was found and expected."""

    def __init__(self, source: str, line: int, *, found: str, expected: str) -> None:
        super().__init__(f"{source}, line {line}: found {found}; expected {expected}")
        self.source = source
        self.line = line
        self.found = found
        self.expected = expected


class BundledTraceDamaged(TraceError):
    """The bundled trace does not have the recorded checksum."""


class EmptySelection(TraceError):
    """Sampling, --limit or --duration left no request."""
