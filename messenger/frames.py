"""The messages of the wire and their bytes; sans I/O.

A frame is a 12-byte prefix (magic, protocol version, kind, zero, body length) and a msgpack array: the message's
fields in order. Over tcp a `Write` and the `Ack` of a `Read` are followed by their `nbytes` of payload.
"""

import struct
from typing import Any, NamedTuple, get_type_hints

import msgpack

from messenger.errors import ProtocolError

MAGIC = b"MPMS"
VERSION = 1
PREFIX = struct.Struct("<4sBBHI")
MAX_BODY_NBYTES = 4 << 20
MAX_NOTIFY_NBYTES = 1 << 20
MAX_PART_ROWS = 32_768
MAX_PART_NBYTES = 8 << 20


class Hello(NamedTuple):
    """First message of a connection: who calls, whom it means to reach, and the session it starts or resumes."""

    node_id: str
    incarnation: int
    peer_node_id: str
    peer_incarnation: int
    session: bytes


class Welcome(NamedTuple):
    """Answer to Hello: the session is attached, and earlier connections of it have ended."""

    node_id: str
    incarnation: int


class Reject(NamedTuple):
    """Last message before the owner closes; `code` is "restarted", "full", "busy", "version" or "malformed"."""

    code: str
    reason: str


class Write(NamedTuple):
    """Put `nbytes` into `rows`, then, if `notify`, deliver tag and payload.

    tcp: rows are int64 [n, 2] (remote_offset, nbytes) and the payload follows. shm: rows are int64 [n, 3]
    (source_offset, remote_offset, nbytes), and the owner copies from the offered region `source_id`.
    """

    seq: int
    operation: int
    region_id: int
    token: int
    source_id: int
    nbytes: int
    rows: bytes
    notify: bool
    tag: bytes
    payload: bytes


class Notify(NamedTuple):
    """Deliver tag and payload."""

    seq: int
    tag: bytes
    payload: bytes


class Read(NamedTuple):
    """tcp: send the bytes of `rows`, int64 [n, 2] (remote_offset, nbytes). shm: confirm the right to read them."""

    seq: int
    region_id: int
    token: int
    nbytes: int
    rows: bytes


class Offer(NamedTuple):
    """shm: the descriptor that comes with this frame is region `region_id` of the sender."""

    region_id: int
    nbytes: int


class Ack(NamedTuple):
    """The request `seq` is done."""

    seq: int
    nbytes: int


class Refused(NamedTuple):
    """The owner refused the request `seq`; nothing was touched."""

    seq: int
    reason: str


class Goodbye(NamedTuple):
    """The caller closes in peace."""


Message = Hello | Welcome | Reject | Write | Notify | Read | Offer | Ack | Refused | Goodbye

_KINDS: dict[int, type[Any]] = dict(
    enumerate((Hello, Welcome, Reject, Write, Notify, Read, Offer, Ack, Refused, Goodbye), start=1)
)
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_FIELD_TYPES = {kind: tuple(get_type_hints(kind).values()) for kind in _NUMBERS}


def encode(message: Message) -> bytes:
    """Prefix and body."""
    body: bytes = msgpack.packb(tuple(message))
    return PREFIX.pack(MAGIC, VERSION, _NUMBERS[type(message)], 0, len(body)) + body


def decode_prefix(prefix: bytes | memoryview) -> tuple[int, int]:
    """(kind, body length). Raises ProtocolError, before anything is allocated for the body."""
    magic, version, kind, zero, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError(f"not this protocol: a frame begins with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise ProtocolError(f"protocol version {version} where this side speaks {VERSION}")
    if kind not in _KINDS or zero:
        raise ProtocolError(f"unknown kind of frame {kind}")
    if length > MAX_BODY_NBYTES:
        raise ProtocolError(f"a frame's body of {length} bytes is over the limit of {MAX_BODY_NBYTES}")
    return kind, length


def decode_body(kind: int, body: bytes | memoryview) -> Message:
    """The message; raises ProtocolError unless the fields are exactly those of its kind."""
    message_type = _KINDS[kind]
    types = _FIELD_TYPES[message_type]
    try:
        fields = msgpack.unpackb(body, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the body of a {message_type.__name__} frame is no msgpack: {error}") from error
    if type(fields) is not tuple or tuple(map(type, fields)) != types:
        raise ProtocolError(f"a {message_type.__name__} frame with fields of the wrong number or type")
    message: Message = message_type._make(fields)
    return message
