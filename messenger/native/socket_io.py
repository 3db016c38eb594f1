"""A socket's bytes in compiled loops: frames into a buffer, payloads into their places, answers together; no GIL.

Every function takes a connection's own memory: `state` int64 [NUM_STATE], numbers that Python sees, too; `scratch`
int64 [NUM_SCRATCH], what the system's calls are given; `buffer` uint8, of which [START, END) was received and not yet
taken. The calls block; a `shutdown` by any thread ends them.
"""

from typing import Any

import numpy as np
from numba import njit

from messenger.frames import PREFIX
from messenger.link import LEAST_NBYTES, watermark
from messenger.native.libc import (
    EAGAIN,
    EINTR,
    MSG_CMSG_CLOEXEC,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    MSG_WAITALL,
    POLLIN,
    POLLRDHUP,
    SO_RCVBUF,
    SO_RCVLOWAT,
    SOL_SOCKET,
    errno_location,
    getsockopt,
    load_i32,
    load_i64,
    memmove,
    poll,
    recv,
    recvmsg,
    send,
    sendmsg,
    setsockopt,
    store_i32,
    store_i64,
)

# Why the loop returned.
FRAME, NOTE, LEFT, GROW, DESCRIPTORS, ENDED = range(1, 7)
"""FRAME: the frame at START is Python's. NOTE: a notification is due, [TAG_AT, PAYLOAD_AT, NOTE_END) of the buffer, and
then the answer ACK_SEQ, ACK_NBYTES. LEFT: a revoke waits for who has left the fence. GROW: the frame at START wants a
buffer of WANTED bytes. DESCRIPTORS: [DESCRIPTORS_AT] of scratch has CONTROL_NBYTES of control messages. ENDED: the
other side closed (ERRNO 0), or a call failed."""

# Places in `state`.
(
    START, END, LAST_SEQ, HIGHEST_REFUSED, ACK_SEQ, ACK_NBYTES, TAG_AT, PAYLOAD_AT, NOTE_END, WANTED, CONTROL_NBYTES,
    ERRNO, OUT_NBYTES, WRITE_HEAD, NOTIFY_HEAD, READ_HEAD, ACK_HEAD, FD, IS_UNIX, SCRATCH, BUFFER, BUFFER_NBYTES, SLOTS,
    INSIDE, WAITING, SOURCES, NUM_SOURCES, LANDED, SERVED, RETURNS, LEFT_NBYTES, NUM_STATE,
) = range(32)  # fmt: skip
"""*_HEAD: the first 8 bytes of such a frame, as one number. OUT_NBYTES: of answers that have not been sent. SCRATCH
and what follows: addresses and lengths of the loop's arrays, so that a call has one argument. RETURNS: a signal, or a
long wait, ends a call in the middle of a payload (ERRNO EINTR), of which LEFT_NBYTES are still to come."""

_MAX_VIEWS = 1024  # Linux's IOV_MAX
_LONG_WAIT_MS = 500  # a signal between two calls interrupts neither
_ACK_NBYTES = PREFIX.size + 16
_MAX_ACKS = 64
# Places in `scratch`: the answers to send, a msghdr, a pollfd, a socket option and its length, a timespec, control
# messages, views.
OUT_AT = 0
MESSAGE_AT = OUT_AT + _MAX_ACKS * _ACK_NBYTES // 8 + 1
POLL_AT = MESSAGE_AT + 7
OPTION_AT = POLL_AT + 1
TIME_AT = OPTION_AT + 2
CONTROL_AT = TIME_AT + 2
MAX_CONTROL_NBYTES = 16 + 4 * 64
VIEWS_AT = CONTROL_AT + MAX_CONTROL_NBYTES // 8
NUM_SCRATCH = VIEWS_AT + 2 * _MAX_VIEWS

_AHEAD_NBYTES = 4096  # what is received with a frame is copied once more


@njit
def fill(fd, is_unix, state, scratch, buffer, nbytes):  # type: ignore[no-untyped-def]
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
            if is_unix and scratch[MESSAGE_AT + 5]:
                state[CONTROL_NBYTES] = scratch[MESSAGE_AT + 5]
                return DESCRIPTORS
            continue
        errno = load_i32(errno_location()) if received else np.int32(0)
        if errno == EINTR:
            continue
        if errno == EAGAIN and flags:
            if not flush(fd, state, scratch):
                return ENDED
            continue
        state[ERRNO] = errno
        return ENDED
    return 0


@njit
def _receive_some(fd, is_unix, scratch, address, nbytes, flags):  # type: ignore[no-untyped-def]
    if not is_unix:
        return recv(fd, address, nbytes, np.int32(flags))
    words = scratch.ctypes.data
    scratch[VIEWS_AT], scratch[VIEWS_AT + 1] = address, nbytes
    _address_views(scratch, 0, 1)
    scratch[MESSAGE_AT + 4], scratch[MESSAGE_AT + 5] = words + 8 * CONTROL_AT, MAX_CONTROL_NBYTES
    return recvmsg(fd, words + 8 * MESSAGE_AT, np.int32(flags | MSG_CMSG_CLOEXEC))


@njit
def _address_views(scratch, first, end):  # type: ignore[no-untyped-def]
    """A msghdr of these views: no name, no control messages."""
    for place in range(7):
        scratch[MESSAGE_AT + place] = 0
    scratch[MESSAGE_AT + 2], scratch[MESSAGE_AT + 3] = scratch.ctypes.data + 8 * (VIEWS_AT + 2 * first), end - first


@njit
def receive(fd, state, scratch, buffer, rows_at, num_rows, address, nbytes):  # type: ignore[no-untyped-def]
    """The payload into its rows, first what is in the buffer. False: the connection ended, or see RETURNS."""
    left = nbytes - min(nbytes, state[END] - state[START])
    if left and not flush(fd, state, scratch):
        return False
    mark = _watermark(left, _buffer_nbytes(fd, scratch)) if left >= LEAST_NBYTES else np.int64(0)
    base = buffer.ctypes.data
    views, row = 0, 0
    while row < num_rows:
        while row < num_rows and views < _MAX_VIEWS:
            to, missing = address + load_i64(rows_at + 16 * row), load_i64(rows_at + 16 * row + 8)
            row += 1
            ready = min(missing, state[END] - state[START])
            if ready:
                memmove(to, base + state[START], ready)
                state[START] += ready
            if missing > ready:
                scratch[VIEWS_AT + 2 * views], scratch[VIEWS_AT + 2 * views + 1] = to + ready, missing - ready
                views += 1
        left = _receive_views(fd, state, scratch, views, mark, left)
        if left < 0:
            break
        views = 0
    if mark:
        _wake_at(fd, scratch, np.int64(1))
    return left >= 0


_watermark: Any = njit(watermark)


@njit
def _buffer_nbytes(fd, scratch):  # type: ignore[no-untyped-def]
    option_at = scratch.ctypes.data + 8 * OPTION_AT
    scratch[OPTION_AT], scratch[OPTION_AT + 1] = 0, 4
    getsockopt(fd, np.int32(SOL_SOCKET), np.int32(SO_RCVBUF), option_at, option_at + 8)
    return scratch[OPTION_AT]


@njit
def _wake_at(fd, scratch, nbytes):  # type: ignore[no-untyped-def]
    """From now on who waits for bytes is woken by so many, or by the end. Where there is no such option, by any."""
    scratch[OPTION_AT] = nbytes
    setsockopt(fd, np.int32(SOL_SOCKET), np.int32(SO_RCVLOWAT), scratch.ctypes.data + 8 * OPTION_AT, np.int32(4))


@njit
def _receive_views(fd, state, scratch, views, mark, left):  # type: ignore[no-untyped-def]
    """Fill the first views, by whatever comes, or, with a `mark`, by so many bytes at a time of all that are `left`.

    Returns how many are left after them; -1: the connection ended, or see RETURNS.
    """
    first = 0
    while first < views:
        if mark:
            _wake_at(fd, scratch, min(mark, left))
            if not _await(fd, scratch, POLLIN | POLLRDHUP, _LONG_WAIT_MS if state[RETURNS] else -1) and state[RETURNS]:
                return _interrupted(state, left)
        _address_views(scratch, first, views)
        # With a mark never asleep in here, where whoever has copied some would wait for as much as the mark once more.
        flags = np.int32(MSG_DONTWAIT if mark else MSG_WAITALL)
        moved = recvmsg(fd, scratch.ctypes.data + 8 * MESSAGE_AT, flags)
        if moved <= 0:
            errno = load_i32(errno_location()) if moved else np.int32(0)
            if errno == EINTR and state[RETURNS]:
                return _interrupted(state, left)
            if errno == EINTR or (mark and errno == EAGAIN):
                continue
            state[ERRNO] = errno
            return np.int64(-1)
        left -= moved
        first = _advance(scratch, first, moved)
        if first < views and not mark and state[RETURNS]:  # only a signal makes it less than all
            return _interrupted(state, left)
    return left


@njit
def _interrupted(state, left):  # type: ignore[no-untyped-def]
    state[ERRNO], state[LEFT_NBYTES] = EINTR, left
    return np.int64(-1)


@njit
def gather(fd, state, scratch, rows_at, num_rows, address):  # type: ignore[no-untyped-def]
    """Send what is to be sent, and the rows after it. False: the connection ended."""
    scratch[VIEWS_AT], scratch[VIEWS_AT + 1] = scratch.ctypes.data + 8 * OUT_AT, state[OUT_NBYTES]
    state[OUT_NBYTES] = 0
    views, row = 1, 0
    while row < num_rows or views:
        while row < num_rows and views < _MAX_VIEWS:
            left = load_i64(rows_at + 16 * row + 8)
            if left:
                scratch[VIEWS_AT + 2 * views] = address + load_i64(rows_at + 16 * row)
                scratch[VIEWS_AT + 2 * views + 1] = left
                views += 1
            row += 1
        if views and not _send_views(fd, state, scratch, views):
            return False
        views = 0
    return True


@njit
def _send_views(fd, state, scratch, views):  # type: ignore[no-untyped-def]
    first = 0
    while first < views:
        _address_views(scratch, first, views)
        moved = sendmsg(fd, scratch.ctypes.data + 8 * MESSAGE_AT, np.int32(MSG_NOSIGNAL))
        if moved < 0:
            errno = load_i32(errno_location())
            if errno == EINTR:
                continue
            state[ERRNO] = errno
            return False
        first = _advance(scratch, first, moved)
    return True


@njit
def _advance(scratch, first, moved):  # type: ignore[no-untyped-def]
    """The first view that is not done after so many bytes more."""
    while moved and moved >= scratch[VIEWS_AT + 2 * first + 1]:
        moved -= scratch[VIEWS_AT + 2 * first + 1]
        first += 1
    if moved:
        scratch[VIEWS_AT + 2 * first] += moved
        scratch[VIEWS_AT + 2 * first + 1] -= moved
    return first


@njit
def queue_ack(fd, state, scratch, seq, nbytes):  # type: ignore[no-untyped-def]
    """Answers go out together, before the loop blocks or returns."""
    if state[OUT_NBYTES] >= _MAX_ACKS * _ACK_NBYTES:
        flush(fd, state, scratch)
    at = scratch.ctypes.data + 8 * OUT_AT + state[OUT_NBYTES]
    store_i64(at, state[ACK_HEAD])
    store_i32(at + 8, np.int32(16))
    store_i64(at + 12, seq)
    store_i64(at + 20, nbytes)
    state[OUT_NBYTES] += _ACK_NBYTES


@njit
def flush(fd, state, scratch):  # type: ignore[no-untyped-def]
    """Send the answers. False: the connection ended."""
    at, left = scratch.ctypes.data + 8 * OUT_AT, state[OUT_NBYTES]
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


@njit
def is_gone(fd, scratch):  # type: ignore[no-untyped-def]
    """Whether the other side closed, cut or died, though bytes of it may be unread."""
    return _await(fd, scratch, POLLRDHUP, 0)


@njit
def _await(fd, scratch, events, timeout_ms):  # type: ignore[no-untyped-def]
    scratch[POLL_AT] = np.int64(fd) | (np.int64(events) << 32)
    return poll(scratch.ctypes.data + 8 * POLL_AT, np.int64(1), np.int32(timeout_ms)) > 0
