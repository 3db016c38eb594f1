"""The messages of the wire and their bytes; sans I/O.

Frames are those of `messenger.framing`. Over tcp a `Write` and the `Ack` of a `Read` are followed by their `nbytes` of
payload. The bodies of requests and their answers have a fixed layout, little-endian and without padding, which compiled
loops read in place (`messenger.native.owner_loop`); all others are msgpack.

    Write    seq, operation, region_id i64; token u64; source_id, nbytes i64;
             bytes of rows, of tag, of payload u32; notify u32 (0 or 1); then rows, tag, payload
    Notify   seq i64; bytes of tag, of payload u32; then tag, payload
    Read     seq, region_id i64; token u64; nbytes i64; then rows
    Ack      seq, nbytes i64
    Refused  seq i64; then the reason, UTF-8
"""

import struct
from collections.abc import Callable
from typing import NamedTuple, NewType

from messenger.errors import ProtocolError
from messenger.framing import PREFIX, Codec, Framing

MAGIC = b"MPMS"
VERSION = 4
MAX_BODY_NBYTES = 4 << 20
MAX_NOTIFY_NBYTES = 1 << 20
MAX_PART_ROWS = 32_768
MAX_PART_NBYTES = 8 << 20
MAX_NODE_ID_CHARS = 256
MAX_SESSION_NBYTES = 64


class Hello(NamedTuple):
    """First message of a connection: who calls, whom and by what, and the session it starts or resumes."""

    node_id: str
    incarnation: int
    peer_node_id: str
    peer_incarnation: int
    session: bytes
    transport: str


class Welcome(NamedTuple):
    """Answer to Hello: the session is attached, and earlier connections of it have ended."""

    node_id: str
    incarnation: int


class Reject(NamedTuple):
    """Last message before the owner closes; `code`: "restarted", "transport", "full", "busy", "tls" or "malformed"."""

    code: str
    reason: str


class Write(NamedTuple):
    """Put `nbytes` into `rows`, then, if `notify`, deliver tag and payload.

    tcp: rows are int64 [n, 2] (remote_offset, nbytes) and the payload follows. shm: rows are int64 [n, 3]
    (source_offset, remote_offset, nbytes), and the owner copies from the offered region `source_id`. rdma: the bytes
    are in place already unless `source_id` is 0; rows are one, (first byte, how many up to the last).
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

    0 bytes, without a descriptor: what was offered as this region is withdrawn.
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
    """The caller closes in peace."""


class Fabric(NamedTuple):
    """rdma: a step of agreeing on rails, before the first request; see messenger/rdma/handshake.py."""

    payload: bytes


class Ask(NamedTuple):
    """rdma: what does the key allow, and where?"""

    region_id: int
    token: int


class Allow(NamedTuple):
    """rdma: under the key, bytes [offset, offset + nbytes) of the region that begins at `address` may be touched by the
    keys `rkeys`, uint32 for each rail. Without a right: the key is void. `trouble`: why a good key cannot be served.

    `last_seq`: the last request of the session that is done. `settles`: what was written is to be told, since the owner
    has something to do before it is seen.
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


Message = Hello | Welcome | Reject | Write | Notify | Read | Offer | Ack | Refused | Goodbye | Fabric | Ask | Allow
Frame = NewType("Frame", bytes)
"""A message that is encoded already."""

_WRITE = struct.Struct("<qqqQqqIIII")
_NOTIFY = struct.Struct("<qII")
_READ = struct.Struct("<qqQq")
_ACK = struct.Struct("<qq")
_REFUSED = struct.Struct("<q")


def is_node_id(text: str) -> bool:
    """Whether a messenger may be called so: it is told in logs, and is a label of metrics."""
    return 0 < len(text) <= MAX_NODE_ID_CHARS and text.isprintable()


def pack_write(
    seq: int,
    operation: int,
    region_id: int,
    token: int,
    source_id: int,
    nbytes: int,
    rows: bytes,
    notify: bool,
    tag: bytes,
    payload: bytes,
) -> Frame:
    """The frame of a Write with these fields. Raises struct.error for a number that its field cannot hold."""
    sizes = len(rows), len(tag), len(payload)
    length = _WRITE.size + sum(sizes)
    head = _WRITE_FRAME.pack(_WRITE_HEAD, length, seq, operation, region_id, token, source_id, nbytes, *sizes, notify)
    return Frame(head + rows + tag + payload)


def _unpack_write(body: memoryview) -> Write:
    *numbers, rows_nbytes, tag_nbytes, payload_nbytes, notify = _WRITE.unpack_from(body)
    tag_at = _WRITE.size + rows_nbytes
    payload_at = tag_at + tag_nbytes
    if payload_at + payload_nbytes != len(body) or notify > 1:
        raise ProtocolError(f"the parts of a Write frame do not add up to its {len(body)} bytes")
    rows, tag, payload = body[_WRITE.size : tag_at], body[tag_at:payload_at], body[payload_at:]
    return Write._make((*numbers, bytes(rows), bool(notify), bytes(tag), bytes(payload)))


def pack_notify(seq: int, tag: bytes, payload: bytes) -> Frame:
    """The frame of a Notify with these fields."""
    body = _NOTIFY.pack(seq, len(tag), len(payload)) + tag + payload
    return Frame(prefix(Notify, len(body)) + body)


def _unpack_notify(body: memoryview) -> Notify:
    seq, tag_nbytes, payload_nbytes = _NOTIFY.unpack_from(body)
    payload_at = _NOTIFY.size + tag_nbytes
    if payload_at + payload_nbytes != len(body):
        raise ProtocolError(f"the parts of a Notify frame do not add up to its {len(body)} bytes")
    return Notify(seq, bytes(body[_NOTIFY.size : payload_at]), bytes(body[payload_at:]))


def pack_read(seq: int, region_id: int, token: int, nbytes: int, rows: bytes) -> Frame:
    """The frame of a Read with these fields. Raises struct.error for a number that its field cannot hold."""
    return Frame(prefix(Read, _READ.size + len(rows)) + _READ.pack(seq, region_id, token, nbytes) + rows)


def _pack_refused(message: Refused) -> bytes:
    reason = message.reason.encode()
    return prefix(Refused, _REFUSED.size + len(reason)) + _REFUSED.pack(message.seq) + reason


def ack_at(buffer: bytes | memoryview, start: int, end: int) -> Ack | None:
    """The Ack that begins at `start`; None where there is another frame, or less than a whole one before `end`."""
    if end - start < ACK_NBYTES:
        return None
    head, seq, nbytes = _ACK_FRAME.unpack_from(buffer, start)
    return Ack(seq, nbytes) if head == _ACK_PREFIX else None


_CODECS = {
    Write: Codec(lambda message: pack_write(*message), _unpack_write),
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
    (Hello, Welcome, Reject, Write, Notify, Read, Offer, Ack, Refused, Goodbye, Fabric, Ask, Allow),
    MAX_BODY_NBYTES,
    _CODECS,
)
encode: Callable[[Message | Frame], bytes] = _FRAMING.encode
prefix: Callable[[type[Message], int], bytes] = _FRAMING.prefix
decode_prefix = _FRAMING.decode_prefix
decode_body: Callable[[int, bytes | bytearray | memoryview], Message] = _FRAMING.decode_body

# What comes most often is packed and unpacked at once, prefix and all: its first 8 bytes are always the same.
_WRITE_HEAD = prefix(Write, 0)[:8]
_WRITE_FRAME = struct.Struct("<8sI" + _WRITE.format[1:])
_ACK_PREFIX: bytes = prefix(Ack, _ACK.size)
_ACK_FRAME: struct.Struct = struct.Struct(f"<{PREFIX.size}s" + _ACK.format[1:])
ACK_NBYTES = _ACK_FRAME.size
