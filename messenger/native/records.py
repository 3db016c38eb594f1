"""Layouts of the memory that compiled loops share with Python, the kernel and the wire, as numpy record types.

A compiled function takes the address of a record and accesses its fields by name (`messenger.native.libc.record_at`).
Records defined by Linux or the wire have exactly that layout; sizes are checked below. Addresses are int64 of this
process.
"""

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from messenger.counters import LATENCY_EDGES_S, NUM_SUMS
from messenger.frames import PREFIX

# Reasons for which the responder's loop returns to Python; CONTINUE is the result of a step after which it goes on.
CONTINUE, FRAME, NOTE, LEFT, GROW, DESCRIPTORS, ENDED = range(7)
"""FRAME: the frame at `start` must be received by Python. NOTE: a notification must be delivered; its tag is [tag_at,
payload_at) and its payload [payload_at, note_end) of the buffer, and the next call sends the answer (ack_seq,
ack_nbytes). LEFT: a revoke waits for the access that was just left. GROW: the frame at `start` needs a buffer of
`wanted_nbytes`. DESCRIPTORS: `control` has `control_nbytes` of control messages. ENDED: the other side closed (errno
0), or a system call failed."""

MAX_VIEWS = 1024
"""Linux's IOV_MAX."""
MAX_ACKS = 64
"""Answers that are collected before they are sent."""
MAX_CONTROL_NBYTES = 16 + 4 * 64
"""A control message (cmsg(3)) with 64 descriptors."""

# Linux, 64-bit: iovec and msghdr of recvmsg(2), pollfd of poll(2), timespec of clock_gettime(2).
IOVEC = np.dtype([("base", np.int64), ("nbytes", np.int64)], align=True)
MSGHDR = np.dtype(
    [
        ("name", np.int64),
        ("name_nbytes", np.uint32),
        ("views", np.int64),
        ("num_views", np.int64),
        ("control", np.int64),
        ("control_nbytes", np.int64),
        ("flags", np.int32),
    ],
    align=True,
)
POLLFD = np.dtype([("fd", np.int32), ("events", np.int16), ("revents", np.int16)], align=True)
TIMESPEC = np.dtype([("seconds", np.int64), ("nanoseconds", np.int64)], align=True)
SOCKET_OPTION = np.dtype([("value", np.int32), ("value_nbytes", np.uint32)], align=True)
"""An int option of getsockopt(2) and its length."""

# The wire (messenger.frames), little-endian and packed.
FRAME_PREFIX = np.dtype([("head", "<i8"), ("body_nbytes", "<u4")])
"""`head`: the first 8 bytes of a frame (magic, version, kind, zero) as one number."""
WRITE_BODY = np.dtype(
    [
        ("seq", "<i8"),
        ("operation", "<i8"),
        ("region_id", "<u8"),
        ("token", "<u8"),
        ("source_id", "<i8"),
        ("nbytes", "<i8"),
        ("rows_nbytes", "<u4"),
        ("tag_nbytes", "<u4"),
        ("payload_nbytes", "<u4"),
        ("notify", "<u4"),
    ]
)
NOTIFY_BODY = np.dtype([("seq", "<i8"), ("tag_nbytes", "<u4"), ("payload_nbytes", "<u4")])
READ_BODY = np.dtype([("seq", "<i8"), ("region_id", "<u8"), ("token", "<u8"), ("nbytes", "<i8")])
ACK_FRAME = np.dtype([("head", "<i8"), ("body_nbytes", "<u4"), ("seq", "<i8"), ("nbytes", "<i8")])
ROW = np.dtype([("offset", "<i8"), ("nbytes", "<i8")])
"""A row of a tcp Write or Read: bytes of the owner's region."""
COPY_ROW = np.dtype([("source_offset", "<i8"), ("offset", "<i8"), ("nbytes", "<i8")])
"""A row of a shm Write: from the caller's region to the owner's."""

ACK_BODY_NBYTES = ACK_FRAME.itemsize - PREFIX.size

# Python's tables.
SOURCE = np.dtype([("id", np.int64), ("address", np.int64), ("nbytes", np.int64)], align=True)
"""Memory that a shm caller has offered."""
FLOW_SUMS = np.dtype(
    [
        ("nbytes", np.float64),
        ("slices", np.float64),
        ("operations", np.float64),
        ("seconds", np.float64),
        ("latencies", np.float64, (len(LATENCY_EDGES_S) + 1,)),
    ]
)
"""Sums of a flow (messenger.counters.Sums)."""
GRANT_SLOT = np.dtype(
    [
        ("placement", np.uint64),
        ("number", np.uint64),
        ("token", np.uint64),
        ("region_id", np.uint64),
        ("start", np.uint64),
        ("end", np.uint64),
        ("rights", np.uint64),
        ("address", np.uint64),
        ("units", np.uint64),
        ("unused", np.uint64, (7,)),
    ],
    align=True,
)
"""A grant, two cache lines (messenger.native.grant_slots); `placement` 0: empty. `units` is the address of its region's
UNITS, or 0."""

MAX_PIECES = 64
UNITS = np.dtype(
    [("sections", np.int64), ("num_sections", np.int64), ("entries", np.int64), ("distrusted", np.uint64)], align=True
)
"""The units of a region (messenger.native.unit_digests): addresses of its UNIT_SECTION and UNIT_ENTRY records."""
UNIT_SECTION = np.dtype(
    [("start", np.int64), ("end", np.int64), ("unit_nbytes", np.int64), ("first", np.int64)], align=True
)
"""Adjacent units of one size, at bytes [start, end) of the region; `first` is the index of the first one."""
UNIT_ENTRY = np.dtype([(name, np.uint64) for name in ("begun", "ended", "version", "token", "digest")], align=True)
"""A unit: the numbers of writes begun and ended, and the last digest (messenger.native.unit_digests)."""

SOCKET = np.dtype(
    [
        # The socket. `interruptible`: a signal or a long wait ends a call in the middle of a payload (errno EINTR), of
        # which `left_nbytes` are still to come.
        ("fd", np.int32),
        ("is_unix", np.int32),
        ("interruptible", np.int32),
        ("errno", np.int32),
        ("left_nbytes", np.int64),
        # Spinning before a wait (see `messenger.native.socket_io.spin`): most seconds of it, 0 for none; spins in a row
        # after which nothing had arrived; waits that still begin without one.
        ("spin_s", np.float64),
        ("vain_spins", np.int64),
        ("spins_to_skip", np.int64),
        # The link's receive buffer, of which [start, end) was received and not yet consumed.
        ("buffer", np.int64),
        ("buffer_nbytes", np.int64),
        ("start", np.int64),
        ("end", np.int64),
        # The session.
        ("last_seq", np.int64),
        ("highest_refused", np.int64),
        # What a return hands to Python; see the reasons above.
        ("ack_seq", np.int64),
        ("ack_nbytes", np.int64),
        ("tag_at", np.int64),
        ("payload_at", np.int64),
        ("note_end", np.int64),
        ("wanted_nbytes", np.int64),
        ("control_nbytes", np.int64),
        # First 8 bytes of these frames, as one number.
        ("write_head", np.int64),
        ("notify_head", np.int64),
        ("read_head", np.int64),
        ("ack_head", np.int64),
        # Addresses of tables.
        ("slots", np.int64),
        ("inside", np.int64),
        ("waiting", np.int64),
        ("sources", np.int64),
        ("num_sources", np.int64),
        ("landed", np.int64),
        ("served", np.int64),
        # Pieces of a payload that is received into units: their rows, their units (-1: none) and their writes' numbers.
        ("pieces", ROW, (MAX_PIECES,)),
        ("piece_units", np.int64, (MAX_PIECES,)),
        ("piece_writes", np.uint64, (MAX_PIECES,)),
        # Answers that were not sent yet.
        ("num_acks", np.int64),
        ("acks", ACK_FRAME, (MAX_ACKS,)),
        # Arguments of system calls.
        ("message", MSGHDR),
        ("poll", POLLFD),
        ("option", SOCKET_OPTION),
        ("time", TIMESPEC),
        ("control", np.uint8, (MAX_CONTROL_NBYTES,)),
        ("views", IOVEC, (MAX_VIEWS,)),
    ],
    align=True,
)
"""All that compiled loops use of one connection."""

_SIZES = (
    (IOVEC, 16), (MSGHDR, 56), (POLLFD, 8), (TIMESPEC, 16), (SOCKET_OPTION, 8), (FRAME_PREFIX, PREFIX.size),
    (WRITE_BODY, 64), (NOTIFY_BODY, 16), (READ_BODY, 32), (ACK_FRAME, PREFIX.size + 16), (ROW, 16), (COPY_ROW, 24),
    (GRANT_SLOT, 128), (FLOW_SUMS, 8 * NUM_SUMS),
)  # fmt: skip
assert all(record.itemsize == nbytes for record, nbytes in _SIZES)


def field_views(array: npt.NDArray[np.void]) -> SimpleNamespace:
    """Return a memoryview of each scalar field of a record array, by name.

    `views.field[0]` reads and writes the first record's field several times as fast as numpy does.
    """
    names = array.dtype.names or ()
    return SimpleNamespace(
        **{name: memoryview(array[name]) for name in names if array.dtype[name].kind in "iuf"}  # type: ignore[arg-type]
    )
