"""The compiled loop of an owner's connection: takes the requests that are in perfect order, and leaves all others.

It runs without the GIL, blocks in the system's calls, and does exactly what `messenger.inbound` does with a write, a
notify or a read whose frame is well formed, comes for the first time, and is covered by a grant. Whatever else stands
at the front of the connection it leaves there, untouched, for that code, which stays the only one to refuse, to answer
again and to complain. The wire's layout is that of `messenger.frames`.

All that a connection's loop works on is named in its `state` (`messenger.native.socket_io`): `landed` and `served`,
float64, laid out as `messenger.counters.Flow` has its sums; `sources` int64 [n, 3], the (id, address, bytes) of the
memory that the caller has offered; `words`, `inside` and `waiting` of `messenger.native.grant_slots`.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray

from jit.compiling import compiled
from messenger.counters import FIRST_EDGE_S, NUM_SUMS
from messenger.frames import MAX_PART_NBYTES, MAX_PART_ROWS, PREFIX
from messenger.native.grant_slots import NUM_WORDS, READ, WRITE, enter, leave
from messenger.native.libc import (
    clock_gettime,
    load_i64,
    load_u32,
    load_u64,
    memmove,
    pointer_f64,
    pointer_i64,
    pointer_u8,
    pointer_u64,
)
from messenger.native.socket_io import (
    ACK_NBYTES,
    ACK_SEQ,
    BUFFER,
    BUFFER_NBYTES,
    ENDED,
    ERRNO,
    FD,
    FRAME,
    GROW,
    HIGHEST_REFUSED,
    INSIDE,
    IS_UNIX,
    LANDED,
    LAST_SEQ,
    LEFT,
    NOTE,
    NOTE_END,
    NOTIFY_HEAD,
    NUM_SCRATCH,
    NUM_SOURCES,
    PAYLOAD_AT,
    READ_HEAD,
    SCRATCH,
    SERVED,
    SLOTS,
    SOURCES,
    START,
    TAG_AT,
    TIME_AT,
    WAITING,
    WANTED,
    WRITE_HEAD,
    fill,
    flush,
    gather,
    is_gone,
    queue_ack,
    receive,
)

__all__ = ["owner_loop"]

_PREFIX_NBYTES = PREFIX.size
_WRITE_NBYTES, _NOTIFY_NBYTES, _READ_NBYTES = 64, 16, 32
_CLOCK_MONOTONIC = 1
_PER_FIRST_EDGE = 1 / FIRST_EDGE_S
_FIRST_BUCKET = 4
_TAKEN = 0  # by what takes one request: it is done, go on


@functools.cache
def owner_loop() -> Any:
    """`loop(state) -> why it returned`. Compiled, or loaded from the cache, at the first call."""
    return compiled(_serve, types.int64(types.Array(types.int64, 1, "C")))


def _serve(state):  # type: ignore[no-untyped-def]
    fd, is_unix = np.int32(state[FD]), state[IS_UNIX] != 0
    scratch = carray(pointer_i64(state[SCRATCH]), NUM_SCRATCH)
    buffer = carray(pointer_u8(state[BUFFER]), state[BUFFER_NBYTES])
    words = carray(pointer_u64(state[SLOTS]), NUM_WORDS)
    inside, waiting = carray(pointer_u64(state[INSIDE]), 1), carray(pointer_u64(state[WAITING]), 1)
    sources = carray(pointer_i64(state[SOURCES]), (state[NUM_SOURCES], 3))
    landed = carray(pointer_f64(state[LANDED]), NUM_SUMS)
    served = carray(pointer_f64(state[SERVED]), NUM_SUMS)
    if state[ACK_SEQ]:
        queue_ack(fd, state, scratch, state[ACK_SEQ], state[ACK_NBYTES])
        state[ACK_SEQ] = 0
    base = buffer.ctypes.data
    while True:
        why = fill(fd, is_unix, state, scratch, buffer, _PREFIX_NBYTES)
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
        why = fill(fd, is_unix, state, scratch, buffer, _PREFIX_NBYTES + length)
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
    if why != ENDED and not flush(fd, state, scratch):
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
    if seq <= state[LAST_SEQ] or operation <= state[HIGHEST_REFUSED]:
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
    if is_gone(fd, scratch):
        return _left(inside, waiting, ENDED)
    num_rows = rows_nbytes // (8 * columns)
    body_end = state[START] + _PREFIX_NBYTES + length
    state[START] = body_end
    if is_unix:
        for row_at in range(rows_at, rows_at + rows_nbytes, 24):
            memmove(address + load_i64(row_at + 8), source + load_i64(row_at), load_i64(row_at + 16))
    elif not receive(fd, state, scratch, buffer, rows_at, num_rows, address, nbytes):
        return _left(inside, waiting, ENDED)
    why = _left(inside, waiting, _TAKEN)
    if is_gone(fd, scratch):
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
    queue_ack(fd, state, scratch, seq, nbytes)
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
    queue_ack(fd, state, scratch, seq, nbytes)
    if not gather(fd, state, scratch, rows_at, rows_nbytes // 16, address):
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
def _now_s(scratch):  # type: ignore[no-untyped-def]
    clock_gettime(np.int32(_CLOCK_MONOTONIC), scratch.ctypes.data + 8 * TIME_AT)
    return np.float64(scratch[TIME_AT]) + 1e-9 * np.float64(scratch[TIME_AT + 1])


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
