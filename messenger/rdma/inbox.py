"""Frames in fragments: slots of an inbox, fragment headers, and reassembly. No I/O.

The n-th fragment of a connection goes to slot n modulo the share, so that both sides can compute the slot; credits
ensure that it is free. The header has the fragment's number, which must be the expected one, and a credit limit for the
other direction.
"""

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from messenger.errors import ProtocolError
from messenger.frames import ACK_NBYTES, MAX_BODY_NBYTES, PREFIX, Message, ack_at, decode_body, decode_prefix

PLACE_NBYTES = 4096
_HEADER = struct.Struct("<III")
HEADER_NBYTES = _HEADER.size
ROOM_NBYTES = PLACE_NBYTES - HEADER_NBYTES
_MORE = 1 << 31
_LIMIT_ONLY = 1 << 30
_MAX_FRAME_NBYTES = PREFIX.size + MAX_BODY_NBYTES


class Fragment(NamedTuple):
    """A piece of a frame; `is_last` marks the frame's end. With `limit_only` it has no piece, only a credit limit."""

    piece: bytes | memoryview
    is_last: bool = True
    limit_only: bool = False

    def pack(self, place: memoryview, number: int, limit: int) -> int:
        """Write the fragment into the slot `place`. Returns the number of bytes used."""
        flags = (0 if self.is_last else _MORE) | (_LIMIT_ONLY if self.limit_only else 0)
        nbytes = len(self.piece)
        _HEADER.pack_into(place, 0, number % (1 << 32), limit, nbytes | flags)
        place[HEADER_NBYTES : HEADER_NBYTES + nbytes] = self.piece
        return HEADER_NBYTES + nbytes


def limit_only() -> Fragment:
    return Fragment(b"", limit_only=True)


def fragments(frame: bytes) -> deque[Fragment]:
    """Split a frame into fragments, in order."""
    if len(frame) <= ROOM_NBYTES:
        return deque((Fragment(frame),))
    view = memoryview(frame)
    return deque(
        Fragment(view[first : first + ROOM_NBYTES], is_last=first + ROOM_NBYTES >= len(view))
        for first in range(0, len(view), ROOM_NBYTES)
    )


@dataclass
class Assembly:
    """Reassembly of the fragments of one connection into frames."""

    num_fragments: int = 0
    _pieces: bytearray = field(default_factory=bytearray)

    def take(self, place: memoryview, nbytes: int) -> tuple[int, bytes | None, bool]:
        """Process the fragment in the slot `place`; `nbytes` is the length that the hardware reported.

        Returns (credit limit, the frame that it completes or None, True if it has only a limit). Raises ProtocolError
        for an unexpected fragment.
        """
        if not HEADER_NBYTES <= nbytes <= PLACE_NBYTES:
            raise ProtocolError(f"a fragment must have {HEADER_NBYTES} to {PLACE_NBYTES} bytes, got {nbytes}")
        number, limit, size = _HEADER.unpack_from(place)
        has_more, is_limit = bool(size & _MORE), bool(size & _LIMIT_ONLY)
        size &= _LIMIT_ONLY - 1
        if number != self.num_fragments % (1 << 32) or size != nbytes - HEADER_NBYTES:
            raise ProtocolError(f"expected fragment {self.num_fragments}, got number {number} of {size} bytes")
        self.num_fragments += 1
        if is_limit:
            return limit, None, True
        if not has_more and not self._pieces:
            return limit, bytes(place[HEADER_NBYTES : HEADER_NBYTES + size]), False
        self._pieces += place[HEADER_NBYTES : HEADER_NBYTES + size]
        if len(self._pieces) > _MAX_FRAME_NBYTES:
            raise ProtocolError(f"a frame has more than {_MAX_FRAME_NBYTES} bytes")
        if has_more:
            return limit, None, False
        frame = bytes(self._pieces)
        self._pieces.clear()
        return limit, frame, False


def decoded(frame: bytes) -> Message:
    """Decode a whole frame. Raises ProtocolError."""
    ack = ack_at(frame, 0, len(frame))
    if ack is not None and len(frame) == ACK_NBYTES:
        return ack
    kind, length = decode_prefix(frame[: PREFIX.size])
    if length != len(frame) - PREFIX.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes announces a body of {length} bytes")
    return decode_body(kind, memoryview(frame)[PREFIX.size :])
