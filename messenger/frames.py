"""Messages of the wire and their encoding; no I/O.

`Framing` encodes any set of message classes. A frame is a 12-byte prefix (magic, protocol version, kind, zero, body
length) and a body: a msgpack array of the message's fields in order, or, for kinds with a codec, the codec's bytes.

The messenger's own messages follow it. Over tcp a `Write` and the `Ack` of a `Read` are followed by their `nbytes` of
payload. The bodies of requests and of their answers have a fixed layout, little-endian and without padding, which
compiled loops read in place (`messenger.native.records`, `messenger.native.responder_loop`); all others are msgpack:

    Write    seq, operation, region_id i64; token u64; source_id, nbytes i64;
             bytes of rows, of tag, of payload u32; notify u32 (0 or 1); then rows, tag, payload
    Notify   seq i64; bytes of tag, of payload u32; then tag, payload
    Read     seq, region_id i64; token u64; nbytes i64; then rows
    Ack      seq, nbytes i64
    Refused  seq i64; then the reason, UTF-8
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NewType, get_type_hints

import msgpack

from messenger.errors import ProtocolError

PREFIX = struct.Struct("<4sBBHI")
# First bytes of a TLS client: a handshake record of any version (RFC 8446, 5.1).
_TLS_HANDSHAKE = b"\x16\x03"


class Codec(NamedTuple):
    """`pack` returns a message's frame; `unpack` a body's message, or raises ProtocolError."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[memoryview], Any]


class Framing:
    """One protocol. `kinds` are NamedTuple classes, numbered from 1 in this order; `codecs` those of fixed layout."""

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
        """Return the message's frame; bytes are returned as they are.

        Raises ProtocolError for a number that its field cannot hold.
        """
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
            raise ProtocolError(f"a field of {kind.__name__} is out of range: {error}") from error

    def prefix(self, kind: type[Any], nbytes: int) -> bytes:
        """Return the prefix of a frame of this kind with a body of `nbytes`."""
        return PREFIX.pack(self._magic, self._version, self._numbers[kind], 0, nbytes)

    def decode_prefix(self, prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
        """Return (kind, body length) of the frame with this prefix. Raises ProtocolError for an invalid one."""
        magic, version, kind, zero, length = PREFIX.unpack_from(prefix)
        if magic[:2] == _TLS_HANDSHAKE:
            raise ProtocolError(
                "the other side begins a TLS handshake, and this side does not use TLS: set tls_cert, tls_key and "
                "tls_ca on both sides, or on none"
            )
        if magic != self._magic:
            raise ProtocolError(f"not this protocol: a frame must begin with {self._magic!r}, got {magic!r}")
        if version != self._version:
            raise ProtocolError(
                f"protocol version {version}, but this side has {self._version}: run versions of Moonpool with the "
                "same protocol version on both sides"
            )
        if kind not in self._kinds or zero:
            raise ProtocolError(f"unknown kind of frame: {kind}")
        if length > self._max_body_nbytes:
            raise ProtocolError(f"the frame's body of {length} bytes is over the limit of {self._max_body_nbytes}")
        return kind, length

    def decode_body(self, kind: int, body: bytes | bytearray | memoryview) -> Any:
        """Return the message. Raises ProtocolError unless the body is exactly one message of this kind."""
        unpack = self._unpacks.get(kind)
        if unpack is not None:
            try:
                return unpack(memoryview(body))
            except (struct.error, UnicodeDecodeError) as error:
                raise ProtocolError(f"the body of a {self._kinds[kind].__name__} frame is invalid: {error}") from error
        message_type = self._kinds[kind]
        types = self._field_types[message_type]
        try:
            fields = msgpack.unpackb(body, use_list=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"the body of a {message_type.__name__} frame is not valid msgpack: {error}") from error
        if type(fields) is not tuple or tuple(map(type, fields)) != types:
            raise ProtocolError(f"a {message_type.__name__} frame has fields of the wrong number or type")
        return message_type._make(fields)


MAGIC = b"MPMS"
VERSION = 5
"""4: notifications of KV carried no proof that their sender may write it."""
MAX_BODY_NBYTES = 4 << 20
MAX_NOTIFY_NBYTES = 1 << 20
MAX_PART_ROWS = 32_768
MAX_PART_NBYTES = 8 << 20
MAX_NODE_ID_CHARS = 256
MAX_SESSION_NBYTES = 64


class Hello(NamedTuple):
    """First message of a connection: caller, expected peer, transport, and the session it starts or resumes."""

    node_id: str
    incarnation: int
    peer_node_id: str
    peer_incarnation: int
    session: bytes
    transport: str


class Welcome(NamedTuple):
    """Answer to Hello: the session is attached, and its earlier connections have ended."""

    node_id: str
    incarnation: int


class ConnectionReject(NamedTuple):
    """Last message before the owner closes; `code` is restarted, transport, full, busy, tls or malformed.

    A caller that has not named this node and its incarnation, which is a random number, may be anyone: it gets the
    reason of `REJECTIONS`, which describes nothing of this node, and the details are logged.
    """

    code: str
    reason: str


class Write(NamedTuple):
    """Put `nbytes` into `rows`, then, if `notify`, deliver tag and payload.

    tcp: rows are int64 [n, 2] (remote_offset, nbytes) and the payload follows. shm: rows are int64 [n, 3]
    (source_offset, remote_offset, nbytes), and the owner copies from the offered region `source_id`. rdma: the bytes
    are in place already unless `source_id` is 0; there is one row, (first byte, number of bytes up to the last).
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
    """shm: the descriptor that comes with this frame is region `region_id` of the sender.

    `nbytes` 0, without a descriptor: the offer of this region is withdrawn.
    """

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
    """Last message of a caller that closes in order."""


class Fabric(NamedTuple):
    """rdma: one step of the negotiation of rails before the first request; see messenger/rdma/handshake.py."""

    payload: bytes


class KeyQuery(NamedTuple):
    """rdma: query the memory and the rights of a key."""

    region_id: int
    token: int


class KeyInfo(NamedTuple):
    """rdma: answer to KeyQuery.

    Under the key, bytes [offset, offset + nbytes) of the region that begins at `address` may be accessed by the
    hardware keys `rkeys`, one uint32 per rail. Without a right, the key is void. `trouble`: the reason for which a
    valid key cannot be served.

    `last_seq`: the last request of the session that is done. `settles`: writes must be reported by a frame, because the
    owner must act before they are visible.
    """

    region_id: int
    token: int
    last_seq: int
    address: int
    offset: int
    nbytes: int
    read: bool
    write: bool
    rkeys: bytes
    trouble: str
    settles: bool


Message = (
    Hello
    | Welcome
    | ConnectionReject
    | Write
    | Notify
    | Read
    | Offer
    | Ack
    | Refused
    | Goodbye
    | Fabric
    | KeyQuery
    | KeyInfo
)
REJECTIONS = {
    "restarted": "the greeting is for another node, or for an earlier process of this one: get the new endpoint",
    "full": "no connection is free: try again later",
    "tls": (
        "the two sides do not agree on encryption: set tls_cert, tls_key and tls_ca on both sides, or on none, with "
        "certificates of one CA and name"
    ),
    "malformed": "the bytes are not a greeting of this protocol",
}
"""Reasons for which a caller is rejected before it has proved that it was told this node's address, by code."""

Frame = NewType("Frame", bytes)
"""An encoded message."""

_WRITE = struct.Struct("<qqqQqqIIII")
_NOTIFY = struct.Struct("<qII")
_READ = struct.Struct("<qqQq")
_ACK = struct.Struct("<qq")
_REFUSED = struct.Struct("<q")


def is_node_id(text: str) -> bool:
    """Return True if the text is a valid node id: short and printable, since it appears in logs and metrics."""
    return 0 < len(text) <= MAX_NODE_ID_CHARS and text.isprintable()


def pack_write(
    numbers: tuple[int, int, int, int, int, int],
    rows: bytes,
    notify: bool = False,
    tag: bytes = b"",
    payload: bytes = b"",
) -> Frame:
    """Return the frame of a Write; `numbers` are (seq, operation, region_id, token, source_id, nbytes).

    Raises struct.error for a number that its field cannot hold.
    """
    rows_nbytes, tag_nbytes, payload_nbytes = len(rows), len(tag), len(payload)
    length = _WRITE.size + rows_nbytes + tag_nbytes + payload_nbytes
    head = _WRITE_FRAME.pack(_WRITE_HEAD, length, *numbers, rows_nbytes, tag_nbytes, payload_nbytes, notify)
    return Frame(head + rows + tag + payload)


def _unpack_write(body: memoryview) -> Write:
    *numbers, rows_nbytes, tag_nbytes, payload_nbytes, notify = _WRITE.unpack_from(body)
    tag_at = _WRITE.size + rows_nbytes
    payload_at = tag_at + tag_nbytes
    if payload_at + payload_nbytes != len(body) or notify > 1:
        raise ProtocolError(f"the lengths in a Write frame do not match its {len(body)} bytes")
    rows, tag, payload = body[_WRITE.size : tag_at], body[tag_at:payload_at], body[payload_at:]
    return Write._make((*numbers, bytes(rows), bool(notify), bytes(tag), bytes(payload)))


def pack_notify(seq: int, tag: bytes, payload: bytes) -> Frame:
    """Return the frame of a Notify."""
    body = _NOTIFY.pack(seq, len(tag), len(payload)) + tag + payload
    return Frame(prefix(Notify, len(body)) + body)


def _unpack_notify(body: memoryview) -> Notify:
    seq, tag_nbytes, payload_nbytes = _NOTIFY.unpack_from(body)
    payload_at = _NOTIFY.size + tag_nbytes
    if payload_at + payload_nbytes != len(body):
        raise ProtocolError(f"the lengths in a Notify frame do not match its {len(body)} bytes")
    return Notify(seq, bytes(body[_NOTIFY.size : payload_at]), bytes(body[payload_at:]))


def pack_read(seq: int, region_id: int, token: int, nbytes: int, rows: bytes) -> Frame:
    """Return the frame of a Read. Raises struct.error for a number that its field cannot hold."""
    return Frame(prefix(Read, _READ.size + len(rows)) + _READ.pack(seq, region_id, token, nbytes) + rows)


def _pack_refused(message: Refused) -> bytes:
    reason = message.reason.encode()
    return prefix(Refused, _REFUSED.size + len(reason)) + _REFUSED.pack(message.seq) + reason


def ack_at(buffer: bytes | memoryview, start: int, end: int) -> Ack | None:
    """Return the Ack at `start`; None if there is another frame, or none that ends before `end`."""
    if end - start < ACK_NBYTES:
        return None
    head, seq, nbytes = _ACK_FRAME.unpack_from(buffer, start)
    return tuple.__new__(Ack, (seq, nbytes)) if head == _ACK_PREFIX else None  # as Ack(seq, nbytes), in half the time


_CODECS = {
    Write: Codec(lambda message: pack_write(message[:6], *message[6:]), _unpack_write),
    Notify: Codec(lambda message: pack_notify(*message), _unpack_notify),
    Read: Codec(
        lambda message: pack_read(*message),
        lambda body: Read._make((*_READ.unpack_from(body), bytes(body[_READ.size :]))),
    ),
    Ack: Codec(
        lambda message: _ACK_FRAME.pack(_ACK_PREFIX, *message),
        lambda body: Ack._make(_ACK.unpack(body)),
    ),
    Refused: Codec(
        _pack_refused,
        lambda body: Refused._make((*_REFUSED.unpack_from(body), str(body[_REFUSED.size :], "utf-8"))),
    ),
}
_FRAMING = Framing(
    MAGIC,
    VERSION,
    (Hello, Welcome, ConnectionReject, Write, Notify, Read, Offer, Ack, Refused, Goodbye, Fabric, KeyQuery, KeyInfo),
    MAX_BODY_NBYTES,
    _CODECS,
)
encode: Callable[[Message | Frame], bytes] = _FRAMING.encode
prefix: Callable[[type[Message], int], bytes] = _FRAMING.prefix
decode_prefix = _FRAMING.decode_prefix
decode_body: Callable[[int, bytes | bytearray | memoryview], Message] = _FRAMING.decode_body

# The most frequent frames are packed and unpacked in one step with their prefix, whose first 8 bytes are constant.
_WRITE_HEAD = prefix(Write, 0)[:8]
_WRITE_FRAME = struct.Struct("<8sI" + _WRITE.format[1:])
_ACK_PREFIX: bytes = prefix(Ack, _ACK.size)
_ACK_FRAME: struct.Struct = struct.Struct(f"<{PREFIX.size}s" + _ACK.format[1:])
ACK_NBYTES = _ACK_FRAME.size
