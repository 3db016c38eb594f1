"""The compiled loop of an inbound connection: serves well-formed requests in order, and leaves all others to Python.

It runs without the GIL and blocks in system calls. A write, notify or read whose frame is well formed, arrives for the
first time and is covered by a grant has exactly the same effect as in `messenger.inbound`. Every other frame is left
untouched at the front of the connection for that module, which alone refuses requests, repeats answers and reports
errors. `messenger.frames` defines the layout of the wire.

A loop's memory is its connection's SOCKET record (`messenger.native.records`), `io` below. The record, and the tables
whose addresses it holds, live as long as the CompiledLoop; Python reads and writes them only between calls, except the
grant slots and the words of the fence, whose protocol `messenger.native.grant_slots` describes.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from jit.compiling import compiled
from messenger.counters import FIRST_EDGE_S, LATENCY_EDGES_S, OPERATIONS, FloatSums
from messenger.frames import MAX_PART_NBYTES, MAX_PART_ROWS, PREFIX, Ack, Notify, Read, Write, prefix
from messenger.grants import GrantTable
from messenger.link import Cuttable
from messenger.memory import PeerMemory
from messenger.native.grant_slots import READ, WRITE, enter, leave
from messenger.native.libc import memmove, record_at
from messenger.native.records import (
    CONTINUE,
    COPY_ROW,
    DESCRIPTORS,
    ENDED,
    FLOW_SUMS,
    FRAME,
    FRAME_PREFIX,
    GROW,
    LEFT,
    NOTE,
    NOTIFY_BODY,
    READ_BODY,
    ROW,
    SOURCE,
    WRITE_BODY,
)
from messenger.native.socket_io import (
    SocketState,
    fill,
    flush,
    gather,
    now_s,
    peer_is_gone,
    queue_ack,
    receive,
    row_at,
    socket_at,
)
from messenger.native.unit_digests import copy_into_units, receive_into_units
from messenger.sessions import Session
from messenger.sockets import SocketLink

MAX_BUFFER_NBYTES = 1 << 20
"""Longer frames are left to Python."""

_PREFIX_NBYTES = PREFIX.size
_WRITE_NBYTES, _NOTIFY_NBYTES, _READ_NBYTES = WRITE_BODY.itemsize, NOTIFY_BODY.itemsize, READ_BODY.itemsize
_ROW_NBYTES, _COPY_ROW_NBYTES, _SOURCE_NBYTES = ROW.itemsize, COPY_ROW.itemsize, SOURCE.itemsize
_PER_FIRST_EDGE = 1 / FIRST_EDGE_S
_LAST_BUCKET = len(LATENCY_EDGES_S)

_prefix_at, _copy_row_at, _source_at = record_at(FRAME_PREFIX), record_at(COPY_ROW), record_at(SOURCE)
_write_at, _notify_at, _read_at = record_at(WRITE_BODY), record_at(NOTIFY_BODY), record_at(READ_BODY)
_sums_at = record_at(FLOW_SUMS)


class Note(NamedTuple):
    """A notification to deliver: its write has landed, and it takes effect if the caller is still connected."""

    seq: int
    tag: bytes
    payload: bytes


class CompiledLoop:
    """The compiled loop of one connection. Used by the connection's thread alone, except `has_entered`."""

    def __init__(
        self, link: SocketLink, grants: GrantTable, mover: Cuttable, landed: FloatSums, served: FloatSums
    ) -> None:
        self._link = link
        self._grants = grants
        self._slots = grants.slots()
        self._inside = self._slots.open_loop(mover)
        self._waiting = memoryview(self._slots.waiting)  # type: ignore[arg-type]
        self._loop = responder_loop()
        self._socket = SocketState(link)
        self._flows = landed, served  # keeps the arrays alive
        fields = self._socket.fields
        fields.is_unix[0] = link.is_unix
        fields.slots[0] = self._slots.address
        fields.inside[0] = self._inside.ctypes.data
        fields.waiting[0] = self._slots.waiting.ctypes.data
        fields.landed[0], fields.served[0] = landed.ctypes.data, served.ctypes.data
        fields.write_head[0], fields.notify_head[0] = _head(Write), _head(Notify)
        fields.read_head[0], fields.ack_head[0] = _head(Read), _head(Ack)
        self.offered(())

    @property
    def has_entered(self) -> bool:
        """True if a request of the caller had a valid key: one is being executed, or was. Any thread."""
        return bool(self._inside[0]) or any(sums[OPERATIONS] for sums in self._flows)

    def close(self) -> None:
        """Release the loop's place in the fence, when its thread ends."""
        self._slots.close_loop(self._inside)

    def offered(self, memories: Iterable[tuple[int, PeerMemory]]) -> None:
        """Set the memories that the peer has offered, by region id. The calling code must keep them mapped."""
        self._sources = np.array([(number, memory.address, memory.nbytes) for number, memory in memories], SOURCE)
        fields = self._socket.fields
        fields.sources[0], fields.num_sources[0] = self._sources.ctypes.data, len(self._sources)

    def run(self, session: Session) -> Note | None:
        """Serve requests until one has a notification, or until Python must receive the next frame (None).

        The answer to a notification is sent by the next call. Raises OSError when the connection has ended.
        """
        fields = self._socket.fields
        fields.last_seq[0], fields.highest_refused[0] = session.last_seq, session.highest_refused
        self._socket.borrow()
        try:
            while True:
                why = self._run()
                if why == NOTE:
                    tag_at, payload_at, end = fields.tag_at[0], fields.payload_at[0], fields.note_end[0]
                    buffer = self._socket.buffer
                    tag, payload = bytes(buffer[tag_at:payload_at]), bytes(buffer[payload_at:end])
                    return Note(fields.ack_seq[0], tag, payload)
                if why == FRAME or (why == GROW and fields.wanted_nbytes[0] > MAX_BUFFER_NBYTES):
                    return None
                if why == GROW:
                    self._socket.give_back()
                    self._socket.borrow(2 * fields.wanted_nbytes[0])
                elif why == DESCRIPTORS:
                    self._link.keep_fds(self._socket.passed_fds())
                elif why == ENDED:
                    raise self._socket.error()
        finally:
            session.last_seq = fields.last_seq[0]
            self._socket.give_back()

    def _run(self) -> int:
        why: int = self._loop(self._socket.address)
        if self._waiting[0]:
            self._grants.left()
        return why


def _head(kind: type[Any]) -> int:
    return int.from_bytes(prefix(kind, 0)[:8], "little")


# Compiled functions.


@functools.cache
def responder_loop() -> Any:
    """Return `loop(address of a SOCKET record) -> reason of the return`, compiled or loaded from the cache."""
    return compiled(_serve, types.int64(types.int64))


def _serve(socket):  # type: ignore[no-untyped-def]
    io = socket_at(socket)
    if io.ack_seq:
        queue_ack(io, io.ack_seq, io.ack_nbytes)
        io.ack_seq = 0
    why = CONTINUE
    while why == CONTINUE:
        why = _serve_next(io)
    if why != ENDED and not flush(io):
        why = ENDED
    return why


@numba.njit
def _serve_next(io):  # type: ignore[no-untyped-def]
    """Receive and execute the next request. Returns CONTINUE, or the reason to return to Python."""
    why = fill(io, _PREFIX_NBYTES)
    if why != CONTINUE:
        return why
    frame = _prefix_at(io.buffer + io.start)
    head, body_nbytes = frame.head, np.int64(frame.body_nbytes)
    is_write, is_notify, is_read = head == io.write_head, head == io.notify_head, head == io.read_head
    if not (is_write or is_notify or (is_read and not io.is_unix)):
        return FRAME
    if _PREFIX_NBYTES + body_nbytes > io.buffer_nbytes:
        io.wanted_nbytes = _PREFIX_NBYTES + body_nbytes
        return GROW
    why = fill(io, _PREFIX_NBYTES + body_nbytes)
    if why != CONTINUE:
        return why
    if is_write:
        return _serve_write(io, body_nbytes)
    if is_notify:
        return _serve_notify(io, body_nbytes)
    return _serve_read(io, body_nbytes)


@numba.njit
def _serve_write(io, body_nbytes):  # type: ignore[no-untyped-def]
    if body_nbytes < _WRITE_NBYTES:
        return FRAME
    at = io.buffer + io.start + _PREFIX_NBYTES
    request = _write_at(at)
    seq, nbytes, notify = request.seq, request.nbytes, request.notify
    rows_nbytes, tag_nbytes = np.int64(request.rows_nbytes), np.int64(request.tag_nbytes)
    payload_nbytes = np.int64(request.payload_nbytes)
    if _WRITE_NBYTES + rows_nbytes + tag_nbytes + payload_nbytes != body_nbytes or notify > 1:
        return FRAME
    if seq <= io.last_seq or request.operation <= io.highest_refused:
        return FRAME
    rows_at = at + _WRITE_NBYTES
    source, source_nbytes = np.int64(0), np.int64(0)
    if io.is_unix:
        source, source_nbytes = _find_source(io, request.source_id)
    begun_s = now_s(io)
    address, units, start, end = enter(io, request.token, request.region_id, np.uint64(WRITE))
    if address == 0:
        return FRAME
    if io.is_unix:
        num_rows = rows_nbytes // _COPY_ROW_NBYTES
        are_valid = _are_copies_valid(rows_at, rows_nbytes, source_nbytes, start, end, nbytes)
    else:
        num_rows = rows_nbytes // _ROW_NBYTES
        are_valid = _are_rows_valid(rows_at, rows_nbytes, start, end, nbytes)
    if not are_valid:
        return _left(io, FRAME)
    if peer_is_gone(io):
        return _left(io, ENDED)
    body_end = io.start + _PREFIX_NBYTES + body_nbytes
    io.start = body_end
    if io.is_unix:
        for index in range(num_rows):
            row = _copy_row_at(rows_at + _COPY_ROW_NBYTES * index)
            if units:
                copy_into_units(units, request.token, address, row.offset, source + row.source_offset, row.nbytes)
            else:
                memmove(address + row.offset, source + row.source_offset, row.nbytes)
    elif units:
        if not receive_into_units(io, units, request.token, rows_at, num_rows, address):
            return _left(io, ENDED)
    elif not receive(io, rows_at, num_rows, address, nbytes):
        return _left(io, ENDED)
    why = _left(io, CONTINUE)
    if peer_is_gone(io):
        io.errno = 0
        return ENDED
    _count(_sums_at(io.landed), nbytes, num_rows, now_s(io) - begun_s)
    if notify:  # Python records that the request is done
        _hand_over_note(io, seq, nbytes, body_end, tag_nbytes, payload_nbytes)
        return NOTE
    io.last_seq = seq
    queue_ack(io, seq, nbytes)
    return why


@numba.njit
def _serve_notify(io, body_nbytes):  # type: ignore[no-untyped-def]
    if body_nbytes < _NOTIFY_NBYTES:
        return FRAME
    request = _notify_at(io.buffer + io.start + _PREFIX_NBYTES)
    tag_nbytes, payload_nbytes = np.int64(request.tag_nbytes), np.int64(request.payload_nbytes)
    if _NOTIFY_NBYTES + tag_nbytes + payload_nbytes != body_nbytes or request.seq <= io.last_seq:
        return FRAME
    io.start += _PREFIX_NBYTES + body_nbytes
    _hand_over_note(io, request.seq, np.int64(0), io.start, tag_nbytes, payload_nbytes)
    return NOTE


@numba.njit
def _hand_over_note(io, seq, nbytes, end, tag_nbytes, payload_nbytes):  # type: ignore[no-untyped-def]
    """Set the position of the notification, which ends at `end` of the buffer, and the answer to send after it."""
    io.note_end = end
    io.payload_at = end - payload_nbytes
    io.tag_at = end - payload_nbytes - tag_nbytes
    io.ack_seq, io.ack_nbytes = seq, nbytes


@numba.njit
def _serve_read(io, body_nbytes):  # type: ignore[no-untyped-def]
    if body_nbytes < _READ_NBYTES:
        return FRAME
    at = io.buffer + io.start + _PREFIX_NBYTES
    request = _read_at(at)
    seq, nbytes = request.seq, request.nbytes
    rows_at, rows_nbytes = at + _READ_NBYTES, body_nbytes - _READ_NBYTES
    begun_s = now_s(io)
    address, _, start, end = enter(io, request.token, request.region_id, np.uint64(READ))
    if address == 0:
        return FRAME
    if not _are_rows_valid(rows_at, rows_nbytes, start, end, nbytes):
        return _left(io, FRAME)
    io.start += _PREFIX_NBYTES + body_nbytes
    queue_ack(io, seq, nbytes)
    num_rows = rows_nbytes // _ROW_NBYTES
    if not gather(io, rows_at, num_rows, address):
        return _left(io, ENDED)
    _count(_sums_at(io.served), nbytes, num_rows, now_s(io) - begun_s)
    return _left(io, CONTINUE)


# Validity of rows: the conditions of messenger.transport.parse_rows and messenger.slices.within.


@numba.njit
def _are_rows_valid(rows_at, rows_nbytes, start, end, nbytes):  # type: ignore[no-untyped-def]
    """Return True if all rows (ROW records) lie in the window [start, end) and have `nbytes` together."""
    if rows_nbytes <= 0 or rows_nbytes % _ROW_NBYTES or rows_nbytes > _ROW_NBYTES * MAX_PART_ROWS:
        return False
    total = np.int64(0)
    for at in range(rows_at, rows_at + rows_nbytes, _ROW_NBYTES):
        row = row_at(at)
        if not _is_within(row.offset, row.nbytes, start, end):
            return False
        total += row.nbytes
    return total == nbytes and nbytes <= MAX_PART_NBYTES


@numba.njit
def _are_copies_valid(rows_at, rows_nbytes, source_nbytes, start, end, nbytes):  # type: ignore[no-untyped-def]
    """Check COPY_ROW records as `_are_rows_valid`; each must also lie within the source of `source_nbytes`."""
    if rows_nbytes <= 0 or rows_nbytes % _COPY_ROW_NBYTES or rows_nbytes > _COPY_ROW_NBYTES * MAX_PART_ROWS:
        return False
    total = np.int64(0)
    for at in range(rows_at, rows_at + rows_nbytes, _COPY_ROW_NBYTES):
        row = _copy_row_at(at)
        if not _is_within(row.source_offset, row.nbytes, np.int64(0), source_nbytes):
            return False
        if not _is_within(row.offset, row.nbytes, start, end):
            return False
        total += row.nbytes
    return total == nbytes and nbytes <= MAX_PART_NBYTES


@numba.njit
def _is_within(offset, nbytes, start, end):  # type: ignore[no-untyped-def]
    """Return True if [offset, offset + nbytes) lies in [start, end) and is no longer than a part may be."""
    if nbytes < 0 or nbytes > MAX_PART_NBYTES or nbytes > end - start:
        return False
    return offset >= start and offset <= end - nbytes


@numba.njit
def _find_source(io, source_id):  # type: ignore[no-untyped-def]
    """Return (address, nbytes) of the offered memory; (0, -1) if there is none of this id."""
    for index in range(io.num_sources):
        source = _source_at(io.sources + _SOURCE_NBYTES * index)
        if source.id == source_id:
            return source.address, source.nbytes
    return np.int64(0), np.int64(-1)


@numba.njit
def _left(io, why):  # type: ignore[no-untyped-def]
    """Leave the access. Returns `why`, or LEFT instead of CONTINUE if a revoke waits.

    For any other reason the loop returns to Python anyway, which then looks at `waiting` itself.
    """
    return LEFT if leave(io) and why == CONTINUE else why


@numba.njit
def _count(sums, nbytes, slices, seconds):  # type: ignore[no-untyped-def]
    """Add an operation to FLOW_SUMS, as `messenger.counters.Flow.add`."""
    sums.nbytes += nbytes
    sums.slices += slices
    sums.operations += 1
    sums.seconds += seconds
    bucket, steps = 0, np.int64(seconds * _PER_FIRST_EDGE)
    while steps > 0 and bucket < _LAST_BUCKET:
        steps >>= 1
        bucket += 1
    sums.latencies[bucket] += 1
