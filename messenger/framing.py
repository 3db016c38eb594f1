"""How messages become frames, for any set of message classes; sans I/O.

A frame is a 12-byte prefix (magic, protocol version, kind, zero, body length) and a body: a msgpack array of the
message's fields in order, or, for the kinds that a protocol packs itself, whatever their codec makes.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import msgpack

from messenger.errors import ProtocolError

__all__ = ["PREFIX", "Codec", "Framing"]

PREFIX = struct.Struct("<4sBBHI")
# How what a TLS client sends first begins: a handshake record, of any version (RFC 8446, 5.1).
_TLS_HANDSHAKE = b"\x16\x03"


class Codec(NamedTuple):
    """`pack` gives a message's frame; `unpack` raises ProtocolError for a body that is none."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[memoryview], Any]


class Framing:
    """One protocol: `kinds` are NamedTuple classes, numbered from 1 in this order; `codecs`, those of fixed layout."""

    def __init__(
        self,
        magic: bytes,
        version: int,
        kinds: Sequence[type[Any]],
        max_body_nbytes: int,
        codecs: Mapping[type[Any], Codec] | None = None,
    ) -> None:
        self._magic, self._version, self._max_body_nbytes = magic, version, max_body_nbytes
        self._kinds = dict(enumerate(kinds, start=1))
        self._numbers = {kind: number for number, kind in self._kinds.items()}
        self._field_types = {kind: tuple(get_type_hints(kind).values()) for kind in kinds}
        self._packs = {kind: codec.pack for kind, codec in (codecs or {}).items()}
        self._unpacks = {self._numbers[kind]: codec.unpack for kind, codec in (codecs or {}).items()}

    def encode(self, message: Any) -> bytes:
        """The frame; bytes are one already. Raises ProtocolError for a number that its field cannot hold."""
        kind = type(message)
        if kind is bytes:
            return message  # type: ignore[no-any-return]
        pack = self._packs.get(kind)
        if pack is None:
            body: bytes = msgpack.packb(tuple(message))
            return PREFIX.pack(self._magic, self._version, self._numbers[kind], 0, len(body)) + body
        try:
            return pack(message)
        except struct.error as error:
            raise ProtocolError(f"no {kind.__name__} frame can hold this: {error}") from error

    def prefix(self, kind: type[Any], nbytes: int) -> bytes:
        """How a frame of this kind with a body of so many bytes begins."""
        return PREFIX.pack(self._magic, self._version, self._numbers[kind], 0, nbytes)

    def decode_prefix(self, prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
        """(kind, body length) of the frame that begins so. Raises ProtocolError, before anything is kept for it."""
        magic, version, kind, zero, length = PREFIX.unpack_from(prefix)
        if magic[:2] == _TLS_HANDSHAKE:
            raise ProtocolError(
                "it begins a TLS handshake, and this side speaks in the clear: set tls_cert, tls_key and tls_ca on "
                "both sides, or on none"
            )
        if magic != self._magic:
            raise ProtocolError(f"not this protocol: a frame begins with {self._magic!r}, not {magic!r}")
        if version != self._version:
            raise ProtocolError(
                f"protocol version {version} where this side speaks {self._version}: run versions of Moonpool that "
                "have the same on both sides"
            )
        if kind not in self._kinds or zero:
            raise ProtocolError(f"unknown kind of frame {kind}")
        if length > self._max_body_nbytes:
            raise ProtocolError(f"a frame's body of {length} bytes is over the limit of {self._max_body_nbytes}")
        return kind, length

    def decode_body(self, kind: int, body: bytes | bytearray | memoryview) -> Any:
        """The message; raises ProtocolError unless the body is exactly one of its kind."""
        unpack = self._unpacks.get(kind)
        if unpack is not None:
            try:
                return unpack(memoryview(body))
            except (struct.error, UnicodeDecodeError) as error:
                raise ProtocolError(f"the body of a {self._kinds[kind].__name__} frame is wrong: {error}") from error
        message_type = self._kinds[kind]
        types = self._field_types[message_type]
        try:
            fields = msgpack.unpackb(body, use_list=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"the body of a {message_type.__name__} frame is no msgpack: {error}") from error
        if type(fields) is not tuple or tuple(map(type, fields)) != types:
            raise ProtocolError(f"a {message_type.__name__} frame with fields of the wrong number or type")
        return message_type._make(fields)
