"""Errors of the package traces.

TraceError
├── TraceNotFound        the file does not exist or cannot be opened
├── TraceFormatError     a row or the container is malformed; carries the line number and the kind of problem
├── FormatUnknown        the format of a file is not recognised
├── BadSourceSettings    a setting for reading other formats is out of range; names the flag
├── TraceUnwritable      a converted trace cannot be written
├── BundledTraceDamaged  the bundled trace's bytes do not have the recorded sha256
└── EmptySelection       sampling or limiting left no request
"""

from __future__ import annotations

from typing import Literal

ProblemKind = Literal["file", "syntax", "missing", "value", "ids", "unsupported", "order", "chain"]
"""Kind of a problem in a trace.

file: the container or the file as a whole. syntax: not a record of the format. missing: a field. value: of a field.
ids: hash ids that do not fit the length. unsupported: valid, but not convertible. order: an earlier time than before.
chain: an id after another prefix than before.
"""


class TraceError(Exception):
    """Any failure to read, check or select from a trace."""


class TraceNotFound(TraceError):
    """The trace file does not exist or cannot be opened."""


class TraceFormatError(TraceError):
    """A line is not a valid row; the message names the source, the line (from 1), what was found and expected.

    `detail`: the place within the line, such as a column or a message of a conversation.
    """

    def __init__(
        self, source: str, line: int, *, found: str, expected: str, kind: ProblemKind = "value", detail: str = ""
    ) -> None:
        place = f"line {line}, {detail}" if detail else f"line {line}"
        super().__init__(f"{source}, {place}: found {found}; expected {expected}")
        self.source = source
        self.line = line
        self.found = found
        self.expected = expected
        self.kind: ProblemKind = kind
        self.detail = detail


class FormatUnknown(TraceError):
    """The format of a file is not recognised; the message names what was found and the flag that states it."""


class BadSourceSettings(TraceError):
    """A setting for reading other formats is out of range; the message names the flag."""


class TraceUnwritable(TraceError):
    """A converted trace cannot be written; the message names the file."""


class BundledTraceDamaged(TraceError):
    """The bundled trace does not have the recorded checksum."""


class EmptySelection(TraceError):
    """Sampling, --limit or --duration left no request."""
