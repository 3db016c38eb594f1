"""Socket I/O in compiled code, without the GIL: frames into a buffer, payloads into their rows, answers in batches.

Every compiled function takes a connection's SOCKET record (`messenger.native.records`), called `io`, which holds the
buffer and the memory for arguments of system calls. One thread at a time uses a record; a `shutdown` of the socket by
any thread ends its blocking calls.
"""

import errno
import functools
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from jit.compiling import compiled
from messenger.link import LOW_WATER_MIN_NBYTES, BufferedLink, LinkClosed, low_water_mark
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
    address_of,
    clock_gettime,
    errno_location,
    getsockopt,
    load_i32,
    memmove,
    poll,
    record_at,
    recv,
    recvmsg,
    send,
    sendmsg,
    setsockopt,
)
from messenger.native.records import (
    ACK_BODY_NBYTES,
    ACK_FRAME,
    CONTINUE,
    DESCRIPTORS,
    ENDED,
    MAX_ACKS,
    MAX_CONTROL_NBYTES,
    MAX_VIEWS,
    ROW,
    SOCKET,
    field_views,
)

SPIN_S = 50e-6
"""Longest spin before a thread sleeps: about as long as putting it to sleep and waking it takes."""
_LEAST_CORES = 4
_MAX_VAIN_SPINS = 6  # then 64 waits begin without a spin
_LONG_WAIT_MS = 500  # bounds the delay of a signal that arrives between two calls, which interrupts neither
_CLOCK_MONOTONIC = 1
_CONTROL_HEAD = struct.Struct("@Nii")
_AHEAD_NBYTES = 4096  # bytes received beyond a frame; those of a payload are copied again
_ACK_NBYTES = ACK_FRAME.itemsize
_ROW_NBYTES = ROW.itemsize
_OPTION_NBYTES = 4

socket_at, row_at = record_at(SOCKET), record_at(ROW)
_low_water_mark: Any = njit(low_water_mark)


class SocketState:
    """SOCKET record of a link. Used by one thread at a time, between `borrow` and `give_back` of the link's buffer."""

    def __init__(self, link: BufferedLink) -> None:
        self._link = link
        self._record = np.zeros(1, SOCKET)
        self.address = int(self._record.ctypes.data)
        """Address of the record, the argument of compiled functions."""
        self.fields: Any = field_views(self._record)
        """Memoryviews of the record's scalar fields, by name."""
        self.buffer = memoryview(b"")
        self.fields.fd[0] = link.fileno()
        # With few cores, a spin takes the core on which the other side, or something else, could run.
        self.fields.spin_s[0] = SPIN_S if len(os.sched_getaffinity(0)) >= _LEAST_CORES else 0.0

    def borrow(self, nbytes: int = 0) -> None:
        """Borrow the link's buffer, grown to at least `nbytes`."""
        fields = self.fields
        buffer, fields.start[0], fields.end[0] = self._link.lend_buffer(nbytes)
        if buffer is not self.buffer:
            self.use(buffer)

    def use(self, buffer: memoryview) -> None:
        """Set the buffer, the link's."""
        self.buffer, self.fields.buffer_nbytes[0] = buffer, len(buffer)
        self.fields.buffer[0] = np.frombuffer(buffer, np.uint8).ctypes.data

    def give_back(self) -> None:
        """Return the buffer to the link, with the bytes that the compiled code has not consumed."""
        self._link.return_buffer(self.fields.start[0], self.fields.end[0])

    def passed_fds(self) -> list[int]:
        """Return the descriptors in the `control_nbytes` bytes of received control messages (cmsg(3))."""
        control = bytes(self._record["control"][0, : self.fields.control_nbytes[0]])
        fds: list[int] = []
        while len(control) >= _CONTROL_HEAD.size:
            length, _, _ = _CONTROL_HEAD.unpack_from(control)  # SCM_RIGHTS: sockets get no other kind by default
            data = control[_CONTROL_HEAD.size : length]
            fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
            control = control[max(-(-length // 8) * 8, _CONTROL_HEAD.size) :]
        return fds

    def error(self) -> OSError:
        """Return the error that ended the connection."""
        number: int = self.fields.errno[0]
        return (
            OSError(number, os.strerror(number))
            if number
            else LinkClosed(f"{self._link.address} closed the connection")
        )


class NativeReceiver:
    """Compiled parts of a link's receiving side, without the GIL, for threads that handle messages in Python.

    A payload is received into its rows by one call. The thread acquires the GIL only once for it, however often it
    sleeps. It also does so after a signal, or if nothing arrived for half a second, so that Python can handle a Ctrl-C
    although the sender is stalled. Used by one thread at a time.
    """

    def __init__(self, link: BufferedLink, *, is_unix: bool) -> None:
        self._socket = SocketState(link)
        self._socket.fields.interruptible[0] = 1
        self._socket.fields.is_unix[0] = is_unix
        self._receive_some = _receiving_some()

    def receive_some(self, buffer: memoryview, start: int, nbytes: int) -> tuple[int, list[int]]:
        """Receive 1 to `nbytes` bytes at `start` of a buffer of the link. Raises OSError.

        Polls the socket for a moment before it sleeps; see the compiled `spin`. Returns the number of bytes, 0 when the
        other side closed, and the descriptors that came with them.
        """
        sock = self._socket
        if buffer is not sock.buffer:
            sock.use(buffer)
        while True:
            received: int = self._receive_some(sock.address, start, nbytes)
            if received >= 0:
                return received, sock.passed_fds() if sock.fields.control_nbytes[0] else []
            if sock.fields.errno[0] != errno.EINTR:
                raise sock.error()

    def receive(self, address: int, rows: bytes, nbytes: int) -> None:
        """Receive `nbytes` bytes into rows, int64 [n, 2] of (offset from the address, bytes). Raises OSError."""
        left, receive = np.frombuffer(rows, np.int64), receive_rows()
        fields = self._socket.fields
        self._socket.borrow()
        try:
            while not receive(self._socket.address, address, left, nbytes):
                if fields.errno[0] != errno.EINTR:
                    raise self._socket.error()
                left, nbytes = _after(left, nbytes - fields.left_nbytes[0]), fields.left_nbytes[0]
        finally:
            self._socket.give_back()


def _after(rows: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.int64]:
    """Return what is left of the rows after their first `nbytes` bytes, which are not all."""
    ends = np.cumsum(rows[1::2])
    whole = int(np.searchsorted(ends, nbytes, side="right"))
    rest = rows[2 * whole :].copy()
    begun = nbytes - (int(ends[whole - 1]) if whole else 0)
    rest[0] += begun
    rest[1] -= begun
    return rest


@functools.cache
def receive_rows() -> Any:
    """Return `receive(socket, address, rows, nbytes) -> complete`, compiled or loaded from the cache at first use."""
    rows = types.Array(types.int64, 1, "C", readonly=True)
    return compiled(_receive, types.boolean(types.int64, types.int64, rows, types.int64))


@functools.cache
def _receiving_some() -> Any:
    return compiled(_spin_and_receive, types.int64(types.int64, types.int64, types.int64))


def _spin_and_receive(socket, start, nbytes):  # type: ignore[no-untyped-def]
    io = socket_at(socket)
    io.control_nbytes = 0
    spin(io)
    received = _receive_some(io, io.buffer + start, nbytes, 0)
    if received < 0:
        io.errno = load_i32(errno_location())
    elif io.is_unix:
        io.control_nbytes = io.message.control_nbytes
    return received


def _receive(socket, address, rows, nbytes):  # type: ignore[no-untyped-def]
    return receive(socket_at(socket), np.int64(rows.ctypes.data), len(rows) // 2, address, nbytes)


# Compiled functions.


@njit
def fill(io, nbytes):  # type: ignore[no-untyped-def]
    """Receive until the buffer has at least `nbytes`. Sends pending answers before it blocks.

    Returns CONTINUE, or DESCRIPTORS or ENDED if it has less.
    """
    unread = io.end - io.start
    if unread >= nbytes:
        return CONTINUE
    if io.start and (unread == 0 or io.start + max(nbytes, unread + _AHEAD_NBYTES) > io.buffer_nbytes):
        memmove(io.buffer, io.buffer + io.start, unread)
        io.start, io.end = 0, unread
    while io.end - io.start < nbytes:
        missing = nbytes - (io.end - io.start)
        room = min(io.buffer_nbytes - io.end, max(missing, _AHEAD_NBYTES))
        if not io.num_acks:
            spin(io)
        flags = MSG_DONTWAIT if io.num_acks else 0
        received = _receive_some(io, io.buffer + io.end, room, flags)
        if received > 0:
            io.end += received
            if io.is_unix and io.message.control_nbytes:
                io.control_nbytes = io.message.control_nbytes
                return DESCRIPTORS
            continue
        number = load_i32(errno_location()) if received else np.int32(0)
        if number == EINTR:
            continue
        if number == EAGAIN and flags:
            if not flush(io):
                return ENDED
            continue
        io.errno = number
        return ENDED
    return CONTINUE


@njit
def spin(io):  # type: ignore[no-untyped-def]
    """Wait a moment for bytes without sleeping: waking a thread takes longer than serving a small request.

    If nothing arrives, the next waits begin without a spin: 2, then 4, up to 64 of them, until one has succeeded again.
    A connection that is seldom used therefore costs almost nothing.
    """
    if io.spins_to_skip > 0:
        io.spins_to_skip -= 1
        return
    if io.spin_s <= 0:
        return
    until_s = now_s(io) + io.spin_s
    while True:
        if _await(io, POLLIN | POLLRDHUP, 0):
            io.vain_spins = 0
            return
        if now_s(io) >= until_s:
            break
    io.vain_spins = min(io.vain_spins + 1, _MAX_VAIN_SPINS)
    io.spins_to_skip = 1 << io.vain_spins


@njit
def now_s(io):  # type: ignore[no-untyped-def]
    """Return the monotonic time."""
    clock_gettime(np.int32(_CLOCK_MONOTONIC), address_of(io.time))
    return np.float64(io.time.seconds) + 1e-9 * np.float64(io.time.nanoseconds)


@njit
def _receive_some(io, address, nbytes, flags):  # type: ignore[no-untyped-def]
    if not io.is_unix:
        return recv(io.fd, address, nbytes, np.int32(flags))
    _set_view(io, 0, address, nbytes)
    _address_views(io, 0, 1)
    io.message.control, io.message.control_nbytes = np.int64(io.control.ctypes.data), MAX_CONTROL_NBYTES
    return recvmsg(io.fd, address_of(io.message), np.int32(flags | MSG_CMSG_CLOEXEC))


@njit
def _set_view(io, index, address, nbytes):  # type: ignore[no-untyped-def]
    io.views[index].base = address
    io.views[index].nbytes = nbytes


@njit
def _address_views(io, first, end):  # type: ignore[no-untyped-def]
    """Set the msghdr to views [first, end), without name and control messages."""
    message = io.message
    message.name, message.name_nbytes = 0, 0
    message.views, message.num_views = address_of(io.views[first]), end - first
    message.control, message.control_nbytes = 0, 0
    message.flags = 0


@njit
def receive(io, rows_at, num_rows, address, nbytes):  # type: ignore[no-untyped-def]
    """Receive a payload of `nbytes` into rows (ROW records at `rows_at`, offsets from `address`).

    Bytes that are in the buffer come first. Returns False if the connection ended, or if it was interrupted (see
    `interruptible`).
    """
    left = nbytes - min(nbytes, io.end - io.start)
    if left and not flush(io):
        return False
    mark = _low_water_mark(left, _receive_buffer_nbytes(io)) if left >= LOW_WATER_MIN_NBYTES else np.int64(0)
    num_views, index = 0, 0
    while index < num_rows:
        while index < num_rows and num_views < MAX_VIEWS:
            row = row_at(rows_at + _ROW_NBYTES * index)
            to, missing = address + row.offset, row.nbytes
            index += 1
            ready = min(missing, io.end - io.start)
            if ready:
                memmove(to, io.buffer + io.start, ready)
                io.start += ready
            if missing > ready:
                _set_view(io, num_views, to + ready, missing - ready)
                num_views += 1
        left = _receive_views(io, num_views, mark, left)
        if left < 0:
            break
        num_views = 0
    if mark:
        _set_low_water_mark(io, 1)
    return left >= 0


@njit
def _receive_buffer_nbytes(io):  # type: ignore[no-untyped-def]
    option = io.option
    option.value, option.value_nbytes = 0, _OPTION_NBYTES
    at = address_of(option)
    getsockopt(io.fd, np.int32(SOL_SOCKET), np.int32(SO_RCVBUF), at, at + _OPTION_NBYTES)
    return np.int64(option.value)


@njit
def _set_low_water_mark(io, nbytes):  # type: ignore[no-untyped-def]
    """Set SO_RCVLOWAT: a thread that waits for bytes is woken when `nbytes` are there, or at the end."""
    io.option.value = np.int32(nbytes)
    setsockopt(io.fd, np.int32(SOL_SOCKET), np.int32(SO_RCVLOWAT), address_of(io.option), np.int32(_OPTION_NBYTES))


@njit
def _receive_views(io, num_views, mark, left):  # type: ignore[no-untyped-def]
    """Fill the first `num_views` views. With a `mark` > 0, wait for that many bytes at a time.

    `left` is the number of bytes of the payload still to come. Returns the number left after these views; -1 if the
    connection ended or was interrupted.
    """
    first = 0
    while first < num_views:
        if mark:
            _set_low_water_mark(io, min(mark, left))
            ready = _await(io, POLLIN | POLLRDHUP, _LONG_WAIT_MS if io.interruptible else -1)
            if not ready and io.interruptible:
                return _interrupted(io, left)
        _address_views(io, first, num_views)
        # With a mark, never sleep in the call: after copying some bytes it would wait for another whole mark.
        flags = np.int32(MSG_DONTWAIT if mark else MSG_WAITALL)
        moved = recvmsg(io.fd, address_of(io.message), flags)
        if moved <= 0:
            number = load_i32(errno_location()) if moved else np.int32(0)
            if number == EINTR and io.interruptible:
                return _interrupted(io, left)
            if number == EINTR or (mark and number == EAGAIN):
                continue
            io.errno = number
            return np.int64(-1)
        left -= moved
        first = _advance(io, first, moved)
        if first < num_views and not mark and io.interruptible:  # MSG_WAITALL returns less only after a signal
            return _interrupted(io, left)
    return left


@njit
def _interrupted(io, left):  # type: ignore[no-untyped-def]
    io.errno, io.left_nbytes = EINTR, left
    return np.int64(-1)


@njit
def gather(io, rows_at, num_rows, address):  # type: ignore[no-untyped-def]
    """Send the pending answers, and then the bytes of the rows. Returns False if the connection ended."""
    _set_view(io, 0, np.int64(io.acks.ctypes.data), _ACK_NBYTES * io.num_acks)
    io.num_acks = 0
    num_views, index = 1, 0
    while index < num_rows or num_views:
        while index < num_rows and num_views < MAX_VIEWS:
            row = row_at(rows_at + _ROW_NBYTES * index)
            if row.nbytes:
                _set_view(io, num_views, address + row.offset, row.nbytes)
                num_views += 1
            index += 1
        if num_views and not _send_views(io, num_views):
            return False
        num_views = 0
    return True


@njit
def _send_views(io, num_views):  # type: ignore[no-untyped-def]
    first = 0
    while first < num_views:
        _address_views(io, first, num_views)
        moved = sendmsg(io.fd, address_of(io.message), np.int32(MSG_NOSIGNAL))
        if moved < 0:
            number = load_i32(errno_location())
            if number == EINTR:
                continue
            io.errno = number
            return False
        first = _advance(io, first, moved)
    return True


@njit
def _advance(io, first, moved):  # type: ignore[no-untyped-def]
    """Advance the views by the bytes moved. Returns the index of the first view that is not complete."""
    while moved and moved >= io.views[first].nbytes:
        moved -= io.views[first].nbytes
        first += 1
    if moved:
        io.views[first].base += moved
        io.views[first].nbytes -= moved
    return first


@njit
def queue_ack(io, seq, nbytes):  # type: ignore[no-untyped-def]
    """Append an Ack; answers are sent together, before the loop blocks or returns."""
    if io.num_acks >= MAX_ACKS:
        flush(io)
    ack = io.acks[io.num_acks]
    ack.head, ack.body_nbytes = io.ack_head, ACK_BODY_NBYTES
    ack.seq, ack.nbytes = seq, nbytes
    io.num_acks += 1


@njit
def flush(io):  # type: ignore[no-untyped-def]
    """Send the pending answers. Returns False if the connection ended."""
    at, left = np.int64(io.acks.ctypes.data), _ACK_NBYTES * io.num_acks
    io.num_acks = 0
    while left:
        sent = send(io.fd, at, left, np.int32(MSG_NOSIGNAL))
        if sent < 0:
            number = load_i32(errno_location())
            if number == EINTR:
                continue
            io.errno = number
            return False
        at, left = at + sent, left - sent
    return True


@njit
def peer_is_gone(io):  # type: ignore[no-untyped-def]
    """Return True if the other side closed, cut or died, even though bytes of it may still be unread."""
    return _await(io, POLLRDHUP, 0)


@njit
def _await(io, events, timeout_ms):  # type: ignore[no-untyped-def]
    """Wait for these events of the socket, at most `timeout_ms` (-1: no limit). Returns False if none occurred."""
    io.poll.fd, io.poll.events, io.poll.revents = io.fd, np.int16(events), np.int16(0)
    return poll(address_of(io.poll), np.int64(1), np.int32(timeout_ms)) > 0
