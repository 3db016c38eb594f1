"""Messages between the process that runs a load and those that send it: pickles with their length before them, through
pipes that only these processes hold."""

from __future__ import annotations

import pickle
import struct
from asyncio import IncompleteReadError, StreamReader
from dataclasses import dataclass
from typing import Any

from loadtest.load import Load
from loadtest.record import RequestRecord

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Job:
    """To a sender, first: its share."""

    load: Load


@dataclass(frozen=True)
class Ready:
    """From a sender: it has its share and waits for the start."""


@dataclass(frozen=True)
class Start:
    """To a sender: `at`, on time.monotonic(), is the clock's 0."""

    at: float


@dataclass(frozen=True)
class Stop:
    """To a sender: send nothing more and give up what is in flight."""


@dataclass(frozen=True)
class Progress:
    """From a sender, several times a second, also with nothing new: requests sent so far and those ended since."""

    sent: int
    ended: tuple[RequestRecord, ...]


@dataclass(frozen=True)
class Done:
    """From a sender, last: how many records it has given."""

    records: int


def frame(message: object) -> bytes:
    """A message's bytes."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: StreamReader) -> Any | None:
    """The next message; None at the end of the stream, in the middle of a message too."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (IncompleteReadError, ConnectionError):
        return None
