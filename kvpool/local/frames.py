"""The messages of a pool node's door and their bytes; sans I/O.

A frame is a 12-byte prefix (magic, version, kind, zeros, body length) and a msgpack array: the message's fields in
order. The caller begins with Hello and sends one request at a time; requests marked "no answer" have none. Descriptors
cross beside the first byte of their frame (SCM_RIGHTS).
"""

import enum
import struct
from typing import Any, NamedTuple, get_type_hints

import msgpack

from messenger.errors import ProtocolError

__all__ = [
    "MAX_BODY_NBYTES",
    "AskIndex",
    "Corrupt",
    "Hello",
    "Index",
    "Message",
    "Offer",
    "Offered",
    "Put",
    "PutStatus",
    "Refused",
    "Stored",
    "Touch",
    "Welcome",
    "Withdraw",
    "decode_body",
    "decode_prefix",
    "encode",
]

MAGIC, VERSION = b"MPDR", 1
PREFIX = struct.Struct("<4sBBHI")
MAX_BODY_NBYTES = 4 << 20


class PutStatus(enum.IntEnum):
    """What became of one block of a Put."""

    STORED = 1
    EXISTS = 2  # it is here already, in DRAM or on SSD, or is just being put by another
    NO_SPACE = 3  # nothing (more) could be evicted for it
    WRONG = 4  # its bytes are not those of its digests


class Hello(NamedTuple):
    """Who calls, for accounting."""

    owner: str
    owner_incarnation: int


class Welcome(NamedTuple):
    """Answer to Hello, with the arena's and the index's descriptors."""

    node_id: str
    incarnation: int
    arena_nbytes: int
    index_nbytes: int


class AskIndex(NamedTuple):
    """The index that was known has moved."""


class Index(NamedTuple):
    """Answer to AskIndex, with the index's descriptor."""

    nbytes: int


class Offer(NamedTuple):
    """The descriptor that comes with this is the caller's memory `region_id`, from which it will put."""

    region_id: int
    nbytes: int


class Offered(NamedTuple):
    """Answer to Offer: the memory is mapped."""


class Withdraw(NamedTuple):
    """The caller's memory `region_id` is not used any more; no answer."""

    region_id: int


class Put(NamedTuple):
    """Store those of the blocks that are not here; the pool node copies them out of the caller's memory.

    chain and parents 16 bytes per block; offsets int64 [groups, n] in the caller's memory; digests uint64 [n, layers of
    all groups], empty: those of the bytes as they are copied; num_tokens uint32 [n], 0 for a full block; `spec` is a
    serialised moonpool.v1.KvSpec.
    """

    kv_namespace: bytes
    spec: bytes
    region_id: int
    chain: bytes
    parents: bytes
    offsets: bytes
    digests: bytes
    num_tokens: bytes
    compute_s: float


class Stored(NamedTuple):
    """Answer to Put: a PutStatus per block, one byte each."""

    status: bytes


class Touch(NamedTuple):
    """Blocks that were read; no answer."""

    kv_namespace: bytes
    chain: bytes


class Corrupt(NamedTuple):
    """Blocks whose bytes are not those of their digests; no answer."""

    kv_namespace: bytes
    chain: bytes


class Refused(NamedTuple):
    """Instead of an answer. `kind` is the name of an error in kvpool.errors, or ProtocolError: the node hangs up."""

    kind: str
    reason: str


Message = (
    Hello | Welcome | AskIndex | Index | Offer | Offered | Withdraw | Put | Stored | Touch | Corrupt | Refused
)  # fmt: skip

_KINDS: dict[int, type[Any]] = dict(
    enumerate(
        (Hello, Welcome, AskIndex, Index, Offer, Offered, Withdraw, Put, Stored, Touch, Corrupt, Refused), start=1
    )
)
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_FIELD_TYPES = {kind: tuple(get_type_hints(kind).values()) for kind in _NUMBERS}


def encode(message: Message) -> bytes:
    """Prefix and body."""
    body: bytes = msgpack.packb(tuple(message))
    return PREFIX.pack(MAGIC, VERSION, _NUMBERS[type(message)], 0, len(body)) + body


def decode_prefix(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """(kind, body length) of the frame that begins so. Raises ProtocolError, before anything is kept for the body."""
    magic, version, kind, zero, length = PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise ProtocolError(f"not this protocol: a frame begins with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise ProtocolError(f"protocol version {version} where this side speaks {VERSION}")
    if kind not in _KINDS or zero:
        raise ProtocolError(f"unknown kind of frame {kind}")
    if length > MAX_BODY_NBYTES:
        raise ProtocolError(f"a frame's body of {length} bytes is over the limit of {MAX_BODY_NBYTES}")
    return kind, length


def decode_body(kind: int, body: bytes | bytearray | memoryview) -> Message:
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
