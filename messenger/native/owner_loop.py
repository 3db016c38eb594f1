"""The compiled loop of an owner's connection: takes the requests that are in perfect order, and leaves all others.

It runs without the GIL, blocks in the system's calls, and does exactly what `messenger.inbound` does with a write, a
notify or a read whose frame is well formed, comes for the first time, and is covered by a grant. Whatever else stands
at the front of the connection it leaves there, untouched, for that code, which stays the only one to refuse, to answer
again and to complain. The wire's layout is that of `messenger.frames`.

`state` int64 [NUM_STATE] and `scratch` int64 [NUM_SCRATCH] belong to one connection; so do `landed` and `served`,
float64, laid out as `messenger.counters.Flow` has its sums. `buffer` uint8 holds what was received and not yet taken,
[START, END) of it. `sources` int64 [n, 3] are the (id, address, bytes) of the memory that the caller has offered.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from messenger.counters import FIRST_EDGE_S
from messenger.frames import MAX_PART_NBYTES, MAX_PART_ROWS
from messenger.framing import PREFIX
from messenger.native.compiling import compiled
from messenger.native.grant_slots import READ, WRITE, enter, leave
from messenger.native.libc import (
    EAGAIN,
    EINTR,
    MSG_CMSG_CLOEXEC,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    MSG_WAITALL,
    POLLRDHUP,
    clock_gettime,
    errno_location,
    load_i32,
    load_i64,
    load_u32,
    load_u64,
    memmove,
    poll,
    recv,
    recvmsg,
    send,
    sendmsg,
    store_i32,
    store_i64,
)

__all__ = ["NUM_SCRATCH", "NUM_STATE", "owner_loop"]

# Why the loop returned.
FRAME, NOTE, LEFT, GROW, DESCRIPTORS, ENDED = range(1, 7)
"""FRAME: the frame at START is Python's. NOTE: a notification is due, [TAG_AT, PAYLOAD_AT, NOTE_END) of the buffer, and
then the answer ACK_SEQ, ACK_NBYTES. LEFT: a revoke waits for who has left the fence. GROW: the frame at START wants a
buffer of WANTED bytes. DESCRIPTORS: [DESCRIPTORS_AT] of scratch has CONTROL_NBYTES of control messages. ENDED: the
other side closed (ERRNO 0), or a call failed."""

# Places in `state`.
(
    START, END, LAST_SEQ, REFUSED_OPERATION, ACK_SEQ, ACK_NBYTES, TAG_AT, PAYLOAD_AT, NOTE_END, WANTED, CONTROL_NBYTES,
    ERRNO, OUT_NBYTES, WRITE_HEAD, NOTIFY_HEAD, READ_HEAD, ACK_HEAD, NUM_STATE,
) = range(18)  # fmt: skip
"""*_HEAD: the first 8 bytes of such a frame, as one number. OUT_NBYTES: of answers that have not been sent."""

_MAX_VIEWS = 1024  # Linux's IOV_MAX
_ACK_NBYTES = PREFIX.size + 16
_MAX_ACKS = 64
# Places in `scratch`: the answers to send, a msghdr, a pollfd, a timespec, control messages, views.
_OUT_AT = 0
_MESSAGE_AT = _OUT_AT + _MAX_ACKS * _ACK_NBYTES // 8 + 1
_POLL_AT = _MESSAGE_AT + 7
_TIME_AT = _POLL_AT + 1
CONTROL_AT = _TIME_AT + 2
MAX_CONTROL_NBYTES = 16 + 4 * 64
_VIEWS_AT = CONTROL_AT + MAX_CONTROL_NBYTES // 8
NUM_SCRATCH = _VIEWS_AT + 2 * _MAX_VIEWS

_PREFIX_NBYTES = PREFIX.size
_WRITE_NBYTES, _NOTIFY_NBYTES, _READ_NBYTES = 64, 16, 32
_AHEAD_NBYTES = 4096  # what is received with a frame is copied once more
_CLOCK_MONOTONIC = 1
_PER_FIRST_EDGE = 1 / FIRST_EDGE_S
_FIRST_BUCKET = 4
_TAKEN = 0  # by what takes one request: it is done, go on


@functools.cache
def owner_loop() -> Any:
    """`loop(fd, is_unix, state, scratch, buffer, words, inside, waiting, sources, landed, served) -> why it returned`.

    Compiled, or loaded from the cache, at the first call.
    """
    i64s, u64s, f64s = (types.Array(kind, 1, "C") for kind in (types.int64, types.uint64, types.float64))
    bytes_, rows = types.Array(types.uint8, 1, "C"), types.Array(types.int64, 2, "C")
    arguments = (types.int32, types.boolean, i64s, i64s, bytes_, u64s, u64s, u64s, rows, f64s, f64s)
    return compiled(_serve, types.int64(*arguments))


def _serve(fd, is_unix, state, scratch, buffer, words, inside, waiting, sources, landed, served):  # type: ignore[no-untyped-def]
    if state[ACK_SEQ]:
        _queue_ack(fd, state, scratch, state[ACK_SEQ], state[ACK_NBYTES])
        state[ACK_SEQ] = 0
    base = buffer.ctypes.data
    while True:
        why = _fill(fd, is_unix, state, scratch, buffer, _PREFIX_NBYTES)
        if why:
            break
        head, length = load_i64(base + state[START]), np.int64(load_u32(base + state[START] + 8))
        is_write, is_read, is_notify = head == state[WRITE_HEAD], head == state[READ_HEAD], head == state[NOTIFY_HEAD]
        if not (is_write or is_notify or (is_read and not is_unix)):
            why = FRAME
            break
        if _PREFIX_NBYTES + length > len(buffer):
            state[WANTED] = _PREFIX_NBYTES + length
            why = GROW
            break
        why = _fill(fd, is_unix, state, scratch, buffer, _PREFIX_NBYTES + length)
        if why:
            break
        if is_write:
            why = _take_write(fd, is_unix, state, scratch, buffer, length, words, inside, waiting, sources, landed)
        elif is_notify:
            why = _take_notify(state, buffer, length)
        else:
            why = _take_read(fd, state, scratch, buffer, length, words, inside, waiting, served)
        if why:
            break
    if why != ENDED and not _flush(fd, state, scratch):
        why = ENDED
    return why


@numba.njit
def _take_write(fd, is_unix, state, scratch, buffer, length, words, inside, waiting, sources, landed):  # type: ignore[no-untyped-def]
    at = buffer.ctypes.data + state[START] + _PREFIX_NBYTES
    if length < _WRITE_NBYTES:
        return FRAME
    seq, operation, region, token = load_i64(at), load_i64(at + 8), load_u64(at + 16), load_u64(at + 24)
    source_id, nbytes = load_i64(at + 32), load_i64(at + 40)
    rows_nbytes, tag_nbytes = np.int64(load_u32(at + 48)), np.int64(load_u32(at + 52))
    payload_nbytes, notify = np.int64(load_u32(at + 56)), np.int64(load_u32(at + 60))
    if _WRITE_NBYTES + rows_nbytes + tag_nbytes + payload_nbytes != length or notify > 1:
        return FRAME
    if seq <= state[LAST_SEQ] or operation == state[REFUSED_OPERATION]:
        return FRAME
    columns = 3 if is_unix else 2
    rows_at = at + _WRITE_NBYTES
    source = np.int64(0)
    if is_unix:
        source, source_nbytes = _source(sources, source_id)
        if not _are_within(rows_at, rows_nbytes, 3, 0, np.int64(0), source_nbytes, nbytes):
            return FRAME
    begun_s = _now_s(scratch)
    address, start, end = enter(words, inside, token, region, np.uint64(WRITE))
    if address == 0:
        return FRAME
    if not _are_within(rows_at, rows_nbytes, columns, columns - 2, start, end, nbytes):
        return _left(inside, waiting, FRAME)
    if _is_gone(fd, scratch):
        return _left(inside, waiting, ENDED)
    num_rows = rows_nbytes // (8 * columns)
    body_end = state[START] + _PREFIX_NBYTES + length
    state[START] = body_end
    if is_unix:
        for row_at in range(rows_at, rows_at + rows_nbytes, 24):
            memmove(address + load_i64(row_at + 8), source + load_i64(row_at), load_i64(row_at + 16))
    elif not _receive(fd, state, scratch, buffer, rows_at, num_rows, address, nbytes):
        return _left(inside, waiting, ENDED)
    why = _left(inside, waiting, _TAKEN)
    if _is_gone(fd, scratch):
        state[ERRNO] = 0
        return ENDED
    _count(landed, nbytes, num_rows, _now_s(scratch) - begun_s)
    if notify:  # Python says that it is done
        state[NOTE_END] = body_end
        state[PAYLOAD_AT] = body_end - payload_nbytes
        state[TAG_AT] = body_end - payload_nbytes - tag_nbytes
        state[ACK_SEQ], state[ACK_NBYTES] = seq, nbytes
        return NOTE
    state[LAST_SEQ] = seq
    _queue_ack(fd, state, scratch, seq, nbytes)
    return why


@numba.njit
def _take_notify(state, buffer, length):  # type: ignore[no-untyped-def]
    at = buffer.ctypes.data + state[START] + _PREFIX_NBYTES
    if length < _NOTIFY_NBYTES:
        return FRAME
    seq, tag_nbytes, payload_nbytes = load_i64(at), np.int64(load_u32(at + 8)), np.int64(load_u32(at + 12))
    if _NOTIFY_NBYTES + tag_nbytes + payload_nbytes != length or seq <= state[LAST_SEQ]:
        return FRAME
    state[START] += _PREFIX_NBYTES + length
    state[NOTE_END] = state[START]
    state[PAYLOAD_AT] = state[START] - payload_nbytes
    state[TAG_AT] = state[START] - payload_nbytes - tag_nbytes
    state[ACK_SEQ], state[ACK_NBYTES] = seq, 0
    return NOTE


@numba.njit
def _take_read(fd, state, scratch, buffer, length, words, inside, waiting, served):  # type: ignore[no-untyped-def]
    at = buffer.ctypes.data + state[START] + _PREFIX_NBYTES
    if length < _READ_NBYTES:
        return FRAME
    seq, region, token, nbytes = load_i64(at), load_u64(at + 8), load_u64(at + 16), load_i64(at + 24)
    rows_at, rows_nbytes = at + _READ_NBYTES, length - _READ_NBYTES
    begun_s = _now_s(scratch)
    address, start, end = enter(words, inside, token, region, np.uint64(READ))
    if address == 0:
        return FRAME
    if not _are_within(rows_at, rows_nbytes, 2, 0, start, end, nbytes):
        return _left(inside, waiting, FRAME)
    state[START] += _PREFIX_NBYTES + length
    _queue_ack(fd, state, scratch, seq, nbytes)
    if not _gather(fd, state, scratch, rows_at, rows_nbytes // 16, address):
        return _left(inside, waiting, ENDED)
    _count(served, nbytes, rows_nbytes // 16, _now_s(scratch) - begun_s)
    return _left(inside, waiting, _TAKEN)


@numba.njit
def _are_within(rows_at, rows_nbytes, columns, column, start, end, nbytes):  # type: ignore[no-untyped-def]
    """Whether all rows lie in the window, and are of `nbytes` together: what parse_rows and within ask."""
    if rows_nbytes <= 0 or rows_nbytes % (8 * columns) or rows_nbytes > 8 * columns * MAX_PART_ROWS:
        return False
    total = np.int64(0)
    for row_at in range(rows_at, rows_at + rows_nbytes, 8 * columns):
        offset, row_nbytes = load_i64(row_at + 8 * column), load_i64(row_at + 8 * (columns - 1))
        if row_nbytes < 0 or row_nbytes > MAX_PART_NBYTES or row_nbytes > end - start:
            return False
        if offset < start or offset > end - row_nbytes:
            return False
        total += row_nbytes
    return total == nbytes and nbytes <= MAX_PART_NBYTES


@numba.njit
def _source(sources, source_id):  # type: ignore[no-untyped-def]
    for index in range(sources.shape[0]):
        if sources[index, 0] == source_id:
            return sources[index, 1], sources[index, 2]
    return np.int64(0), np.int64(-1)


@numba.njit
def _left(inside, waiting, why):  # type: ignore[no-untyped-def]
    """Leave the fence. Who returns for another reason anyway does not forget whom it leaves waiting: Python asks."""
    return LEFT if leave(inside, waiting) and why == _TAKEN else why


@numba.njit
def _fill(fd, is_unix, state, scratch, buffer, nbytes):  # type: ignore[no-untyped-def]
    """Have so many bytes in the buffer; sends what is to be sent before it blocks. Returns why not, or 0."""
    unread = state[END] - state[START]
    if unread >= nbytes:
        return 0
    base = buffer.ctypes.data
    if state[START] and (unread == 0 or state[START] + max(nbytes, unread + _AHEAD_NBYTES) > len(buffer)):
        memmove(base, base + state[START], unread)
        state[START], state[END] = 0, unread
    while state[END] - state[START] < nbytes:
        missing = nbytes - (state[END] - state[START])
        room = min(len(buffer) - state[END], max(missing, _AHEAD_NBYTES))
        flags = MSG_DONTWAIT if state[OUT_NBYTES] else 0
        received = _receive_some(fd, is_unix, scratch, base + state[END], room, flags)
        if received > 0:
            state[END] += received
            if is_unix and scratch[_MESSAGE_AT + 5]:
                state[CONTROL_NBYTES] = scratch[_MESSAGE_AT + 5]
                return DESCRIPTORS
            continue
        errno = load_i32(errno_location()) if received else np.int32(0)
        if errno == EINTR:
            continue
        if errno == EAGAIN and flags:
            if not _flush(fd, state, scratch):
                return ENDED
            continue
        state[ERRNO] = errno
        return ENDED
    return 0


@numba.njit
def _receive_some(fd, is_unix, scratch, address, nbytes, flags):  # type: ignore[no-untyped-def]
    if not is_unix:
        return recv(fd, address, nbytes, np.int32(flags))
    words = scratch.ctypes.data
    scratch[_VIEWS_AT], scratch[_VIEWS_AT + 1] = address, nbytes
    _address_message(scratch, 1)
    scratch[_MESSAGE_AT + 4], scratch[_MESSAGE_AT + 5] = words + 8 * CONTROL_AT, MAX_CONTROL_NBYTES
    return recvmsg(fd, words + 8 * _MESSAGE_AT, np.int32(flags | MSG_CMSG_CLOEXEC))


@numba.njit
def _address_message(scratch, num_views):  # type: ignore[no-untyped-def]
    """A msghdr of the first views: no name, no control messages."""
    words = scratch.ctypes.data
    for place in range(7):
        scratch[_MESSAGE_AT + place] = 0
    scratch[_MESSAGE_AT + 2], scratch[_MESSAGE_AT + 3] = words + 8 * _VIEWS_AT, num_views


@numba.njit
def _receive(fd, state, scratch, buffer, rows_at, num_rows, address, nbytes):  # type: ignore[no-untyped-def]
    """The payload into its rows, first what is in the buffer. False: the connection ended."""
    buffered = state[END] - state[START]
    if nbytes > buffered and not _flush(fd, state, scratch):
        return False
    base = buffer.ctypes.data
    views, row = 0, 0
    while row < num_rows or views:
        while row < num_rows and views < _MAX_VIEWS:
            to, left = address + load_i64(rows_at + 16 * row), load_i64(rows_at + 16 * row + 8)
            row += 1
            ready = min(left, state[END] - state[START])
            if ready:
                memmove(to, base + state[START], ready)
                state[START] += ready
            if left > ready:
                scratch[_VIEWS_AT + 2 * views], scratch[_VIEWS_AT + 2 * views + 1] = to + ready, left - ready
                views += 1
        if views and not _move_views(fd, state, scratch, views, False):
            return False
        views = 0
    return True


@numba.njit
def _gather(fd, state, scratch, rows_at, num_rows, address):  # type: ignore[no-untyped-def]
    """Send what is to be sent, and the rows after it. False: the connection ended."""
    scratch[_VIEWS_AT], scratch[_VIEWS_AT + 1] = scratch.ctypes.data + 8 * _OUT_AT, state[OUT_NBYTES]
    state[OUT_NBYTES] = 0
    views, row = 1, 0
    while row < num_rows or views:
        while row < num_rows and views < _MAX_VIEWS:
            left = load_i64(rows_at + 16 * row + 8)
            if left:
                scratch[_VIEWS_AT + 2 * views] = address + load_i64(rows_at + 16 * row)
                scratch[_VIEWS_AT + 2 * views + 1] = left
                views += 1
            row += 1
        if views and not _move_views(fd, state, scratch, views, True):
            return False
        views = 0
    return True


@numba.njit
def _move_views(fd, state, scratch, views, sending):  # type: ignore[no-untyped-def]
    """Receive into, or send, all of the first views."""
    words = scratch.ctypes.data
    first = 0
    while first < views:
        _address_message(scratch, views - first)
        scratch[_MESSAGE_AT + 2] = words + 8 * (_VIEWS_AT + 2 * first)
        if sending:
            moved = sendmsg(fd, words + 8 * _MESSAGE_AT, np.int32(MSG_NOSIGNAL))
        else:
            moved = recvmsg(fd, words + 8 * _MESSAGE_AT, np.int32(MSG_WAITALL))
        if moved <= 0:
            errno = load_i32(errno_location()) if moved else np.int32(0)
            if errno == EINTR:
                continue
            state[ERRNO] = errno
            return False
        while first < views and moved >= scratch[_VIEWS_AT + 2 * first + 1]:
            moved -= scratch[_VIEWS_AT + 2 * first + 1]
            first += 1
        if moved:
            scratch[_VIEWS_AT + 2 * first] += moved
            scratch[_VIEWS_AT + 2 * first + 1] -= moved
    return True


@numba.njit
def _queue_ack(fd, state, scratch, seq, nbytes):  # type: ignore[no-untyped-def]
    """Answers go out together, before the loop blocks or returns."""
    if state[OUT_NBYTES] >= _MAX_ACKS * _ACK_NBYTES:
        _flush(fd, state, scratch)
    at = scratch.ctypes.data + 8 * _OUT_AT + state[OUT_NBYTES]
    store_i64(at, state[ACK_HEAD])
    store_i32(at + 8, np.int32(16))
    store_i64(at + 12, seq)
    store_i64(at + 20, nbytes)
    state[OUT_NBYTES] += _ACK_NBYTES


@numba.njit
def _flush(fd, state, scratch):  # type: ignore[no-untyped-def]
    """Send the answers. False: the connection ended."""
    at, left = scratch.ctypes.data + 8 * _OUT_AT, state[OUT_NBYTES]
    state[OUT_NBYTES] = 0
    while left:
        sent = send(fd, at, left, np.int32(MSG_NOSIGNAL))
        if sent < 0:
            errno = load_i32(errno_location())
            if errno == EINTR:
                continue
            state[ERRNO] = errno
            return False
        at, left = at + sent, left - sent
    return True


@numba.njit
def _is_gone(fd, scratch):  # type: ignore[no-untyped-def]
    """Whether the other side closed, cut or died, though bytes of it may be unread."""
    scratch[_POLL_AT] = np.int64(fd) | (np.int64(POLLRDHUP) << 32)
    return poll(scratch.ctypes.data + 8 * _POLL_AT, np.int64(1), np.int32(0)) > 0


@numba.njit
def _now_s(scratch):  # type: ignore[no-untyped-def]
    clock_gettime(np.int32(_CLOCK_MONOTONIC), scratch.ctypes.data + 8 * _TIME_AT)
    return np.float64(scratch[_TIME_AT]) + 1e-9 * np.float64(scratch[_TIME_AT + 1])


@numba.njit
def _count(sums, nbytes, slices, seconds):  # type: ignore[no-untyped-def]
    sums[0] += nbytes
    sums[1] += slices
    sums[2] += 1
    sums[3] += seconds
    bucket, steps = _FIRST_BUCKET, np.int64(seconds * _PER_FIRST_EDGE)
    while steps > 0 and bucket < len(sums) - 1:
        steps >>= 1
        bucket += 1
    sums[bucket] += 1
