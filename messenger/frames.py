"""The messages of the wire and their bytes; sans I/O.

Frames are those of `messenger.framing`. Over tcp a `Write` and the `Ack` of a `Read` are followed by their `nbytes` of
payload.
"""

from collections.abc import Callable
from typing import NamedTuple

from messenger.framing import Framing

MAGIC = b"MPMS"
VERSION = 2
MAX_BODY_NBYTES = 4 << 20
MAX_NOTIFY_NBYTES = 1 << 20
MAX_PART_ROWS = 32_768
MAX_PART_NBYTES = 8 << 20


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
    """Last message before the owner closes; `code` is "restarted", "transport", "full", "busy" or "malformed"."""

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

_FRAMING = Framing(
    MAGIC, VERSION, (Hello, Welcome, Reject, Write, Notify, Read, Offer, Ack, Refused, Goodbye), MAX_BODY_NBYTES
)
encode: Callable[[Message], bytes] = _FRAMING.encode
decode_prefix = _FRAMING.decode_prefix
decode_body: Callable[[int, bytes | bytearray | memoryview], Message] = _FRAMING.decode_body
