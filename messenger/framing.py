"""How messages become frames, for any set of message classes; sans I/O.

A frame is a 12-byte prefix (magic, protocol version, kind, zero, body length) and a msgpack array: the message's
fields in order.
"""

import struct
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgpack

from messenger.errors import ProtocolError

__all__ = ["PREFIX", "Framing"]

PREFIX = struct.Struct("<4sBBHI")


class Framing:
    """One protocol: `kinds` are NamedTuple classes, numbered from 1 in this order."""

    def __init__(self, magic: bytes, version: int, kinds: Sequence[type[Any]], max_body_nbytes: int) -> None:
        self._magic, self._version, self._max_body_nbytes = magic, version, max_body_nbytes
        self._kinds = dict(enumerate(kinds, start=1))
        self._numbers = {kind: number for number, kind in self._kinds.items()}
        self._field_types = {kind: tuple(get_type_hints(kind).values()) for kind in kinds}

    def encode(self, message: Any) -> bytes:
        """Prefix and body."""
        body: bytes = msgpack.packb(tuple(message))
        return PREFIX.pack(self._magic, self._version, self._numbers[type(message)], 0, len(body)) + body

    def decode_prefix(self, prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
        """(kind, body length) of the frame that begins so. Raises ProtocolError, before anything is kept for it."""
        magic, version, kind, zero, length = PREFIX.unpack_from(prefix)
        if magic != self._magic:
            raise ProtocolError(f"not this protocol: a frame begins with {self._magic!r}, not {magic!r}")
        if version != self._version:
            raise ProtocolError(f"protocol version {version} where this side speaks {self._version}")
        if kind not in self._kinds or zero:
            raise ProtocolError(f"unknown kind of frame {kind}")
        if length > self._max_body_nbytes:
            raise ProtocolError(f"a frame's body of {length} bytes is over the limit of {self._max_body_nbytes}")
        return kind, length

    def decode_body(self, kind: int, body: bytes | bytearray | memoryview) -> Any:
        """The message; raises ProtocolError unless the fields are exactly those of its kind."""
        message_type = self._kinds[kind]
        types = self._field_types[message_type]
        try:
            fields = msgpack.unpackb(body, use_list=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"the body of a {message_type.__name__} frame is no msgpack: {error}") from error
        if type(fields) is not tuple or tuple(map(type, fields)) != types:
            raise ProtocolError(f"a {message_type.__name__} frame with fields of the wrong number or type")
        return message_type._make(fields)
